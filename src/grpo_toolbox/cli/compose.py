"""What Hydra does for `toolbox train`: overrides in, composed jobs out, and none of its own files and lines."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from grpo_toolbox.cli.overrides import explain
from grpo_toolbox.config.source import CONF, OPEN_GROUPS, groups
from grpo_toolbox.errors import ConfigError, suggest

RESUMED = "of_the_resumed_run"
"""How Hydra's messages call the config.yaml of a run that goes on with it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`toolbox train --help` lists what there is)\n")


def read_arguments(argv: Sequence[str], command: str = "train") -> argparse.Namespace:
    """Split a command line into Hydra's flags and the overrides, in any order; exits with 2 on an unknown flag."""
    parser = _Parser(prog=f"toolbox {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--multirun", "-m", action="store_true")
    mode.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    mode.add_argument("--info", "-i", nargs="?", const="all")
    mode.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn")
    args, unknown = parser.parse_known_intermixed_args(argv)
    for word in unknown:
        parser.error(f"{word} is not a flag of toolbox {command}.{suggest(word, parser._option_string_actions)}")
    return args


def run_jobs(args: argparse.Namespace, task: Callable[[Any], None]) -> None:
    """Compose the job, or the jobs of a sweep, and call `task` with each; with `--cfg` and its like only print.

    Whatever goes wrong before a job runs is raised as a ConfigError. `task` must not raise an Exception.
    """
    import hydra
    from hydra.core.config_store import ConfigStore

    from grpo_toolbox.config.schema import schema_node

    store = ConfigStore.instance()
    store.store(name="schema", node=schema_node(), provider="grpo_toolbox")
    overrides = [readable(override) for override in args.overrides]
    if args.multirun:
        _check_sweep(overrides)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            own = _own_config(overrides)
            if own is not None:
                store.store(group="experiment", name=RESUMED, node=own, package="_global_", provider="grpo_toolbox")
                sweeps = [[*overrides, f"experiment={RESUMED}", *(f"~{group}" for group in OPEN_GROUPS)]]
            else:
                sweeps = _with_method(overrides, args.multirun)
            for words in sweeps:
                with _process_state(_command_line(args, words, scratch)):
                    hydra.main(version_base="1.3", config_path="pkg://grpo_toolbox.conf", config_name="train")(task)()
        except Exception as error:  # Hydra's, OmegaConf's, YAML's
            raise explain(error) from error


def readable(override: str) -> str:
    """Quote a value that Hydra's grammar has no word for (`~/runs/a`, `<answer>.*</answer>`), so that it is text."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = override.partition("=")
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        if value and value[0] not in "[{":  # a list that was never closed is no text
            escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", "\\'")
            return f"{key}='{escaped}'"
    return override


def _with_method(overrides: list[str], sweeps: bool) -> list[list[str]]:
    """Have `trainer.algorithm=rloo` alone mean the method, too: an experiment's own is not what TRL's RLOO can do.

    A sweep over algorithms becomes two, that of RLOO with its method and that of the others.
    """
    chosen = next((one for one in overrides if one.startswith("trainer.algorithm=")), "")
    algorithms = chosen.partition("=")[2].split(",") if sweeps else [chosen.partition("=")[2]]
    if "rloo" not in algorithms or keys(overrides) & {"method", "advantage", "objective"}:
        return [overrides]
    others = ",".join(one for one in algorithms if one != "rloo")
    parts = ["rloo", others] if algorithms[0] == "rloo" else [others, "rloo"]
    return [
        [*(f"trainer.algorithm={part}" if one == chosen else one for one in overrides)]
        + (["method=rloo"] if part == "rloo" else [])
        for part in filter(None, parts)
    ]


def _check_sweep(overrides: Sequence[str]) -> None:
    for override in overrides:
        if re.match(r"run_dir=[^,$]+$", override):
            raise ConfigError(
                f"{override} would be the folder of every job of the sweep: leave it out, or take a setting into its "
                "name, as in 'run_dir=runs/seed-${trainer.seed}'."
            )


def job_overrides() -> list[str]:
    """Return the overrides of the job at hand: those of the command line, of a sweep one value each."""
    from hydra.core.hydra_config import HydraConfig

    return [str(one) for one in HydraConfig.get().overrides.task]


def choices() -> dict[str, str]:
    """Return which option of each group the job at hand is composed of."""
    from hydra.core.hydra_config import HydraConfig

    return {str(group): str(option) for group, option in HydraConfig.get().runtime.choices.items()}


def keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys and groups that overrides set."""
    return {override.lstrip("+~").partition("=")[0].partition("@")[0] for override in overrides}


def experiment_keys() -> set[str]:
    """Return the keys that the chosen experiment's own file sets in groups, such as `reward.extract`."""
    return _keys_of_file("experiment")[0]


def method_keys() -> set[str]:
    """Return the groups whose option the chosen method names, and the keys that it sets in groups."""
    own, named = _keys_of_file("method")
    return own | named


def _keys_of_file(kind: str) -> tuple[set[str], set[str]]:
    """Return what the chosen file of a group of whole runs sets in other groups, and whose option it names."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    for source in HydraConfig.get().runtime.config_sources:  # in the order in which Hydra looks
        folder = CONF if source.path == "grpo_toolbox.conf" else Path(source.path)
        file = folder / kind / f"{choices().get(kind)}.yaml"
        if file.is_file():
            config = OmegaConf.load(file)
            parts = config.items_ex(resolve=False) if isinstance(config, DictConfig) else ()
            own = {f"{part!s}.{key!s}" for part, values in parts if isinstance(values, DictConfig) for key in values}
            text = file.read_text(encoding="utf-8")
            return own, set(re.findall(r"^\s*- override /(\w+):", text, flags=re.MULTILINE))
    return set(), set()


def _command_line(args: argparse.Namespace, overrides: Sequence[str], scratch: str) -> list[str]:
    """Rebuild the command line as Hydra reads it. A sweep writes its multirun.yaml into `scratch`."""
    values = {"--cfg": args.cfg, "--info": args.info, "--package": args.package}
    values |= {"--config-dir": args.config_dir, "--config-name": args.config_name}
    switches = {"--multirun": args.multirun, "--resolve": args.resolve, "--hydra-help": args.hydra_help}
    flags = [part for name, value in values.items() if value is not None for part in (name, value)]
    flags += [name for name, on in switches.items() if on]
    return ["toolbox train", *flags, f"hydra.sweep.dir={scratch}", *overrides]


@contextmanager
def _process_state(argv: list[str]) -> Iterator[None]:
    """Let Hydra read `argv` and raise its errors instead of printing them; put back what that takes afterwards."""
    former, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = argv
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = former
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _own_config(overrides: Sequence[str]) -> Any:
    """Return the config that a resumed run was started with, where the command line does not compose another one.

    `resume=runs/x` alone goes on with what stands in runs/x/config.yaml; with `experiment=` or any other option of a
    group the run is composed from the command line as ever.
    """
    from omegaconf import OmegaConf

    given = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    resuming = given.get("resume") or (given.get("trainer.resume", "").lower() == "true" and given.get("run_dir"))
    if not resuming or keys(overrides) & {*groups()}:
        return None
    path = Path(str(resuming)).expanduser() / "config.yaml"
    if not path.is_file():
        return None
    config: Any = OmegaConf.load(path)
    for key in ("run_dir", "resume"):  # the folder may have been moved since
        config.pop(key, None)
    config.get("trainer", {}).pop("load_optimizer", None)  # was meant for one resume
    return config
