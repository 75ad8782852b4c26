"""The YAML files, the schema and the signatures say the same, and what they compose is checked before it is used."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import pytest
from omegaconf import OmegaConf

from command_line import composed
from grpo_toolbox.advantages import ADVANTAGES
from grpo_toolbox.callbacks import CALLBACKS, build_callbacks
from grpo_toolbox.cli.help import train_help
from grpo_toolbox.config.build import OBJECTIVES
from grpo_toolbox.config.check import CHOICES
from grpo_toolbox.config.engine import sampling
from grpo_toolbox.config.keys import known_keys, typed_keys, unknown_key
from grpo_toolbox.config.options import REGISTRIES, bind, check_named, taken_options, without_foreign
from grpo_toolbox.config.probe import check_estimator, check_surrogate
from grpo_toolbox.config.source import (
    CONF,
    HANDED_IN,
    SCHEMA_GROUPS,
    groups,
    keyword_options,
    option_names,
    registry,
    schema_keys,
)
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.models.load import DTYPES
from grpo_toolbox.objectives import Objective, build_objective
from grpo_toolbox.rewards import REWARDS, check_options
from test_trl_config import HOW, PAGE, homeless, with_table

NEEDED = {
    "model": {"file": ["model.path=builtin:tiny"]},
    "data": {"file": ["data.path=prompts.jsonl"]},
    "reward": {
        "custom": ["reward.name=grpo_toolbox.rewards:length_penalty"],
        "cosine_length": ["reward.max_tokens=512"],
        "json_schema": ["reward.schema=order.json"],
        "soft_overlong": ["reward.max_tokens=512", "reward.cache=128"],
        "llm_judge": ["reward.base_url=http://localhost:8000/v1", "reward.model=judge"],
        "reward_model": ["reward.path=judge"],
    },
}
"""What an option leaves to the user (`???`)."""
OBJECTIVE_FIELDS = {field.name: field for field in dataclasses.fields(Objective) if field.name != "surrogate"}


def yaml(group: str, option: str) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def defaults(function: Callable[..., Any], *, keyword_only: bool = True) -> dict[str, Any]:
    return {
        one.name: one.default
        for one in inspect.signature(function).parameters.values()
        if (one.kind is one.KEYWORD_ONLY or not keyword_only) and one.name not in HANDED_IN
    }


# ---- every YAML composes


def combinations(experiment: str) -> list[list[str]]:
    """Choices such that every option of every group stands beside `experiment` at least once."""
    others = [group for group in groups() if group != "experiment"]
    rows = zip_longest(*([(group, option) for option in option_names(group)] for group in others))
    lines = []
    for row in rows:
        chosen = [pair for pair in row if pair is not None]
        needed = [word for group, option in chosen for word in NEEDED.get(group, {}).get(option, [])]
        # whether there is anything to evaluate on depends on the data
        lines.append(
            [
                f"experiment={experiment}",
                "trainer.eval_every=0",
                *(f"{group}={option}" for group, option in chosen),
                *needed,
            ]
        )
    return lines


@pytest.mark.parametrize("experiment", option_names("experiment"))
def test_every_option_of_every_group_composes_with_every_experiment(experiment: str) -> None:
    for words in combinations(experiment):
        config, plain = composed(*words)
        assert config.name == experiment, words
        assert plain["reward"]["name"] == config.reward["name"]


def test_a_preset_of_rollout_chooses_the_engine_and_leaves_the_experiments_numbers() -> None:
    chosen = {option: composed(f"rollout={option}")[0].rollout for option in option_names("rollout")}
    assert {option: one.engine for option, one in chosen.items()} == {
        **{"default": "local", "async": "local", "hf": "hf"},
        **{"vllm_server": "vllm", "vllm_colocate": "vllm", "sglang_server": "sglang", "http_server": "http"},
    }
    assert {one.group_size for one in chosen.values()} == {16}
    assert (chosen["vllm_server"].vllm.mode, chosen["vllm_colocate"].vllm.mode) == ("server", "colocate")
    assert chosen["http_server"].sync.mode == "none"
    assert [option for option, one in chosen.items() if one.async_.enabled] == ["async"]


def test_the_default_is_the_tiny_experiment() -> None:
    assert composed()[0] == composed("experiment=grpo_tiny")[0]


# ---- YAML, signatures and schema agree


def objective(option: str) -> dict[str, Any]:
    _, plain = composed("~experiment", f"objective={option}")
    return dict(plain["objective"])


@pytest.mark.parametrize("option", option_names("advantage"))
def test_an_advantage_yaml_holds_the_options_of_its_function_with_their_defaults(option: str) -> None:
    values = yaml("advantage", option)
    assert values.pop("name") == option
    assert values == defaults(ADVANTAGES[option])


def test_every_advantage_has_its_yaml() -> None:
    assert set(option_names("advantage")) == set(ADVANTAGES)


@pytest.mark.parametrize("option", option_names("objective"))
def test_an_objective_yaml_holds_the_options_of_its_surrogate_and_of_every_objective(option: str) -> None:
    values = objective(option)
    surrogate = OBJECTIVES[values.pop("name")]
    assert set(values) == {*OBJECTIVE_FIELDS, *defaults(surrogate)}
    check_surrogate(build_objective(surrogate, **values))


def test_the_three_objectives_of_the_axis_are_what_their_names_promise() -> None:
    grpo, ppo, reinforce = (objective(option) for option in ("grpo", "ppo_clip", "reinforce"))
    assert (grpo["loss_agg"], grpo["kl"], grpo["beta"] > 0) == ("seq_mean_token_mean", "k3", True)
    assert (ppo["loss_agg"], ppo["beta"], ppo["name"]) == ("token_mean", 0.0, "clipped")
    assert (reinforce["beta"], reinforce["name"]) == (0.0, "reinforce")


@pytest.mark.parametrize("option", [one for one in option_names("reward") if one not in ("custom", "weighted_sum")])
def test_a_reward_yaml_holds_the_options_of_its_builder_with_their_defaults(option: str) -> None:
    values = yaml("reward", option)
    assert (values.pop("name"), values.pop("on_error")) == (option, None)
    expected = defaults(REWARDS[option], keyword_only=False)
    assert values == {key: "???" if value is inspect.Parameter.empty else value for key, value in expected.items()}


def test_every_reward_has_its_yaml_and_there_is_one_for_the_users_own() -> None:
    assert set(option_names("reward")) == {*REWARDS, "custom"}
    check_options(**yaml("reward", "weighted_sum"))


def test_the_callbacks_of_the_default_are_all_there_are_with_real_options() -> None:
    values = yaml("callbacks", "default")
    assert set(values) == set(CALLBACKS) - {"metrics_file"}  # which cannot be switched off
    assert set(yaml("callbacks", "none")) == set(values)
    for name, callback in zip(["metrics_file"], build_callbacks(yaml("callbacks", "none")), strict=True):
        assert type(callback).__name__ == CALLBACKS[name].partition(":")[2]
    for built in build_callbacks(values)[1:]:
        name = next(name for name, place in CALLBACKS.items() if place.endswith(f":{type(built).__name__}"))
        assert values[name] == defaults(type(built), keyword_only=False)


def test_the_source_says_what_the_modules_say() -> None:
    for file, name in REGISTRIES.values():
        functions = getattr(importlib.import_module(f"grpo_toolbox.{file.removesuffix('.py')}"), name)
        assert registry(file, name) == {key: function.__name__ for key, function in functions.items()}
        for function in functions.values():
            assert set(keyword_options(file, function.__name__)) == set(defaults(function))


def test_choices_are_those_of_the_code_that_reads_them() -> None:
    assert set(CHOICES["model.dtype"]) == set(DTYPES)
    assert set(CHOICES) <= set(known_keys())
    for row in zip_longest(*([f"{key}={option}" for option in options] for key, options in CHOICES.items())):
        composed(*filter(None, row))


@pytest.mark.parametrize(
    "class_name",
    ["RunConfig", *SCHEMA_GROUPS.values(), "LoraConfig", "AsyncConfig", "SyncConfig", "ProbeConfig", "ColumnsConfig"],
)
def test_every_key_of_the_schema_says_what_it_is(class_name: str) -> None:
    undocumented = {"model", "data", "rollout", "critic", "trainer"}  # groups
    undocumented |= {"reward", "advantage", "objective", "callbacks"}
    undocumented |= {"lora", "columns", "server", "async", "sync", "probe", "vllm"}  # of documented keys
    assert [name for name, _, _, meaning in schema_keys(class_name) if not meaning and name not in undocumented] == []


def test_the_help_of_a_group_shows_every_key_and_every_option() -> None:
    for group, class_name in SCHEMA_GROUPS.items():
        text = train_help([group])
        assert all(f"  {key} = " in text for key in typed_keys(group, class_name))
    for group in groups():
        text, overview = train_help([group]), train_help([])
        assert all(f"\n  {option}\n" in text for option in option_names(group))
        assert f"{group} {', '.join(option_names(group))} " in " ".join(overview.split())


def test_every_key_of_the_schema_can_be_set_from_the_command_line() -> None:
    samples = {
        "int": 3,
        "float": 0.5,
        "bool": True,
        "str": "x",
        "Any": "y",
    }
    keys = {key: kind for group, name in SCHEMA_GROUPS.items() for key, kind in typed_keys(group, name).items()}
    values: dict[str, Any] = {key: samples[kind.removesuffix(" | None")] for key, kind in keys.items()}
    values["data.chat_template_kwargs"] = {"enable_thinking": False}
    values |= {key: options[-1] for key, options in CHOICES.items()}
    values["rollout.engine"] = "local"  # other engines take no weights in flight
    values |= {"name": "n", "run_dir": "r", "resume": "r"}
    words = [f"{key}={str(value).replace(' ', '').replace(chr(39), '')}" for key, value in values.items()]
    _, plain = composed(*words)
    for key, value in values.items():
        found: Any = plain
        for part in key.split("."):
            found = found[part]
        assert found == value, key


# ---- options that come from signatures


def test_values_reach_the_engine_as_they_were_set() -> None:
    config, _ = composed("rollout.temperature=0.7", "rollout.top_k=5", "rollout.min_new_tokens=1", "trainer.seed=9")
    drawn = sampling(config)
    assert (drawn.temperature, drawn.top_k, drawn.min_new_tokens, drawn.seed) == (0.7, 5, 1, 9)


def test_bind_gives_the_function_its_options_and_refuses_others() -> None:
    def centred(rewards: Any, *, scale: float = 1.0) -> Any:
        return (rewards - rewards.mean(1, keepdim=True)) * scale

    check_estimator(bind("advantage", centred, {"scale": 2.0}), group_size=2)
    with pytest.raises(ConfigError, match=r"advantage\.scal is not an option of centred.*: scale\. Did you mean scale"):
        bind("advantage", centred, {"scal": 2.0})


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        ("advantage", {"name": "dr_grpo", "eps": 1.0}, r"advantage\.eps is not an option of dr_grpo, .*takes: none"),
        ("advantage", {"name": "group_relative", "eps": "small"}, r"advantage\.eps='small' is not a number"),
        (
            "advantage",
            {"name": "group_relative", "std": "pop"},
            r"advantage\.std='pop' is not an option: population, s",
        ),
        ("advantage", {"name": "group_relatve"}, r"'group_relatve' is not an option: .*Did you mean group_relative\?"),
        ("advantage", {"name": None}, r"advantage\.name=None: set it to the name of a function, or to my_module:my_fn"),
        ("objective", {"name": "clipped", "clip_eps": True}, r"objective\.clip_eps=True is not a number"),
        ("objective", {"name": "clipped", "beta": "x"}, r"objective\.beta='x' is not a number"),
        ("objective", {"name": "reinforce", "clip_eps": 0.1}, r"clip_eps is not an option of reinforce, which takes: "),
        ("reward", {"name": "format", "whole": 1}, r"reward\.whole=1 is not true or false"),
        ("reward", {"name": "format", "pattern": 5}, r"reward\.pattern=5 is not text or null\. Quote it"),
        (
            "reward",
            {"name": "weighted_sum", "components": [{"name": "length_penalty", "target_chars": "x"}]},
            r"reward\.components\[0\]\.target_chars='x' is not a whole number",
        ),
    ],
)
def test_names_options_and_types_are_checked_against_signatures(
    group: str, values: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_named(group, values)


@pytest.mark.parametrize("value", [1, 0.5, None])
def test_an_option_of_several_types_takes_each(value: object) -> None:
    check_named("objective", {"name": "clipped", "clip_eps_high": value})


def test_options_of_an_objective_are_its_own_and_its_surrogates() -> None:
    taken = taken_options("objective", "clipped")
    assert taken is not None
    assert {"loss_agg", "beta", "kl", "length"} < set(taken)
    assert (taken["clip_eps"], taken["clip_eps_high"]) == ("float", "float | None")


EXACT = {"name": "exact_match", "extract": "boxed", "column": "answer", "on_error": "stop"}
LENGTH = {**EXACT, "name": "length_penalty", "target_chars": 5}


@pytest.mark.parametrize(
    ("values", "given", "written", "left"),
    [
        # nothing to tidy up; a key that no function of the group has stays, to be refused
        ({**EXACT, "extrac": "boxed"}, set(), set(), {*EXACT, "extrac"}),
        # a file names another function: what came along for the former gives way …
        (LENGTH, set(), {"reward.name"}, {"name", "target_chars", "on_error"}),
        # … but not what the same file sets, which is to be refused
        (LENGTH, set(), {"reward.name", "reward.extract"}, {"name", "extract", "target_chars", "on_error"}),
        # the command line names it: what files set gives way, what it sets itself is to be refused
        (LENGTH, {"reward.name"}, {"reward.extract"}, {"name", "target_chars", "on_error"}),
        (LENGTH, {"reward"}, {"reward.extract"}, {"name", "target_chars", "on_error"}),
        (LENGTH, {"reward", "reward.extract"}, set(), {"name", "extract", "target_chars", "on_error"}),
    ],
)
def test_options_give_way_to_a_function_that_was_named_elsewhere(
    values: dict[str, Any], given: set[str], written: set[str], left: set[str]
) -> None:
    assert set(without_foreign("reward", values, EXACT, given, written)) == left


# ---- what a mistyped key is told


@pytest.mark.parametrize(
    ("key", "siblings", "message"),
    [
        (
            "trainer.max_step",
            ["max_steps", "seed"],
            "trainer.max_step is not a setting. Did you mean trainer.max_steps?",
        ),
        ("max_steps", ["name"], "max_steps is not a setting. Did you mean trainer.max_steps?"),
        ("modle", ["model", "data"], "modle is not a setting. Did you mean model?"),
        ("advantage.eps", ["name"], "advantage.eps is not a setting. advantage has: name."),
        ("callbacks.wandb.mode", [], "callbacks.wandb is switched off (null), so mode has no place: write +callbacks"),
        ("xyzzy", ["model"], "xyzzy is not a setting. `toolbox train --help` lists groups and keys."),
        ("launcher.gpus_per_node", [], "launcher: there are no launchers in this version."),
    ],
)
def test_an_unknown_key_is_told_the_nearest(key: str, siblings: list[str], message: str) -> None:
    assert str(unknown_key(key, siblings)).startswith(message)


# ---- settings that cannot work


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.group_size=0", "rollout.group_size=0 must be at least 1"),
        ("trainer.lr=-1", "trainer.lr=-1.0 must be a finite number of at least 0"),
        ("trainer.seed=99999999999999999999", "trainer.seed=99999999999999999999 must be a whole number of 64 bits"),
        ("trainer.lr=nan", "trainer.lr=nan must be a finite number"),
        ("trainer.adam_beta1=1", "trainer.adam_beta1=1.0 must be at least 0 and below 1"),
        ("trainer.max_grad_norm=0", "trainer.max_grad_norm=0.0 must be above 0"),
        ("trainer.eval_every=5", "trainer.eval_every=5 has nothing to evaluate on: set data.eval_size"),
        ("rollout.temperature=0", "rollout.temperature=0 is greedy"),
        ("rollout.top_p=0", "rollout.top_p=0.0 must be in (0, 1]"),
        ("rollout.min_new_tokens=9", "rollout.min_new_tokens=9 is above rollout.max_new_tokens=3"),
        ("trainer.schedule=cosin", "trainer.schedule='cosin' is not an option: constant, cosine, linear. Did you mean"),
        ("name=''", "name= is blank"),
        ("+trainer.max_step=3", "trainer.max_step is not a setting. Did you mean trainer.max_steps?"),
        ("+nosuch=3", "nosuch is not a setting"),
        ("trainer.lr=${nosuch}", "trainer.lr: Interpolation key 'nosuch' not found"),
        ("model=file", "model.path has no default: set model.path=… on the command line or in the experiment"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(word)
    assert str(caught.value).startswith(message)


def test_an_interpolation_is_resolved_in_what_is_written_down() -> None:
    config, plain = composed("run_dir=runs/seed-${trainer.seed}", "trainer.seed=4")
    assert config.run_dir == plain["run_dir"] == "runs/seed-4"


def test_infinity_never_clips() -> None:
    assert composed("trainer.max_grad_norm=inf")[0].trainer.max_grad_norm == float("inf")


# ---- functions of the user's are tried out before a model is loaded


def test_a_surrogate_that_returns_something_else_is_refused() -> None:
    def scalar(logps: Any, old_logps: Any, advantages: Any) -> Any:
        return (-advantages * logps).sum(), logps > 0

    def alone(logps: Any, old_logps: Any, advantages: Any) -> Any:
        return -advantages * logps

    def broken(logps: Any, old_logps: Any, advantages: Any) -> Any:
        return logps.nosuch

    for function in (scalar, alone):
        with pytest.raises(ConfigError, match=r"must return two tensors of the shape \(B, T\)"):
            check_surrogate(build_objective(function))
    with pytest.raises(ConfigError, match=r"failed on a small probe \(AttributeError: .*nosuch"):
        check_surrogate(build_objective(broken))


def test_an_estimator_that_returns_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must return finite advantages of shape \(P, G\)"):
        check_estimator(lambda rewards: rewards.sum(), group_size=2)
    with pytest.raises(ConfigError, match="the advantage function failed on a small probe"):
        check_estimator(lambda rewards: rewards.nosuch, group_size=2)


def test_of_every_key_it_is_said_what_trl_makes_of_it() -> None:
    """Here, too, so that whoever adds a key hears of it: see tests/test_trl_config.py."""
    assert homeless() == [], f"say in backends/trl_keys.py what TRL makes of them, and run `{HOW}`"
    assert PAGE.read_text(encoding="utf-8") == with_table(PAGE.read_text(encoding="utf-8")), f"run `{HOW}`"
