"""The candidate's functions and objects as the tests see them: every use is a question, every answer plain data.

Questions whose answer the candidate could shape to please (`==`, `<`, `in`, truth) are put only to objects of a class
that the tests name, as tests of a class do. An object that came back in place of a plain answer equals nothing.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable, Coroutine, Iterator
from itertools import islice
from typing import Any

from grpo_toolbox.rewards.code.inside.wire import Channel, decode, encode, stdlib_name

LONGEST_ITERATOR = 100_000


class CandidateLost(BaseException):
    """The candidate's process is gone, or does not keep to the wire's form."""


class CannotSend(BaseException):
    """The tests pass something that cannot leave their process: their fault, not the candidate's."""


class Remote:
    """The candidate's end of the wire, and what has come of it so far."""

    def __init__(self, channel: Channel, named: frozenset[str]) -> None:
        self.channel = channel
        self.named = named
        """Names that the tests use: objects of classes called so may answer for themselves."""
        self.proxies: dict[int, Any] = {}
        self.functions: list[Callable[..., Any]] = []
        self.exceptions: dict[str, type[BaseException]] = {}
        self.lost: BaseException | None = None

    def ask(self, request: dict[str, Any]) -> Any:
        """Put a request; the value of the answer, or the exception that it tells of."""
        answer = self._exchange({"ask": request})
        while "callback" in answer:
            answer = self._exchange({"ask": self._call_back(answer)})
        if answer.get("printed") and sys.stdout is not sys.__stdout__:  # the tests look at what is printed
            print(answer["printed"], end="")
        if "raised" in answer:
            raise self._exception(*answer["raised"])
        return decode(answer["value"], self.proxy)

    def word(self, word: str, *arguments: Any) -> Any:
        """Ask for one of the operations that `objects.py` lists."""
        return self.ask({"word": word, "arguments": [encode(one, self.reference) for one in arguments]})

    def call(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call an object; arguments that it has changed in place are changed here, too."""
        sent = [encode(one, self.reference) for one in arguments]
        named = {name: encode(one, self.reference) for name, one in keywords.items()}
        value, changed = self.ask({"call": number, "arguments": sent, "keywords": named})
        for place, content in changed.items():
            _refill(arguments[place] if isinstance(place, int) else keywords[place], content)
        return value

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.lost is not None:
            raise self.lost
        self.channel.send(message)
        answer = self.channel.receive()
        if "lost" in answer:
            self.lost = CandidateLost(answer["lost"])
            raise self.lost
        return answer

    def _call_back(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the tests for the candidate."""
        arguments = [decode(one, self.proxy) for one in request["arguments"]]
        keywords = {name: decode(one, self.proxy) for name, one in request["keywords"].items()}
        try:
            value = self.functions[request["callback"]](*arguments, **keywords)
            return {"returned": encode(value, self.reference)}
        except Exception as error:  # the tests' function, which may be meant to raise
            return {"failed": [type(error).__name__, str(error)[:2000]]}

    def reference(self, value: Any) -> Any:
        """The handle of what the tests pass on: the candidate's own object, a name of the library, a function."""
        if isinstance(value, Proxy):
            return {"h": object.__getattribute__(value, "_number")}
        if isinstance(value, BaseException):
            raise TypeError("an exception that was caught stays with the tests")
        known = [number for number, proxy in self.proxies.items() if proxy is value]
        if known:  # an exception class of the candidate's
            return {"h": known[0]}
        if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType | type):
            name = stdlib_name(value)
            if name is not None:
                return {"g": name}
            if not isinstance(value, type):
                self.functions.append(value)
                return {"f": len(self.functions) - 1}
        if isinstance(value, Iterator):
            items = list(islice(value, LONGEST_ITERATOR + 1))
            if len(items) <= LONGEST_ITERATOR:
                return {"e": [encode(one, self.reference) for one in items]}
        raise CannotSend(
            f"the tests pass an object of class {type(value).__name__}: define the class in the setup code"
        )

    def proxy(self, data: dict[str, Any]) -> Any:
        """What stands here for one of the candidate's objects; the same object is always the same proxy."""
        number, kind, ancestors = data["h"]
        if number not in self.proxies:
            if ancestors is not None:
                self.proxies[number] = self.exception_class(ancestors)
            else:
                class_of = CoroutineProxy if kind == "coroutine" else Proxy
                self.proxies[number] = class_of(self, number, kind)
        return self.proxies[number]

    def exception_class(self, names: list[str]) -> type[BaseException]:
        """An exception class with the candidate's ancestry as far as it goes, and Python's own from there on."""
        known = getattr(builtins, names[0], None)
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        if names[0] not in self.exceptions:
            content = {"__str__": lambda error: error.__dict__.get("text", "")}
            self.exceptions[names[0]] = type(names[0], (self.exception_class(names[1:]),), content)
        return self.exceptions[names[0]]

    def _exception(self, names: list[str], text: str, arguments: list[Any]) -> BaseException:
        kind = self.exception_class(names)
        given = [decode(one, self.proxy) for one in arguments]
        try:
            error: BaseException = kind(*given)
        except TypeError:  # a class of Python's that wants other arguments
            error = BaseException.__new__(kind)
            error.args = tuple(given)
        error.__dict__["text"] = text
        return error


class Proxy:
    """One of the candidate's functions, classes, instances or iterators."""

    def __init__(self, remote: Remote, number: int, kind: str) -> None:
        object.__setattr__(self, "_remote", remote)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._remote.call(self._number, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return self._remote.word("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote.word("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._remote.word("delattr", self, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Proxy) and bool(self._remote.word("isinstance", instance, self))

    def __subclasscheck__(self, subclass: Any) -> bool:
        return isinstance(subclass, Proxy) and bool(self._remote.word("issubclass", subclass, self))

    def __iter__(self) -> Iterator[Any]:
        return self._remote.word("iter", self)

    def __exit__(self, *_: Any) -> None:
        self._remote.word("exit", self)

    def __await__(self) -> Any:
        yield from ()
        return self._remote.word("await", self)

    def __hash__(self) -> int:
        return int(self._remote.word("hash", self)) if self._answers() else id(self)

    def __bool__(self) -> bool:
        return bool(self._remote.word("bool", self)) if self._answers() else True

    def __contains__(self, item: Any) -> bool:
        if self._answers():
            return bool(self._remote.word("contains", self, item))
        return any(one is item or one == item for one in self)

    def _answers(self) -> bool:
        return self._kind in self._remote.named


class CoroutineProxy(Proxy, Coroutine[Any, Any, Any]):
    """A coroutine of the candidate's: it runs to its end over there when it is awaited here."""

    def send(self, value: Any) -> Any:
        """Run it to its end."""
        raise StopIteration(self._remote.word("await", self))

    def __next__(self) -> Any:
        return self.send(None)

    def throw(self, *error: Any) -> Any:
        """Refuse to go on."""
        raise error[0]

    def close(self) -> None:
        """Leave it."""


def _question(word: str, sign: str) -> Callable[[Any, Any], Any]:
    def compare(self: Proxy, other: Any) -> Any:
        if word in ("eq", "ne") and not (isinstance(other, Proxy) and self._answers() and other._answers()):
            return (self is other) == (word == "eq")
        if not self._answers():
            raise TypeError(f"{sign} needs plain data or an object of a class that the tests name, not {self._kind}")
        return self._remote.word(word, self, other)

    return compare


def _operation(word: str) -> Callable[..., Any]:
    return lambda self, *others: self._remote.word(word, self, *others)


def _reflected(word: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._remote.word(word, other, self)


def _complete(kind: type[Proxy]) -> None:
    """Give the class the methods that Python looks up on classes only."""
    for word, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
        setattr(kind, f"__{word}__", _question(word, sign))
    for word in ("len", "next", "repr", "str", "format", "int", "float", "reversed", "enter", "round"):
        setattr(kind, f"__{word}__", _operation(word))
    for word in ("getitem", "setitem", "delitem", "neg", "pos", "abs", "invert", "index"):
        setattr(kind, f"__{word}__", _operation(word))
    for word in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "xor"):
        setattr(kind, f"__{word}__", _operation(word))
        setattr(kind, f"__r{word}__", _reflected(word))
        setattr(kind, f"__i{word}__", _operation(f"i{word}"))
    for word in ("and", "or"):
        setattr(kind, f"__{word}__", _operation(f"{word}_"))
        setattr(kind, f"__r{word}__", _reflected(f"{word}_"))


_complete(Proxy)


def _refill(target: Any, content: Any) -> None:
    """Give a container the content of another of its kind."""
    if isinstance(target, list | bytearray):
        target[:] = content
        return
    target.clear()
    target.extend(content) if hasattr(target, "extend") else target.update(content)
