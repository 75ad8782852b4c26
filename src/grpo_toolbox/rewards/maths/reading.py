"""From a formula to what it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from grpo_toolbox.rewards.maths.latex import TEXT, Unreadable, canonical, trimmed
from grpo_toolbox.rewards.maths.nodes import (
    DOTS,
    Choice,
    Group,
    Interval,
    Matrix,
    Named,
    Node,
    Relation,
    Union,
    Value,
    Words,
    without_obvious,
)
from grpo_toolbox.rewards.maths.numbers import number
from grpo_toolbox.rewards.maths.quantities import as_product, based, plain_value, quantity

LONGEST = 1_000
"""Characters of a formula that is taken apart; a longer one is compared as it stands."""
_MOST_PARTS = 64
_DEEPEST = 30
_BRACKET = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)

_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LISTED = re.compile(r"\\(?:gcd|lcm|max|min)(?![a-zA-Z])")
"""What takes several numbers, so that the commas between them part them."""
_TOKEN = re.compile(r"\\text\{[^{}]*\}|\\[a-zA-Z]+ ?|\\.|[a-zA-Z]+|.", re.DOTALL)
_OPEN = {"(", "[", "{", r"\{", r"\langle", r"\begin"}
_CLOSE = {")", "]", "}", r"\}", r"\rangle", r"\end"}
_BRACKETS = {"(": ")", "[": "]", r"\{": r"\}", r"\langle ": r"\rangle"}
_JOINED = re.compile(r"(?:\\text\{)?\s*,?\s*(?P<word>and|or)\s*,?\s*\}?\Z")
_LEAD = re.compile(
    r"\A(?:\\text\{\s*(?:either|both|the|exactly|is|are)?\s*\}|="
    r"|\\(?:approx|therefore|implies|Rightarrow|rightarrow) ?)"
)
_SIGNS = {"=", "<", ">", r"\leq", r"\geq", r"\neq", r"\in", r"\approx", r"\equiv"}
_ORDER = {"<", ">", r"\leq", r"\geq"}
_TURNED = {">": "<", r"\geq": r"\leq"}
_CHOICE = re.compile(
    r"(?:\\text\{ ?)?(?:\((?P<one>[A-J])\)|(?P<two>[A-J])(?:[).]|:(?=[ \\}\d])))(?: ?\})?"
    r"(?!\(?[A-J][).]|\s*(?:\\text\{)?\s*(?:and|or)\b)(?P<content>[^,;].*)?",
    re.DOTALL,
)
_MATRIX = re.compile(
    r"[(\[]?\\begin\{(?P<kind>[pbBs]?(?:small)?matrix\*?)\}(?P<cells>.*)\\end\{(?P=kind)\}[)\]]?", re.DOTALL
)
_SUBSCRIPT = re.compile(r"_\{[^{}]*\}|'")
_SIMPLE_NAME = re.compile(
    r"(?:[a-zA-Z]{1,2}|\\(?!in(?:fty)?\b)[a-zA-Z]+ ?|\\(?:vec|overrightarrow|overline|hat|bar)\{[a-zA-Z]+\})"
    r"(?:\^\{-1\})?"
    r"(?:\([a-zA-Z](?:,[a-zA-Z])*\))?|\([a-z](?:,[a-z])+\)|\\frac\{d[a-z]?\}\{d[a-z]\}"
)
_LONG_NAME = re.compile(
    r"(?:[a-zA-Z+| ]|\\(?:angle|overline|triangle|cdot|sin|cos|tan|det|gcd|max|min)\b ?|\{[A-Za-z ]*\}"
    r"|\([a-zA-Z\d ,]*\)|(?<![xyz])\^\{2\})+"
)
_OPTION = re.compile(r"(?:option|choice|answer) ?\(?([A-J])\)?", re.IGNORECASE)
_TIME = re.compile(r"(?P<hours>\d{1,2}(?::\d\d)?) ?(?:\\text\{)? ?(?P<half>[apAP])\.?[mM]\.? ?\}?")
_PROSE = re.compile(r"[^\W\d_]{4,}|\\text\{[^{}]*[^\W\d_]{2,}[^{}]*\}|[^\W\d_]{2,} [^\W\d_]{2,}")
_ONE_WORD = {"yes", "no", "true", "odd", "even", "dne", "none", "all"}
_REALS = {r"\mathbb{R}", "all real numbers", "all reals", "all real", "real numbers"}
_ARITHMETIC = re.compile(r"(?:[\d.+\-/()^{} !]|\\(?:cdot|times|frac|sqrt|pi) ?)+")
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def readings(text: str) -> list[Node]:
    """What a formula may mean, likeliest first: `12,500` is a number, and it may be two.

    Empty where there is nothing to read. Raises Unreadable where brackets do not fit together.
    """
    if len(text) > LONGEST:
        return [Words(text)]
    _check_brackets(text)
    formula = canonical(text)
    closed = formula if _LISTED.search(formula) else _GROUPED.sub(lambda match: match[0].replace(",", ""), formula)
    try:
        found = [read(one) for one in dict.fromkeys((closed, formula))]
    except RecursionError:  # a model may write anything
        raise Unreadable("too much inside each other") from None
    products = [as_product(node, formula) for node in found if isinstance(node, Value)]
    return [node for node in (*found, *products) if node is not None]


@lru_cache(maxsize=8192)
def read(text: str) -> Node | None:
    """What a canonical formula is; None where it is empty."""
    text = trimmed(_LEAD.sub("", trimmed(text)))
    while match := TEXT.fullmatch(text):
        text = trimmed(match[1])
    if not text:
        return None
    if text == DOTS.text:
        return DOTS
    for attempt in _ATTEMPTS:
        node = attempt(text)
        if node is not None:
            return node
    return None


def _check_brackets(text: str) -> None:
    """Raise Unreadable where braces do not fit together, or brackets are too deep inside each other."""
    braces = depth = 0
    for match in _BRACKET.finditer(text):
        braces += (match[0] == "{") - (match[0] == "}")
        depth += (match[0] in _OPEN) - (match[0] in _CLOSE)
        if braces < 0 or depth > _DEEPEST:
            break
    if braces or depth > _DEEPEST:
        raise Unreadable(f"the brackets of {text[:40]!r} do not fit together")


def _top_level(text: str) -> Iterator[tuple[str, int, int]]:
    """The tokens of a formula that stand in no brackets, with their places; opening and closing ones are left out."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0].rstrip() or match[0]
        if token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth = max(0, depth - 1)
        elif depth == 0:
            yield token, match.start(), match.end()


def _cut(text: str, is_separator: Callable[[str], bool]) -> list[tuple[str, str]]:
    """The formula cut at separators outside brackets: (separator before it, part) for each part."""
    parts: list[tuple[str, str]] = []
    start, before = 0, ""
    for token, begins, ends in _top_level(text):
        if is_separator(token):
            parts.append((before, text[start:begins]))
            start, before = ends, token
    return [*parts, (before, text[start:])]


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """(opening bracket, content, closing bracket) where one pair of brackets, fitting or not, encloses everything."""
    opening = next((one for one in (*_BRACKETS, "]") if text.startswith(one)), None)
    closing_one = next((one for one in (")", "]", r"\}", r"\rangle", "[") if text.endswith(one)), None)
    if opening is None or closing_one is None:
        return None
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0].rstrip() or match[0]
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth == 0 and match.end() < len(text):
            return None
    return opening, text[len(opening) : -len(closing_one)], closing_one


def _choice(text: str) -> Node | None:
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    letter, rest = match["one"] or match["two"], match["content"] or ""
    if rest.count("{") < rest.count("}"):  # of \text{(C) 12}
        rest = rest.removesuffix("}")
    content = read(rest)
    return Choice(letter, content) if content is not None else Value(letter)


def _matrix(text: str) -> Node | None:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match["cells"]:
        return None
    lines = [line for line in match["cells"].split(r"\\") if line.strip()]
    rows = [[read(cell) for cell in line.split("&")] for line in lines]
    if not rows or any(cell is None for row in rows for cell in row) or len({len(row) for row in rows}) != 1:
        return None
    return Matrix(tuple(tuple(cell for cell in row if cell is not None) for row in rows))


def _union(text: str) -> Node | None:
    parts = [part for _, part in _cut(text, lambda token: token == r"\cup")]
    if len(parts) == 1:
        return None
    if named := _relation_ahead(text):
        return named
    found = [read(part) for part in parts]
    return Union(tuple(node for node in found if node is not None))


def _relation_ahead(text: str) -> Node | None:
    return _relation(text) if any(token in (r"\in", "=") for token, _, _ in _top_level(text)) else None


def _list(text: str) -> Node | None:
    def separates(token: str) -> bool:
        return token in ",;" or _JOINED.match(token) is not None

    pieces = _cut(text, separates)
    if len(pieces) == 1 or len(pieces) > _MOST_PARTS:
        return None
    joined_by_or = any("or" in before for before, _ in pieces)
    items = [node for _, part in pieces if (node := read(part)) is not None]
    items = without_obvious([item for item in items if not _is_range(item)] or items)
    if len(items) == 1:
        return items[0]
    return _joined_intervals(items, joined_by_or) or Group("list", tuple(items))


def _is_range(node: Node) -> bool:
    """Whether it only says which numbers a variable runs through: `k \\in \\mathbb{Z}`."""
    if not isinstance(node, Named):
        return False
    value = node.value
    everything = isinstance(value, Interval) and _is_infinite(value.low) and _is_infinite(value.high)
    return everything or (isinstance(value, Value) and value.text.startswith(r"\mathbb{"))


def _joined_intervals(items: list[Node], joined_by_or: bool) -> Node | None:
    """`x < 1 or x > 3` is a union, `x > 1 and x < 3` one interval."""
    intervals = [item for item in items if isinstance(item, Interval) and item.name]
    if len(intervals) < len(items) or not items:
        return None
    if joined_by_or:
        return Union(tuple(intervals))
    if len(intervals) == 2 and intervals[0].name == intervals[1].name:
        for one, other in (intervals, intervals[::-1]):
            if _is_infinite(one.high) and _is_infinite(other.low):
                return Interval(one.low, other.high, (one.closed[0], other.closed[1]), one.name)
    return None


def _brackets(text: str) -> Node | None:
    found = _enclosed(text)
    if found is None:
        return None
    opening, content, end = found
    if (opening, end) == (r"\{", r"\}") and (condition := _condition(content)):
        return condition
    pieces = [part for _, part in _cut(content, lambda token: token in ",;")]
    items = [node for part in pieces if (node := read(part)) is not None]
    if opening == r"\{":
        wrong = end != r"\}" or any(mark in content for mark in ("|", ":"))
        return None if wrong else Group("set", tuple(without_obvious(items)))
    if len(items) != len(pieces) or not items:
        return None
    if len(items) == 2 and (opening, end) not in (("(", ")"), (r"\langle ", r"\rangle")):
        return _interval(items[0], items[1], (opening == "[", end == "]"))
    if _BRACKETS.get(opening) != end:
        return None
    return items[0] if len(items) == 1 else Group("tuple", tuple(items))


def _condition(text: str) -> Node | None:
    """What `x` is in `x | x > 3`, the inside of a set, where that is an interval or several."""
    pieces = [part for _, part in _cut(text, lambda token: token in "|:")]
    name = pieces[0].removesuffix(r"\in\mathbb{R}")
    found = read(pieces[1]) if len(pieces) == 2 and _is_name(name) else None
    return found if isinstance(found, Interval | Union) else None


def _interval(low: Node, high: Node, closed: tuple[bool, bool], name: str = "") -> Interval:
    return Interval(low, high, (closed[0] and not _is_infinite(low), closed[1] and not _is_infinite(high)), name)


def _is_infinite(node: Node) -> bool:
    return isinstance(node, Value) and node.text.lstrip("+-").strip() == r"\infty"


def _plus_minus(text: str) -> Node | None:
    if not re.search(r"\\[pm]{2}(?![a-zA-Z])", text) or any(token in _SIGNS for token, _, _ in _top_level(text)):
        return None
    upper = re.sub(r"\\pm ?", "+", re.sub(r"\\mp ?", "-", text))
    lower = re.sub(r"\\pm ?", "-", re.sub(r"\\mp ?", "+", text))
    both = [read(upper), read(lower)]
    return Group("list", tuple(node for node in both if node is not None))


def _relation(text: str) -> Node | None:
    pieces = [(sign, trimmed(part)) for sign, part in _cut(text, lambda token: token in _SIGNS)]
    if len(pieces) == 1 or any(not part for _, part in pieces):
        return None
    signs, parts = [sign for sign, _ in pieces[1:]], [part for _, part in pieces]
    if signs == [r"\approx"] and not _is_name(parts[0]):
        return read(parts[0])
    if all(sign in ("=", r"\in", r"\approx", r"\equiv") for sign in signs):
        return _equation(parts)
    ordered = len(signs) <= 2 and all(sign in _ORDER for sign in signs)
    if ordered and (interval := _inequality(parts, signs)):
        return interval
    if len(signs) != 1:
        return None
    if signs == [r"\neq"] and _is_name(parts[0]) and (hole := read(parts[1])):
        ends = (read(r"-\infty"), hole), (hole, read(r"\infty"))
        return Union(tuple(Interval(low, high, (False, False), parts[0]) for low, high in ends if low and high))
    turned = signs[0] in _TURNED
    return Relation(_TURNED.get(signs[0], signs[0]), parts[turned], parts[not turned])


def _equation(parts: list[str]) -> Node | None:
    value = read(parts[-1])
    if value is None:
        return None
    if _is_text(parts[0]) or _ARITHMETIC.fullmatch(parts[0]) or number(parts[0]) is not None:
        return value  # 128 + 19 = 147
    if _is_name(parts[0]):
        return Named(parts[0].replace(" ", ""), value)
    if any(TEXT.search(part) for part in parts):
        return None
    known = isinstance(value, Value) and value.number is not None
    if known and _LONG_NAME.fullmatch(_SUBSCRIPT.sub("", parts[0])):
        return Named(parts[0].replace(" ", ""), value)
    return Relation("=", parts[0], parts[-1]) if len(parts) == 2 else None


def _inequality(parts: list[str], signs: list[str]) -> Node | None:
    """`1 < x \\leq 3` and `x > 1` as intervals; None where no single variable stands alone."""
    where = 1 if len(parts) == 3 else next((index for index, part in enumerate(parts) if _is_name(part)), None)
    if where is None or not _is_name(parts[where]):
        return None
    low: tuple[Node | None, bool] = (read(r"-\infty"), False)
    high: tuple[Node | None, bool] = (read(r"\infty"), False)
    for index, sign in enumerate(signs):
        other = parts[index + 1] if index == where else parts[index]
        if re.search(rf"(?<![\\a-zA-Z]){re.escape(parts[where])}(?![a-zA-Z])", other):
            return None
        below = (sign in ("<", r"\leq")) != (index == where)  # other < name
        bound = (read(other), sign in (r"\leq", r"\geq"))
        low, high = (bound, high) if below else (low, bound)
    if low[0] is None or high[0] is None:
        return None
    return _interval(low[0], high[0], (low[1], high[1]), parts[where].replace(" ", ""))


def _is_name(text: str) -> bool:
    return _SIMPLE_NAME.fullmatch(_SUBSCRIPT.sub("", trimmed(text))) is not None and text.strip() not in (
        r"\pi",
        "e",
        "i",
    )


def _is_text(text: str) -> bool:
    return TEXT.fullmatch(text) is not None or (_PROSE.search(text) is not None and "\\" not in text)


def _labelled(text: str) -> Node | None:
    """`2:30 pm` is a time, `3:4` a ratio, `Answer: 5` a label with a value."""
    if time := _TIME.fullmatch(text):
        return Words(f"{time['hours']} {time['half'].lower()}m")
    pieces = [part for _, part in _cut(text, lambda token: token == ":")]
    label = TEXT.match(text)
    if label and label[1].rstrip().endswith((":", " is")):
        return read(text[label.end() :])
    if len(pieces) == 1:
        return None
    if _is_text(pieces[0]):
        return read(text.partition(":")[2].lstrip("} "))
    numbers = [number(part) for part in pieces]
    if DOTS.text in map(trimmed, pieces):
        return Words(text)
    if any(one is None for one in numbers):
        return None
    return Group("ratio", tuple(Value(part, one) for part, one in zip(pieces, numbers, strict=True)))


def _prose(text: str) -> Node | None:
    if text in _REALS or text.lower() in _REALS:
        return _interval(Value(r"-\infty"), Value(r"\infty"), (False, False))
    if option := _OPTION.fullmatch(text):
        return Value(option[1])
    if text.lower() in ("infinity", "infinite"):
        return Value(r"\infty")
    if text == r"\emptyset":
        return Group("set", ())
    if measured := quantity(text):
        return measured
    plain = _COMMAND.sub("", TEXT.sub("", text))
    wordy = _PROSE.search(plain) or TEXT.search(text) or text.lower() in _ONE_WORD
    return Words(text) if wordy and r"\begin" not in text else None


_ATTEMPTS: tuple[Callable[[str], Node | None], ...] = (
    *(_matrix, _choice, _brackets, _union, _list, _plus_minus, _relation, _labelled, based, _prose, plain_value),
)
"""What a formula is tried as, in this order; the last one takes everything."""
