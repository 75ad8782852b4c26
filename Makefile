# make train | test | test-slow | lint | smollm | clean
PYTHON ?= python3.11
VENV ?= .venv
EXPERIMENT ?= grpo_tiny
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The CPU build of torch: taken where a GPU is missing and the build can be had, else pip chooses within our range.
CPU_TORCH ?= 2.13.0

.PHONY: train test test-slow lint smollm clean
.DEFAULT_GOAL := train

$(VENV)/bin/python:
	command -v $(PYTHON) >/dev/null && $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	nvidia-smi >/dev/null 2>&1 || $(PIP) "torch==$(CPU_TORCH)+cpu" || true

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	touch $(VENV)/.installed $@

train: $(VENV)/.installed $(if $(findstring smollm,$(EXPERIMENT)),smollm)
	$(BIN)/toolbox train experiment=$(EXPERIMENT) $(ARGS)

# One thread per worker: two threads beside another busy process wait for each other.
test: $(VENV)/.installed-dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

test-slow: $(VENV)/.installed-dev smollm
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

smollm: $(VENV)/.installed
	$(PIP) -e '.[gguf,word-problems]'
	$(BIN)/toolbox models get smollm2

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
