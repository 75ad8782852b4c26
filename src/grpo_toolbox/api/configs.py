"""GRPOConfig and RLOOConfig: TRL 1.16's fields with TRL's defaults, read off FIELD_MAP; torch-free."""

from __future__ import annotations

import dataclasses
import json
import logging
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from grpo_toolbox.config.fields import FIELD_MAP, default_of, fields_of
from grpo_toolbox.errors import ConfigError, suggest

log = logging.getLogger(__name__)

DEFAULT_FOLDER = "trainer_output"
"""transformers' output_dir where none is given."""


class Arguments:
    """What both configs have in common: a refusal names what to use, and a field without effect says why.

    `overrides` are keys of ours that TRL has no field for, such as `{"rollout.dynamic_sampling": True}`; they go over
    everything else. docs/library.md lists the fields.
    """

    algorithm: ClassVar[str]
    output_dir: str | None
    overrides: dict[str, Any] | None

    process_index = local_process_index = 0
    world_size = n_gpu = 1
    should_save = should_log = True

    def __new__(cls, *args: Any, **values: Any) -> Arguments:
        """Refuse a field that neither TRL nor we have, by the name of the nearest."""
        known = [one.name for one in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in values:
            if name in known:
                continue
            other = name in FIELD_MAP or name in fields_of("grpo")
            hint = f" It is one of {'RLOO' if cls.algorithm == 'grpo' else 'GRPO'}Config's." if other else ""
            raise ConfigError(
                f"{cls.__name__}({name}=…) is not a field of TRL's or ours.{hint or suggest(name, known)} Keys of ours "
                "go into overrides={'group.key': value}."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse what cannot be had or is of another type, and say what has no effect."""
        wanted: Any = self
        for name, value in self.changed().items():
            one = FIELD_MAP[name]
            where = f"{type(self).__name__}({name}={value!r})"
            if dict in typing.get_args(one.kind) + tuple(map(typing.get_origin, typing.get_args(one.kind))):
                setattr(self, name, value := _parsed(where, value))
            _check_type(where, one.kind, value)
            if name == "data_seed" and value == wanted.seed:
                continue
            if one.status == "refused":
                raise ConfigError(f"{where} cannot be had here. What to use: {one.note}.")
            if one.status == "accepted":
                log.warning("%s has no effect here: %s.", where, one.note)
        if wanted.output_dir is None:
            wanted.output_dir = DEFAULT_FOLDER
        if wanted.load_best_model_at_end and wanted.metric_for_best_model is None:
            wanted.metric_for_best_model = "loss"
            log.warning(
                "load_best_model_at_end without metric_for_best_model takes the lowest eval_loss, as transformers "
                "does, and a policy's loss says little about how good it is: metric_for_best_model='eval_reward' takes "
                "the reward."
            )
        if wanted.metric_for_best_model is not None and wanted.greater_is_better is None:
            wanted.greater_is_better = not wanted.metric_for_best_model.endswith("loss")

    def changed(self) -> dict[str, Any]:
        """Return the fields that do not have TRL's default."""
        known = fields_of(self.algorithm)
        return {
            name: getattr(self, name)
            for name, one in known.items()
            if not _same(getattr(self, name), default_of(one, self.algorithm))
            and (name, getattr(self, name)) != ("output_dir", DEFAULT_FOLDER)
        }

    @property
    def device(self) -> Any:
        """The torch device that the trainer will take."""
        import torch

        wanted: Any = self
        return torch.device("cuda" if torch.cuda.is_available() and not wanted.use_cpu else "cpu")

    @property
    def train_batch_size(self) -> int:
        """Completions of a micro-batch, as TRL counts them."""
        wanted: Any = self
        return int(wanted.per_device_train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Completions of a step of an evaluation, as TRL counts them."""
        wanted: Any = self
        return int(wanted.per_device_eval_batch_size)

    @property
    def parallel_mode(self) -> Any:
        """transformers' ParallelMode of one process."""
        from transformers.training_args import ParallelMode

        return ParallelMode.NOT_DISTRIBUTED

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block: there is no other process to wait for."""
        yield

    def get_process_log_level(self) -> int:
        """Return the level that scripts set their loggers to: WARNING, as transformers' is where none was chosen."""
        return logging.WARNING

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_json_string(self) -> str:
        """Return the fields as JSON; what JSON cannot hold as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for loggers; tokens are left out."""
        kept = {name: value for name, value in self.to_dict().items() if not name.endswith("token")}
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in kept.items()
        }


_NUMBERS = {int: "a whole number", float: "a number", bool: "True or False"}


def _check_type(where: str, kind: Any, value: Any) -> None:
    """Refuse text where a number belongs, which files of settings write for 1e-3, and the like."""
    kinds = set(typing.get_args(kind)) or {kind}
    numbers = [one for one in kinds if one in _NUMBERS]
    if not numbers or not kinds <= {*_NUMBERS, type(None)}:
        return
    is_flag, is_number = isinstance(value, bool), isinstance(value, int | float) and not isinstance(value, bool)
    whole = is_number and (float in kinds or value == int(value))
    if not (value is None and type(None) in kinds) and not (is_flag if bool in kinds else whole):
        raise ConfigError(f"{where} is not {' or '.join(_NUMBERS[one] for one in numbers)}.")


def _parsed(where: str, value: Any) -> Any:
    """Return a mapping that was given as JSON, as command lines do."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error}.") from error


def _same(value: Any, default: Any) -> bool:
    """Whether a field has its default; 1 is no True, and an enum is its value."""
    value = getattr(value, "value", value)
    return (type(value) is type(default) and value == default) or value is default


def _make(name: str, algorithm: str, doc: str) -> Any:
    made = []
    for one in fields_of(algorithm).values():
        default = default_of(one, algorithm)
        field = dataclasses.field(default_factory=list) if default == [] else dataclasses.field(default=default)
        made.append((one.name, one.kind, field))
    made.append(("overrides", dict[str, Any] | None, dataclasses.field(default=None)))
    space = {"algorithm": algorithm, "__doc__": doc, "__module__": __name__}
    return dataclasses.make_dataclass(name, made, bases=(Arguments,), namespace=space)


GRPOConfig = _make(
    "GRPOConfig",
    "grpo",
    "The settings of a GRPOTrainer: the fields and defaults of TRL 1.16's GRPOConfig, and `overrides`.",
)
RLOOConfig = _make(
    "RLOOConfig",
    "rloo",
    "The settings of an RLOOTrainer: the fields and defaults of TRL 1.16's RLOOConfig, and `overrides`.",
)
