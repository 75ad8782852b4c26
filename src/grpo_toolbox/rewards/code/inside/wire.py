"""How values and messages travel in and out of a sandbox: lines of JSON that hold plain data and nothing else.

Plain data are None, bools, numbers, text, bytes, the built-in containers of these, and a few types of the standard
library. An instance of a subclass travels as the plain value it holds, so its own `__eq__` stays behind. Everything
else stays where it is and travels as a handle, a number that its owner keeps.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all else here, and every candidate would wait for it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MESSAGE_BYTES = 8 << 20
"""The longest line that is read or written."""

MOST_FIELDS = 100
"""Named tuples with more travel as plain tuples."""

WIRE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading a line from the other side can raise, whatever stands in it."""

_SMALL = 1 << 63
_BY_ARGUMENTS: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("fractions", "Fraction"): lambda value: (value.numerator, value.denominator),
    ("decimal", "Decimal"): lambda value: (str(value),),
    ("datetime", "date"): lambda value: (value.year, value.month, value.day),
    ("datetime", "time"): lambda value: (value.hour, value.minute, value.second, value.microsecond),
    ("datetime", "datetime"): lambda value: (*value.timetuple()[:6], value.microsecond),
    ("datetime", "timedelta"): lambda value: (value.days, value.seconds, value.microseconds),
    ("builtins", "range"): lambda value: (value.start, value.stop, value.step),
}
"""Types of the standard library that travel as their name and the arguments that make them again."""

_CONTAINERS = {"t": tuple, "s": set, "z": frozenset}


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """The JSON form of `value`; `keep` is asked for that of everything that is not plain data."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < _SMALL else {"i": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(one, keep) for one in list.__iter__(value)]
    if isinstance(value, dict):
        return {"d": [[encode(key, keep), encode(one, keep)] for key, one in dict.items(value)]}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"b" if isinstance(value, bytes) else "y": bytes(value).hex()}
    if isinstance(value, tuple) and 0 < len(getattr(value, "_fields", ())) <= MOST_FIELDS:
        fields = list(value._fields)  # type: ignore[attr-defined]
        return {"n": [type(value).__name__, fields, [encode(one, keep) for one in value]]}
    for tag, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return {tag: [encode(one, keep) for one in kind.__iter__(value)]}
    return _encode_other(value, keep)


def _encode_other(value: Any, keep: Callable[[Any], Any]) -> Any:
    kind = type(value)
    module = getattr(kind, "__module__", "")
    arguments = _BY_ARGUMENTS.get((module, kind.__name__))
    if arguments is not None and getattr(value, "tzinfo", None) is None:
        return {"o": [module, kind.__name__, list(arguments(value))]}
    if (module, kind.__name__) == ("collections", "deque"):
        return {"q": [encode(one, keep) for one in value]}
    if module == "numpy" and hasattr(value, "tolist"):  # an array is compared as the list of its numbers
        return encode(value.tolist(), keep)
    return keep(value)


def decode(data: Any, handle: Callable[[Any], Any]) -> Any:
    """The value that `data` is the JSON form of; `handle` makes what a handle is to be on this side.

    Raises one of WIRE_ERRORS for anything that `encode` does not write.
    """
    if isinstance(data, list):
        return [decode(one, handle) for one in data]
    if not isinstance(data, dict):
        return data
    ((tag, held),) = data.items()
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](decode(one, handle) for one in held)
    if tag == "d":
        return {decode(key, handle): decode(one, handle) for key, one in held}
    if tag in ("q", "n"):
        return _from_collections(tag, held, handle)
    if tag == "i":
        return int(held, 16)
    if tag == "c":
        return complex(*held)
    if tag in ("b", "y"):
        return bytes.fromhex(held) if tag == "b" else bytearray.fromhex(held)
    if tag == "o":
        return _from_arguments(*held)
    return handle(data)


def _from_collections(tag: str, held: Any, handle: Callable[[Any], Any]) -> Any:
    from collections import deque, namedtuple

    if tag == "q":
        return deque(decode(one, handle) for one in held)
    name, fields, values = held
    if len(fields) > MOST_FIELDS:
        raise ValueError(f"a named tuple of {len(fields)} fields")
    return namedtuple(name, fields, rename=True)(*(decode(one, handle) for one in values))


def _from_arguments(module: str, name: str, arguments: list[Any]) -> Any:
    if (module, name) not in _BY_ARGUMENTS:
        raise ValueError(f"{module}.{name} does not travel")
    return getattr(importlib.import_module(module), name)(*arguments)


def stdlib_name(value: Any) -> str | None:
    """`module:name` where `value` is a function or class that can be imported from the standard library by it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    return f"{module}:{name}" if from_stdlib(f"{module}:{name}") is value else None


def from_stdlib(reference: str) -> Any:
    """What `module:name` names in the standard library; None where there is nothing of that name."""
    module, _, name = reference.partition(":")
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(found, name, None) if name else found


class _Json:
    """The `json` module's C parts without the module, which imports `re`: half of an interpreter's start again."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.__getitem__

    def __init__(self) -> None:
        try:
            import _json

            scan = _json.make_scanner(self)  # type: ignore[arg-type]
            self.loads = lambda text: scan(text, 0)[0]
            write = _json.make_encoder(
                None, _unknown, _json.encode_basestring_ascii, None, ": ", ", ", False, False, True
            )
            self.dumps = lambda value: "".join(write(value, 0))
            if self.loads(self.dumps([{"a": [1.5, None, "\u20ac"]}])) != [{"a": [1.5, None, "\u20ac"]}]:
                raise ImportError
        except (ImportError, AttributeError, TypeError):  # another interpreter's has other parts
            import json

            self.loads = lambda text: json.loads(text)
            self.dumps = lambda value: json.dumps(value)


def _unknown(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} does not travel")


class Channel:
    """Two file descriptors that carry messages, one a line."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming = incoming
        self.outgoing = outgoing
        self._read = b""
        self._json = _Json()

    def receive(self) -> dict[str, Any]:
        """The next message; EOFError where the other side is gone."""
        pieces = [self._read]
        while b"\n" not in pieces[-1]:
            piece = os.read(self.incoming, 1 << 16)
            if not piece:
                raise EOFError
            pieces.append(piece)
        line, _, self._read = b"".join(pieces).partition(b"\n")
        message: dict[str, Any] = self._json.loads(line.decode())
        return message

    def send(self, message: dict[str, Any]) -> None:
        """Write a message; ValueError where it is longer than MESSAGE_BYTES."""
        line = self._json.dumps(message).encode("ascii") + b"\n"
        if len(line) > MESSAGE_BYTES:
            raise ValueError(f"the value is too large: {len(line)} bytes, and {MESSAGE_BYTES} are allowed")
        while line:
            line = line[os.write(self.outgoing, line) :]
