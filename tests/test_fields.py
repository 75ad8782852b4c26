"""FIELD_MAP knows every field of TRL's configs, with its default.

`python tests/test_fields.py` writes the tables of docs/library.md anew.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from grpo_toolbox.config.fields import (
    FIELD_MAP,
    METRIC_MAP,
    METRIC_NOTES,
    TRL_VERSION,
    default_of,
    direct_fields,
    fields_of,
)
from grpo_toolbox.config.keys import known_keys

PAGE = Path(__file__).parents[1] / "docs" / "library.md"
HOW = "python tests/test_fields.py"


def table() -> str:
    lines = ["| field | default | here | key, reason or what to use |", "|---|---|---|---|"]
    for one in FIELD_MAP.values():
        default = "[]" if one.default == [] else _shown(one.default)
        default += f"; RLOO {_shown(one.rloo_default)}" if one.has_rloo_default else ""
        only = "" if len(one.algorithms) == 2 else f" ({one.algorithms[0].upper()} only)"
        only += f" ({one.since})" if one.since else ""
        keys = ", ".join(f"`{key}`" for key in one.keys)
        note = one.note.replace("|", "\\|")
        lines.append(f"| `{one.name}`{only} | {default} | {one.status} | {'; '.join(filter(None, (keys, note)))} |")
    return "\n".join(lines)


def _shown(value: object) -> str:
    return f"`{value!r}`"


def metrics() -> str:
    lines = ["| TRL's name | ours | where it differs |", "|---|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` | {METRIC_NOTES.get(ours, '')} |" for ours, theirs in METRIC_MAP.items()]
    return "\n".join(lines)


def with_table(page: str) -> str:
    for name, made in {"fields": table(), "metrics": metrics()}.items():
        marked = rf"(<!-- {name}: {re.escape(HOW)} -->\n).*?(<!-- end -->)"
        page, count = re.subn(marked, lambda found, made=made: f"{found[1]}{made}\n{found[2]}", page, flags=re.DOTALL)
        assert count == 1, name
    return page


def test_the_tables_of_library_md_are_the_field_and_metric_maps() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), f"docs/library.md is out of date: run `{HOW}`"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_it_has_every_field_of_trls_config_with_its_default(algorithm: str) -> None:
    trl = pytest.importorskip("trl")
    if not trl.__version__.startswith(f"{TRL_VERSION}."):
        pytest.skip(f"the table is that of TRL {TRL_VERSION}")
    config = trl.GRPOConfig if algorithm == "grpo" else trl.RLOOConfig
    theirs = {one.name: one for one in dataclasses.fields(config)}
    ours = {name: one for name, one in fields_of(algorithm).items() if not one.since}
    assert set(ours) == set(theirs)
    for name, one in theirs.items():
        made = one.default_factory() if one.default is dataclasses.MISSING else one.default
        assert default_of(ours[name], algorithm) == made, name


def test_every_row_says_what_it_has_to() -> None:
    for one in FIELD_MAP.values():
        assert one.note or one.status == "supported", one.name
        assert len(one.keys) == 1 or not one.direct, one.name
        assert one.status == "supported" or not one.keys, one.name


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_values_of_direct_fields_come_back(algorithm: str) -> None:
    fields = direct_fields(algorithm)
    assert fields["rollout.group_size"].name == "num_generations"
    for one in fields.values():
        there = one.ours(default_of(one, algorithm))
        assert one.ours(one.theirs(there)) == there, one.name
    assert fields["trainer.max_grad_norm"].theirs(float("inf")) == 0.0
    assert fields["trainer.keep_checkpoints"].theirs(3) == 3


def test_metrics_are_named_once_on_either_side() -> None:
    assert len(set(METRIC_MAP.values())) == len(METRIC_MAP)
    assert set(METRIC_NOTES) <= set(METRIC_MAP)


def test_every_key_is_one_that_can_be_set() -> None:
    keys = {key for one in FIELD_MAP.values() for key in one.keys}
    options = {"advantage.name", "objective.name", "reward.components"}  # of functions, and of what was switched off
    options |= {f"callbacks.{name}" for name in ("wandb.project", "trackio.project", "trackio.space_id")}
    assert keys - {*known_keys(), *options, "callbacks.sample_logger.prompts"} == set()


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
