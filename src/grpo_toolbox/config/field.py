"""One row of FIELD_MAP: a field of TRL's config, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["supported", "accepted", "refused"]
_SAME = object()


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """A field of TRL's GRPOConfig or RLOOConfig.

    `supported` sets keys of ours, or does in the library what it does in TRL; `accepted` changes nothing, and `note`
    says why; `refused` may only keep its default, and `note` says what to use instead.
    """

    name: str
    kind: Any
    """The field's type."""
    default: Any
    """TRL 1.16's."""
    status: Status
    keys: tuple[str, ...] = ()
    """Keys of ours that it decides, alone or with other fields; empty where it is the library's own business."""
    note: str = ""
    direct: bool = False
    """Whether it alone decides its one key."""
    ours: Callable[[Any], Any] = _unchanged
    """TRL's value -> ours, of a direct field."""
    theirs: Callable[[Any], Any] = _unchanged
    """Our value -> TRL's, of a direct field."""
    algorithms: tuple[str, ...] = ("grpo", "rloo")
    rloo_default: Any = _SAME
    since: str = ""
    """Which other versions have it, for a field that TRL 1.16 does not have."""

    @property
    def has_rloo_default(self) -> bool:
        """Whether RLOOConfig has another default than GRPOConfig."""
        return self.rloo_default is not _SAME


def direct(name: str, kind: Any, default: Any, key: str, note: str = "", **more: Any) -> Field:
    """Make a field that alone decides one key of ours."""
    return Field(name, kind, default, "supported", (key,), note, direct=True, **more)


def joint(name: str, kind: Any, default: Any, keys: str, note: str = "", **more: Any) -> Field:
    """Make a field that decides keys of ours (separated by blanks) together with others, or by a rule in `note`."""
    return Field(name, kind, default, "supported", tuple(keys.split()), note, **more)


def accepted(name: str, kind: Any, default: Any, why: str, **more: Any) -> Field:
    """Make a field that may be set and changes nothing."""
    return Field(name, kind, default, "accepted", (), why, **more)


def refused(name: str, kind: Any, default: Any, instead: str, **more: Any) -> Field:
    """Make a field that may only keep its default."""
    return Field(name, kind, default, "refused", (), instead, **more)
