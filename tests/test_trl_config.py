"""Every key of ours on TRL: a field of TRL's, done by the toolbox, without effect, or refused by name.

`python tests/test_trl_config.py` writes the table of docs/trl.md anew.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from command_line import composed, refused
from grpo_toolbox.backends.trl_config import algorithm_of, check_trl, trl_arguments
from grpo_toolbox.backends.trl_keys import FOREIGN, IDLE, JOINT, ONLY_GRPO, OURS, PLAIN, REFUSED
from grpo_toolbox.cli.compose import read_arguments, run_jobs
from grpo_toolbox.config.fields import FIELD_MAP, direct_fields
from grpo_toolbox.config.keys import known_keys
from grpo_toolbox.config.source import groups

TRL = ("experiment=grpo_tiny", "trainer.name=trl")
PAGE = Path(__file__).parents[1] / "docs" / "trl.md"
HOW = "python tests/test_trl_config.py"


def table() -> str:
    fields = {key: f"`{one.name}`" for key, one in direct_fields("grpo").items() if key not in OURS}
    fields |= {key: f"`{one.name}` (RLOO)" for key, one in direct_fields("rloo").items() if key not in {*OURS, *fields}}
    fields |= {FIELD_MAP[name].keys[0]: f"`{name}`" for name in PLAIN}
    rows = {key: what for key, what in {**fields, **JOINT}.items() if not within(key, [*OURS])}
    rows |= {key: f"the toolbox: {how}" for key, how in OURS.items()}
    rows |= {key: f"no effect: {why}" for key, why in IDLE.items()}
    rows |= {key: f"refused: {why}" for key, (_, why) in REFUSED.items()}
    lines = [f"| `{key}` | {what} |" for key, what in sorted(rows.items())]
    return "\n".join(["| key | on TRL |", "|---|---|", *lines])


def with_table(page: str) -> str:
    marked = rf"(<!-- keys: {HOW} -->\n).*?(<!-- end -->)"
    return re.sub(marked, lambda found: f"{found[1]}{table()}\n{found[2]}", page, flags=re.DOTALL)


def test_the_table_of_trl_md_is_that_of_the_keys() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert f"<!-- keys: {HOW} -->" in page
    assert page == with_table(page), f"docs/trl.md is out of date: run `{HOW}`"


def within(key: str, table: Sequence[str]) -> bool:
    """Whether a table has the key, or a group of keys that it stands in."""
    return any(key == one or key.startswith(f"{one}.") for one in table)


def homes(key: str) -> list[str]:
    """The kinds that a key is of."""
    options = [f"{group}.{name}" for group in ("advantage", "objective") for name in FOREIGN]
    plain = [FIELD_MAP[name].keys[0] for name in PLAIN]
    kinds = {
        "ours": within(key, [*OURS]),
        "a field": key in direct_fields("grpo") or key in direct_fields("rloo") or key in JOINT or key in plain,
        "idle": within(key, [*IDLE]),
        "refused": key in REFUSED or key in options,
    }
    return [kind for kind, holds in kinds.items() if holds]


def homeless() -> list[str]:
    """The keys of which nothing is said."""
    containers = {*groups(), "model.lora", "data.columns", "rollout.server", "rollout.async"}
    return [key for key in known_keys() if key not in containers and not homes(key)]


def test_every_key_has_a_home() -> None:
    assert len(known_keys()) > 150
    assert homeless() == [], f"say in backends/trl_keys.py what TRL makes of them, and run `{HOW}`"


def test_the_tables_hold_no_key_that_is_gone() -> None:
    known = {*known_keys(), "model.lora"}
    for table in (JOINT, IDLE, REFUSED, ONLY_GRPO):
        assert [key for key in table if not any(within(one, [key]) for one in known)] == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("words", [("trainer.algorithm=grpo",), ("method=rloo",)])
def test_trls_configs_have_the_fields(words: tuple[str, ...]) -> None:
    trl = pytest.importorskip("trl")
    config = composed(*TRL, *words)[0]
    known = trl.GRPOConfig if algorithm_of(config) == "grpo" else trl.RLOOConfig
    assert set(trl_arguments(config)) <= {one.name for one in dataclasses.fields(known)}


FIELDS = {
    ("objective=grpo",): {"loss_type": "grpo", "beta": 0.04, "epsilon": 0.2, "scale_rewards": "group"},
    ("objective=dapo",): {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0},
    ("objective=dr_grpo", "advantage=dr_grpo"): {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ("objective=gspo",): {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
    ("objective=cispo",): {"loss_type": "cispo", "epsilon_high": 5.0},
    ("objective=cispo", "objective.ratio_cap=null"): {"epsilon_high": 5.0},  # 1 + clip_eps_high
    ("objective=sapo", "objective.tau_neg=1.2"): {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
    ("objective=vespo",): {"loss_type": "vespo", "vespo_k_pos": 2.0, "vespo_lambda_neg": 2.0},
    ("advantage=gdpo",): {"multi_objective_aggregation": "normalize_then_sum"},
    ("advantage=batch_normalized",): {"scale_rewards": "batch"},
    ("objective.kl_unbiased=true",): {"use_bias_correction_kl": True},
    ("objective.entropy_target=0.3",): {"use_adaptive_entropy": True, "entropy_target": 0.3},
    ("rollout.top_k=5", "rollout.min_p=0.1", "rollout.temperature=0.7"): {"top_k": 5, "min_p": 0.1, "temperature": 0.7},
    ("rollout.min_new_tokens=2",): {"generation_kwargs": {"min_new_tokens": 2}},
    ("trainer.ppo_epochs=3", "trainer.seed=7"): {"num_iterations": 3, "seed": 7},
    ("model.fp32_head=true",): {"cast_lm_head_to_fp32": True},
    ("method=trl_default",): {"loss_type": "dapo", "num_generations": 8, "max_completion_length": 512},
    ("rollout.engine=vllm", "rollout.server.urls=http://gpu:8000", "rollout.min_new_tokens=2"): {
        **{"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://gpu:8000"},
        **{"generation_kwargs": {"min_tokens": 2}, "vllm_importance_sampling_correction": False},
    },
    ("rollout.engine=vllm", "rollout.vllm.mode=colocate", "rollout.vllm.tensor_parallel_size=2"): {
        **{"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.3},
        "vllm_enable_sleep_mode": True,
    },
    ("rollout.engine=vllm", "objective.correction=icepop"): {
        **{"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_correction": True},
        **{"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0},
    },
    ("rollout.engine=vllm", "objective.correction=sequence_truncate", "objective.correction_max=4"): {
        **{"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 4.0},
        "vllm_importance_sampling_clip_min": None,
    },
    ("method=rloo",): {"beta": 0.03, "normalize_advantages": False},
    ("method=rloo", "advantage.reward_max=1"): {"reward_clip_range": (float("-inf"), 1)},
}


@pytest.mark.parametrize("words", FIELDS, ids=" ".join)
def test_what_trl_is_told(words: tuple[str, ...]) -> None:
    told = trl_arguments(composed(*TRL, *words)[0])
    assert {name: told.get(name) for name in FIELDS[words]} == FIELDS[words]


REFUSALS = {
    ("method=grpo",): "advantage.std=population cannot run on TRL: ",
    ("method=dapo",): "rollout.dynamic_sampling=true cannot run on TRL: ",
    ("advantage=batch_normalized", "advantage.std_of=advantages"): "advantage.std_of=advantages cannot run on TRL: ",
    ("advantage.eps=1e-6",): "advantage.eps=1e-06 cannot run on TRL: TRL adds 1e-4",
    ("advantage=rloo", "trainer.algorithm=grpo"): "advantage.name=rloo cannot run on TRL: ",
    ("advantage=group_relative", "trainer.algorithm=rloo"): "advantage.name=group_relative cannot run on TRL's RLOO",
    ("method=ppo",): "advantage.name=gae cannot run on TRL: ",
    ("advantage=reinforce_pp",): "advantage.name=reinforce_pp cannot run on TRL: ",
    ("objective=gmpo",): "objective.name=gmpo cannot run on TRL: ",
    ("objective=reinforce",): "objective.name=reinforce cannot run on TRL: ",
    ("objective=gspo_token",): "objective.ratio_level=sequence_token cannot run on TRL: ",
    ("objective=clip_cov",): "objective.clip_cov=",
    ("objective=kl_cov",): "objective.kl_cov=",
    ("objective=sapo", "objective.loss_agg=token_mean"): "objective.loss_agg=token_mean cannot run on TRL: ",
    ("objective=dr_grpo", "objective.length=9"): "objective.length=9 cannot run on TRL: ",
    ("objective.kl=k1",): "objective.kl=k1 cannot run on TRL: ",
    ("objective.kl_in=reward", "advantage=group_relative"): "objective.kl_in=reward cannot run on TRL: ",
    ("objective.kl_target=0.1",): "objective.kl_target=0.1 cannot run on TRL: ",
    ("rollout.async.enabled=true",): "rollout.async.enabled=true cannot run on TRL: ",
    ("rollout.engine=sglang",): "rollout.engine=sglang cannot run on TRL: ",
    ("rollout.engine=vllm", "rollout.server.urls=[http://a:1,http://b:1]"): "rollout.server.urls=",
    ("rollout.engine=vllm", "rollout.server.model=mine"): "rollout.server.model=mine cannot run on TRL: ",
    ("rollout.engine=vllm", "objective.correction=geometric_mask"): "objective.correction=geometric_mask cannot run",
    ("method=rloo", "rollout.engine=vllm", "objective.correction=icepop"): "objective.correction=icepop cannot run",
    ("objective.correction=token_truncate",): "objective.correction=token_truncate cannot run on TRL: ",
    ("objective=gspo", "objective.beta=0.1", "objective.kl_unbiased=true"): "objective.kl_unbiased=true cannot run",
    ("method=rloo", "rollout.steps_per_generation=2"): "rollout.steps_per_generation=2 cannot run on TRL: ",
    ("method=rloo", "trainer.ppo_epochs=2"): "trainer.ppo_epochs=2 cannot run on TRL: ",
    ("method=rloo", "model.fp32_head=true"): "model.fp32_head=true cannot run on TRL: ",
    ("method=rloo", "objective.entropy_coef=0.1"): "objective.entropy_coef=0.1 cannot run on TRL: ",
    ("rollout.group_size=1", "advantage=dr_grpo"): "rollout.group_size=1: TRL compares completions",
    ("model.lora.r=4", "trainer.reference_every=5"): "trainer.reference_every=5 cannot run on TRL: ",
    ("trainer.device=cuda:1",): "trainer.device=cuda:1: TRL takes the first GPU",
    ("trainer.algorithm=ppo",): "trainer.algorithm='ppo' is not an option: grpo, rloo.",
    ("trainer.name=other",): "trainer.name='other' is not an option: toolbox, trl.",
    ("trainer.name=toolbox", "trainer.algorithm=grpo"): "trainer.algorithm=grpo is for trainer.name=trl; ",
}


@pytest.mark.parametrize("words", REFUSALS, ids=" ".join)
def test_what_trl_cannot_do_is_refused_by_its_key(words: tuple[str, ...]) -> None:
    assert refused(*TRL, *words).startswith(REFUSALS[words])


def test_a_refusal_says_what_to_set() -> None:
    assert refused(*TRL, "advantage.std=population") == (
        "advantage.std=population cannot run on TRL: TRL divides by the sample's standard deviation. "
        "Set advantage.std=sample, or trainer.name=toolbox."
    )


def test_trainer_algorithm_rloo_alone_is_the_method() -> None:
    """As `method=rloo` is: without it nothing in an experiment of another method would be left standing."""
    # `refused` runs the command line, which adds the method; `composed` does not
    assert refused(*TRL, "trainer.algorithm=rloo", "trainer.ppo_epochs=2").startswith("trainer.ppo_epochs=2 cannot")
    assert refused(*TRL, "trainer.algorithm=rloo", "advantage=dr_grpo").startswith("advantage.name=dr_grpo cannot")


def test_what_has_no_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("trl")
    with caplog.at_level(logging.WARNING):
        check_trl(composed(*TRL, "trainer.packing=false", "rollout.max_rows=7")[0])
    assert [record.message for record in caplog.records] == [
        "without effect on TRL: rollout.max_rows=7 (TRL decodes all rows at once); trainer.packing=false (TRL pads)."
    ]
    caplog.clear()
    check_trl(composed(*TRL)[0])
    assert not caplog.records


def test_another_version_and_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.29.1")
    assert refused(*TRL).startswith("trainer.name=trl works with trl 1.15 and 1.16, not 0.29.1. Run pip install")

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.15.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refused(*TRL).startswith(
        "trl 1.15.0 computes its loss with Triton, which is not there. Install trl 1.16, or"
    )

    monkeypatch.undo()
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.15.0" if name == "trl" else version(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: ModuleSpec(name, None))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert refused(*TRL, "trainer.device=cpu").startswith("trl 1.15.0 computes its loss with Triton on a GPU, and")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_trl(composed(*TRL, "trainer.device=cpu")[0])

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert refused(*TRL).startswith("trainer.name=trl needs the package trl, which is not installed. Run pip install")


def test_it_is_checked_without_torch() -> None:
    program = (
        "import sys; from grpo_toolbox.cli.main import main; "
        "code = main(['train', 'trainer.name=trl', 'rollout.dynamic_sampling=true']); "
        "print(code, [name for name in ('torch', 'trl', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1 []"


@pytest.mark.parametrize("first", ["grpo", "rloo"])
def test_a_sweep_over_algorithms_gives_each_its_method(first: str) -> None:
    other = {"grpo": "rloo", "rloo": "grpo"}[first]
    words = [*TRL, f"trainer.algorithm={first},{other}", "trainer.seed=0,1"]
    jobs = []
    run_jobs(
        read_arguments(["--multirun", *words]),
        lambda job: jobs.append((job.trainer.algorithm, job.trainer.seed, job.advantage.name)),
    )
    advantage = {"grpo": "group_relative", "rloo": "rloo"}
    assert jobs == [(name, seed, advantage[name]) for name in (first, other) for seed in (0, 1)]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
