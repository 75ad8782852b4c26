"""The candidate's program as a module whose functions and objects are used from outside, one request at a time."""

from __future__ import annotations

import builtins
import operator
import sys
import types

from grpo_toolbox.rewards.code.inside.wire import WIRE_ERRORS, Channel, decode, encode, from_stdlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MODULE = "solution"
"""What the candidate's program is called as a module."""

PRINTED_CHARACTERS = 1 << 16


_WORDS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in dir(operator) if not name.startswith("_")},
    **{name: getattr(builtins, name) for name in ("getattr", "setattr", "delattr", "isinstance", "issubclass")},
    **{name: getattr(builtins, name) for name in ("len", "iter", "next", "repr", "str", "hash", "bool", "format")},
    **{name: getattr(builtins, name) for name in ("int", "float", "reversed", "divmod", "round", "dir")},
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
}
"""What can be asked of an object beside calling it."""


def serve_objects(channel: Channel, order: dict[str, Any]) -> NoReturn:
    """Run the program of `order` (its `setup`, then its `code`), then answer requests until there are no more."""
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    owner = Owner(channel, module)
    answer = owner.attempt(_load, module, [order["setup"], order["code"]])
    while True:
        owner.reply(answer)
        request = channel.receive()
        answer = owner.attempt(owner.obey, request)


def _load(module: types.ModuleType, sources: list[str]) -> None:
    for source in sources:
        exec(compile(source, f"{MODULE}.py", "exec", dont_inherit=True), module.__dict__)


class Printed:
    """Standard output that remembers the end of what was printed since it was last asked."""

    def __init__(self) -> None:
        self.behind = sys.stdout
        self.kept = ""

    def write(self, text: str) -> int:
        """Print `text` and remember it."""
        self.kept = (self.kept + text)[-PRINTED_CHARACTERS:]
        return self.behind.write(text)

    def close(self) -> None:
        """Stay open, since answers still report what was printed."""

    def take(self) -> str:
        """Return what was printed since the last call."""
        kept, self.kept = self.kept, ""
        return kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


class Owner:
    """Keeps the objects that cannot travel, and does with them what is asked."""

    def __init__(self, channel: Channel, module: types.ModuleType) -> None:
        self.channel = channel
        self.kept: list[Any] = [module]
        self.numbers = {id(module): 0}
        self.printed = Printed()
        sys.stdout = self.printed

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """The answer that `action` comes to, whichever way it ends."""
        try:
            return {"value": encode(action(*arguments), self.keep)}
        except BaseException as error:  # the candidate's program may raise anything, SystemExit above all
            return {"raised": self._describe(error)}

    def reply(self, answer: dict[str, Any]) -> None:
        """Send an answer, with what was printed on the way to it."""
        printed = self.printed.take()
        self.printed.flush()
        try:
            self.channel.send({**answer, "printed": printed})
        except WIRE_ERRORS as error:  # too long, or of the candidate's making
            self.channel.send({"raised": [["ValueError"], str(error)[:200], []], "printed": ""})

    def obey(self, request: dict[str, Any]) -> Any:
        """Do what one request says."""
        if "names" in request:
            module = self.kept[0].__dict__
            return {name: module[name] for name in request["names"] if name in module}
        if "call" in request:
            return self._call(request)
        arguments = [decode(one, self.resolve) for one in request["arguments"]]
        if request["word"] == "await":
            import asyncio

            return asyncio.run(_awaited(arguments[0]))
        return _WORDS[request["word"]](*arguments)

    def _call(self, request: dict[str, Any]) -> Any:
        function = self.kept[request["call"]]
        arguments = [decode(one, self.resolve) for one in request["arguments"]]
        keywords = {name: decode(one, self.resolve) for name, one in request["keywords"].items()}
        value = function(*arguments, **keywords)
        changed = {}  # a function may work in place, and the caller has only its own copy
        sent = {**dict(enumerate(request["arguments"])), **request["keywords"]}
        for place, argument in {**dict(enumerate(arguments)), **keywords}.items():
            if _changeable(argument) and encode(argument, self.keep) != sent[place]:
                changed[place] = argument
        return value, changed

    def keep(self, value: Any) -> Any:
        """Keep an object and return its handle."""
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        if isinstance(value, type):
            ancestors = [one.__name__ for one in value.__mro__]
            return {"h": [number, "type", ancestors if issubclass(value, BaseException) else None]}
        return {"h": [number, type(value).__name__, None]}

    def resolve(self, data: dict[str, Any]) -> Any:
        """What the other side means by a handle: an object kept here, one of the library, or a function over there."""
        ((kind, held),) = data.items()
        if kind == "h":
            return self.kept[held]
        if kind == "g":
            return from_stdlib(held)
        if kind == "e":
            return iter([decode(one, self.resolve) for one in held])
        return Callback(self, held)

    def _describe(self, error: BaseException) -> list[Any]:
        """Names of the exception's classes, its text, its arguments."""
        names = [kind.__name__ for kind in type(error).__mro__]
        try:
            return [names, str(error)[:2000], [encode(one, self.keep) for one in error.args]]
        except BaseException as another:  # the candidate's own __str__
            return [names, f"its text cannot be had ({type(another).__name__})", []]


def _changeable(argument: Any) -> bool:
    return isinstance(argument, list | dict | set | bytearray) or type(argument).__name__ == "deque"


class Callback:
    """A function of the tests, as the candidate sees it: it can be called, and that is all."""

    __slots__ = ("__number", "__owner")

    def __init__(self, owner: Owner, number: int) -> None:
        self.__owner = owner
        self.__number = number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        owner = self.__owner
        encoded = [encode(one, owner.keep) for one in arguments]
        named = {name: encode(one, owner.keep) for name, one in keywords.items()}
        owner.channel.send({"callback": self.__number, "arguments": encoded, "keywords": named})
        answer = owner.channel.receive()
        while "returned" not in answer and "failed" not in answer:  # the tests' function uses the candidate's
            owner.reply(owner.attempt(owner.obey, answer))
            answer = owner.channel.receive()
        if "failed" in answer:
            raise getattr(builtins, answer["failed"][0], RuntimeError)(answer["failed"][1])
        return decode(answer["returned"], owner.resolve)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
