"""From names and options to rewards; the YAML group; errors of configuration."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from grpo_toolbox.config.schema import RewardConfig
from grpo_toolbox.errors import ConfigError, RewardError
from grpo_toolbox.rewards import (
    COMMON,
    REWARDS,
    AdaptiveWeight,
    HeldOut,
    TrainerState,
    build_reward,
    check_options,
    combine,
)

CONF = Path(str(files("grpo_toolbox"))) / "conf" / "reward"


@pytest.mark.parametrize("name", REWARDS)
def test_the_yaml_of_each_reward_lists_every_option_with_its_default(name: str) -> None:
    written = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert written.pop("name") == name
    assert written.pop("on_error") is None
    parameters = inspect.signature(REWARDS[name]).parameters
    assert list(written) == list(parameters)
    for option, parameter in parameters.items():
        if parameter.default is not parameter.empty:
            assert written[option] == parameter.default
        elif option != "components":
            assert written[option] == "???"


def test_the_weighted_sum_of_the_yaml_scores_by_hand() -> None:
    options = yaml.safe_load((CONF / "weighted_sum.yaml").read_text())
    reward = build_reward(**options)
    assert [(part.name, part.weight) for part in reward.components] == [
        ("exact_match", 1.0),
        ("format", 0.1),
        ("length_penalty", 0.05),
    ]
    # right, in form, short: 1 + 0.1; right and 450 characters: 1 − 0.05·0.5; wrong, in form, 600 characters: 0.1 − 0.05
    completions = ["<answer>12</answer>", "12".rjust(450), "<answer>13</answer>".rjust(600)]
    assert reward(completions=completions, answer=["12"] * 3) == pytest.approx([1.1, 0.975, 0.05])


def test_building_and_checking_load_neither_torch_nor_httpx() -> None:
    code = (
        "import sys\n"
        "from grpo_toolbox.rewards import build_reward, check_options\n"
        "build_reward('weighted_sum', components=[{'name': n} for n in ('exact_match', 'format', 'length_penalty')])\n"
        "check_options('reward_model', path='somewhere')\n"
        "build_reward('llm_judge', base_url='http://localhost:1', model='m')\n"
        "print([name for name in ('torch', 'httpx', 'numpy', 'transformers') if name in sys.modules])\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "exact_mach"}, r"reward\.name='exact_mach'.*length_penalty.*Did you mean exact_match\?"),
        (
            {"name": "exact_match", "extarct": "boxed"},
            r"reward\.extarct is not an option of exact_match: extract.*extract\?",
        ),
        ({"name": "exact_match", "on_error": "ignore"}, r"reward\.on_error='ignore' is not an option: skip, stop"),
        ({"name": "reward_model"}, r"reward\.name=reward_model needs reward\.path"),
        ({"name": "llm_judge", "base_url": "???", "model": "m"}, r"needs reward\.base_url"),
        ({"name": "weighted_sum"}, r"needs reward\.components"),
        ({"name": "weighted_sum", "components": []}, r"reward\.components must be a list"),
        ({"name": "weighted_sum", "components": [{"weight": 1}]}, r"reward\.components\[0\] has no name"),
        (
            {"name": "weighted_sum", "components": [{"name": "format"}, {"name": "format", "layouts": "think"}]},
            r"reward\.components\[1\]\.layouts is not an option of format.*Did you mean layout\?",
        ),
        (
            {"name": "weighted_sum", "components": [{"name": "format", "weight": "0.5"}]},
            r"weight '0\.5' of reward 'format'",
        ),
        ({"name": "no_such_module:fn"}, r"importing 'no_such_module' failed \(ModuleNotFoundError"),
        ({"name": "inspect:signatur"}, r"inspect has no function 'signatur'.*Did you mean signature\?"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward(**options)


def test_a_wrong_option_is_named_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"reward\.batchsize is not an option.*batch_size\?"):
        check_options("reward_model", path="a folder that is not there", batchsize=2)


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory."""
    (tmp_path / "my_rewards.py").write_text(
        "def bonus(completions, answer, factor=2.0, **kwargs):\n"
        "    return [factor * (text == gold) for text, gold in zip(completions, answer)]\n"
        "class Threshold:\n"
        "    def __init__(self, at):\n"
        "        self.at = at\n"
        "    def __call__(self, completions):\n"
        "        return [float(len(text) > self.at) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return "my_rewards"


def test_a_function_of_the_users_is_plugged_in_by_its_name(plug_in: str) -> None:
    reward = build_reward(f"{plug_in}:bonus", factor=3.0)
    assert reward.name == "bonus"
    assert reward.columns_needed() == ("answer",)
    assert reward(completions=["a", "b"], answer=["a", "a"]) == [3.0, 0.0]


def test_a_bound_option_is_not_overwritten_by_a_column_of_its_name(plug_in: str) -> None:
    reward = build_reward(f"{plug_in}:bonus", factor=3.0)
    assert reward(completions=["a"], answer=["a"], factor=[100.0]) == [3.0]


def test_a_class_of_the_users_is_built_with_its_options(plug_in: str) -> None:
    reward = build_reward(f"{plug_in}:Threshold", at=2)
    assert reward.name == "Threshold"
    assert reward(completions=["a", "abc"]) == [0.0, 1.0]
    with pytest.raises(ConfigError, match=r"needs reward\.at"):
        build_reward(f"{plug_in}:Threshold")


def test_a_plug_in_with_kwargs_still_refuses_an_unknown_option(plug_in: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.facto is not an option of my_rewards:bonus: answer, factor\."):
        build_reward(f"{plug_in}:bonus", facto=3.0)


def test_weights_and_functions_must_be_equally_many() -> None:  # d01.7
    functions = [build_reward(name) for name in ("exact_match", "format", "length_penalty")]
    with pytest.raises(ConfigError, match=r"3 reward functions but 2 weights.*exact_match, format, length_penalty"):
        combine(functions, [1.0, 0.5])


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        ([], None, "at least one function"),
        (["exact_match"], None, "'exact_match' is not callable"),
        ([len], None, "takes obj by position only"),
        ([build_reward("format")], [float("inf")], "weight inf of reward 'format' is not a finite number"),
        ([build_reward("format")], [True], "weight True"),
    ],
)
def test_combinations_that_cannot_work_are_refused(functions: list, weights: list | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        combine(functions, weights)


def test_equal_names_are_told_apart() -> None:
    reward = combine([build_reward("format"), build_reward("format", layout="think"), build_reward("format")])
    assert [part.name for part in reward.components] == ["format", "format_2", "format_3"]


def test_weights_of_nested_sums_multiply() -> None:
    inner = {"name": "weighted_sum", "weight": 0.5, "components": [{"name": "format", "weight": 0.2}]}
    reward = build_reward("weighted_sum", components=[{"name": "length_penalty"}, inner])
    assert [(part.name, part.weight) for part in reward.components] == [("length_penalty", 1.0), ("format", 0.1)]


@pytest.mark.parametrize(
    ("on_error", "tolerant"),
    [(None, [True, False, False, True]), ("stop", [True, False, False, False]), ("skip", [True, False, True, True])],
)
def test_on_error_of_a_sum_holds_for_the_components_that_have_none_of_their_own(
    on_error: str | None, tolerant: list[bool]
) -> None:
    own = [{"name": "format", "on_error": "skip"}, {"name": "math", "on_error": "stop"}]
    parts = [*own, {"name": "length_penalty"}, {"name": "math"}]
    built = build_reward("weighted_sum", components=parts, on_error=on_error)
    assert [part.tolerant for part in built.components] == tolerant
    nested = build_reward("weighted_sum", components=[{"name": "weighted_sum", "components": parts}], on_error=on_error)
    assert [part.tolerant for part in nested.components] == tolerant
    of_functions = combine([combine([build_reward("length_penalty")], on_error="skip"), built], on_error=on_error)
    assert [part.tolerant for part in of_functions.components] == [True, *tolerant]


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "weighted_sum"])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_on_error_has_effect_for_every_member(name: str, on_error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a member is by itself: where a row fails, `stop` stops and `skip` leaves it out."""

    def failing(completions: list[str]) -> list[Exception | float]:
        return [OSError("no"), 1.0]

    failing.tolerant = name == "math"  # type: ignore[attr-defined]
    needed = {"json_schema": {"schema": {}}, "cosine_length": {"correct": "math"}, "token_cost": {"budget": 1}}
    monkeypatch.setitem(REWARDS, name, functools.wraps(REWARDS[name])(lambda **options: failing))
    options = {
        one.name: needed.get(name, {}).get(one.name, 1)
        for one in inspect.signature(REWARDS[name]).parameters.values()
        if one.default is one.empty
    }
    reward = build_reward(name, on_error=on_error, **options)
    if on_error == "stop":
        with pytest.raises(RewardError, match=f"reward '{name}' failed on completion 0"):
            reward(completions=["a", "b"])
    else:
        assert reward(completions=["a", "b"]) == [None, 1.0]


def test_the_python_of_the_documentation_runs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "rewards.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 2
    exec("\n".join(blocks), {})


def test_the_yaml_of_the_documentation_is_the_shipped_one() -> None:
    text = (Path(__file__).parent.parent / "docs" / "rewards.md").read_text()
    written = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)[0])["reward"]
    assert {**written, "on_error": None} == yaml.safe_load((CONF / "weighted_sum.yaml").read_text())


def test_the_moving_weights_of_the_documentation_are_read() -> None:
    text = (Path(__file__).parent.parent / "docs" / "rewards.md").read_text()
    (block,) = (one for one in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL) if "adaptive" in one)
    parts = yaml.safe_load(block)
    parts[2]["weight"] = "math:sqrt"  # a function that is there
    reward = build_reward("weighted_sum", components=parts)
    state = TrainerState(100, 500)
    assert [part.weight_at(state) for part in reward.components] == pytest.approx([0.6, 1.0, 10.0, 1.0])
    adaptive = reward.components[3].factors[0]
    assert vars(adaptive) == vars(AdaptiveWeight())  # the page shows the defaults


# ---- settings that every reward has


def test_the_settings_of_every_reward_are_the_keys_of_the_schema_with_the_defaults_of_the_code() -> None:
    settings = vars(RewardConfig())
    assert tuple(settings) == COMMON
    part = build_reward("format").components[0]
    assert (part.on_error, part.timeout_s) == (settings["on_error"], settings["timeout_s"])
    assert (part.error_rate, part.window) == (settings["max_error_rate"], settings["error_window"])
    heldout = HeldOut(build_reward("format"))
    found = (heldout.share, heldout.window, heldout.on_hacking)
    assert found == (settings["heldout_share"], settings["heldout_window"], settings["on_hacking"])


@pytest.mark.parametrize("name", REWARDS)
def test_no_member_has_an_option_of_their_names(name: str) -> None:
    assert not {*COMMON, "name", "weight", "where"} & set(inspect.signature(REWARDS[name]).parameters)


def test_a_part_keeps_what_it_sets_for_itself_and_takes_the_rest_from_the_sum() -> None:
    parts = [{"name": "format", "timeout_s": 5, "max_error_rate": 0.5}, {"name": "length_penalty"}]
    reward = build_reward("weighted_sum", components=parts, timeout_s=30.0, max_error_rate=0.1, error_window=100)
    assert [part.timeout_s for part in reward.components] == [5, 30.0]
    assert [part.most_failures for part in reward.components] == [50, 10]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": 0}, r"reward\.timeout_s=0 is not seconds above 0, or null for any time"),
        ({"timeout_s": float("nan")}, r"reward\.timeout_s=nan"),
        ({"timeout_s": True}, r"reward\.timeout_s=True"),
        ({"timeout_s": "soon"}, r"reward\.timeout_s='soon'"),
        ({"max_error_rate": -0.1}, r"reward\.max_error_rate=-0\.1 is not a share from 0 to 1"),
        ({"max_error_rate": None}, r"reward\.max_error_rate=None"),
        ({"error_window": 0}, r"reward\.error_window=0 is not a whole number from 1 on"),
        ({"error_window": 2.5}, r"reward\.error_window=2\.5"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward("format", **settings)
