"""math and numeric: a number in any accepted style is right, and with one digit changed it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_toolbox.rewards.maths.equality import NoAlgebra, same_answer
from grpo_toolbox.rewards.maths.final_answer import final_answer
from grpo_toolbox.rewards.maths.latex import Unreadable
from grpo_toolbox.rewards.maths.reading import readings
from grpo_toolbox.rewards.numeric import find_number, gold_number

Style = Callable[[str], str]


def grouped(separator: str) -> Style:
    """Thousands set apart, as in 1,234,567.5."""

    def write(text: str) -> str:
        sign = "-" if text.startswith("-") else ""
        whole, dot, rest = text.removeprefix("-").partition(".")
        return sign + f"{int(whole):,}".replace(",", separator) + dot + rest

    return write


PLAIN: list[Style] = [
    lambda text: text,
    lambda text: f" {text}. ",
    lambda text: text.replace("-", "−"),
    lambda text: f"${text}$",
    lambda text: f"{text}0" if "." in text else f"{text}.0",
    lambda text: f"-00{text[1:]}" if text.startswith("-") else f"00{text}",
    grouped(","),
]
FORMULAS: list[Style] = [
    *PLAIN,
    grouped("{,}"),
    grouped(r"\,"),
    grouped(r"\ "),
    lambda text: rf"\textbf{{{text}}}",
    lambda text: rf"\left({text}\right)",
    lambda text: f"x = {text}",
    lambda text: rf"\boxed{{{text}}}",
    lambda text: rf"{text}\times 10^{{0}}",
    lambda text: f"{text}e0",
]
QUANTITIES: list[Style] = [
    *FORMULAS,
    lambda text: f"-\\${text[1:]}" if text.startswith("-") else f"\\${text}",
    lambda text: rf"{text}\text{{ cm}}",
    lambda text: rf"{text}\,\mathrm{{km}}^2",
    lambda text: f"{text} apples",
]
WRITTEN: list[Style] = [
    *PLAIN,
    lambda text: f"-\\${text[1:]}" if text.startswith("-") else f"${text}",
    lambda text: f"{text} dollars",
    lambda text: f"{text}%",
    lambda text: f"**{text}**",
    lambda text: f"x = {text}",
    lambda text: f"3 + 4 = {text}",
]

numbers = st.builds(
    lambda sign, whole, decimals: f"{sign}{whole}" + (f".{decimals}" if decimals else ""),
    st.sampled_from(["", "-"]),
    st.integers(1, 9_999_999),
    st.text("0123456789", max_size=3),
)


@st.composite
def number_and_another(draw: st.DrawFn) -> tuple[str, str]:
    """A number, and the same with one digit changed."""
    number = draw(numbers)
    place = draw(st.sampled_from([index for index, character in enumerate(number) if character.isdigit()]))
    leading = place == 0 or number[place - 1] == "-"
    others = [digit for digit in "0123456789"[leading:] if digit != number[place]]
    return number, number[:place] + draw(st.sampled_from(others)) + number[place + 1 :]


def graded(answer: str, gold: str) -> bool | None:
    return same_answer(readings(gold), readings(answer), NoAlgebra())


@settings(max_examples=150, deadline=None)
@given(number_and_another(), st.sampled_from(FORMULAS), st.sampled_from(QUANTITIES))
def test_a_number_is_right_in_any_style_and_another_is_wrong(pair: tuple[str, str], gold: Style, answer: Style) -> None:
    number, another = pair
    assert graded(answer(number), gold(number)) is True
    assert graded(answer(another), gold(number)) is False


@settings(max_examples=150, deadline=None)
@given(
    number_and_another(), st.sampled_from(WRITTEN), st.sampled_from(["#### {}", r"So \boxed{{{}}}.", "#### {}\nDone."])
)
def test_numeric_reads_a_number_in_any_style(pair: tuple[str, str], style: Style, place: str) -> None:
    number, another = pair
    gold = gold_number(f"12 - 5 = <<12-5=7>>7 steps\n#### {number}")
    assert gold == Fraction(number)
    assert find_number("First 3, then 4.\n" + place.format(style(number)), require_marker=True) == gold
    assert find_number("First 3, then 4.\n" + place.format(style(another)), require_marker=True) != gold


FRACTIONS: list[Callable[[int, int], str]] = [
    lambda a, b: rf"\frac{{{a}}}{{{b}}}",
    lambda a, b: rf"\dfrac{{{a}}}{{{b}}}",
    lambda a, b: f"{a}/{b}",
    lambda a, b: rf"-\frac{{{-a}}}{{{b}}}" if a < 0 else rf"\tfrac{{{a}}}{{{b}}}",
    lambda a, b: rf"\frac{{{-a}}}{{{-b}}}",
    lambda a, b: rf"\frac{{{3 * a}}}{{{3 * b}}}",
    lambda a, b: rf"x=\left(\frac{{{a}}}{{{b}}}\right)",
    lambda a, b: ("-" if a < 0 else "") + rf"{abs(a) // b}\frac{{{abs(a) % b}}}{{{b}}}",
    lambda a, b: ("-" if a < 0 else "") + f"{abs(a) // b} {abs(a) % b}/{b}",
]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(-99, 99).filter(bool), st.integers(1, 99), st.sampled_from(FRACTIONS), st.sampled_from(FRACTIONS),
    st.integers(-3, 3).filter(bool),
)  # fmt: skip
def test_a_fraction_is_right_in_any_style(
    above: int, below: int, gold: Callable[[int, int], str], answer: Callable[[int, int], str], off: int
) -> None:
    assert graded(answer(above, below), gold(above, below)) is True
    assert graded(answer(above + off, below), gold(above, below)) is False


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=5, unique=True), st.randoms())
def test_sets_have_no_order_and_tuples_have(items: list[int], random: object) -> None:
    shuffled = [*items[1:], items[0]]
    bare, turned = ",".join(map(str, items)), ", ".join(map(str, shuffled))
    assert graded(rf"\{{{turned}\}}", rf"\{{{bare}\}}") is True
    assert graded(turned, bare) is True
    assert graded(f"({turned})", f"({bare})") is False
    assert graded(", ".join(map(str, shuffled[1:])), bare) is False


PIECES = [*r"\{}()[]$^_,.;:=<>+-*/|!&%0123456789 xyabC", r"\frac", r"\text{", r"\boxed{", r"\sqrt", "####", "and", "\n"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing is raised but Unreadable, which a formula without end deserves; reading twice gives the same."""
    assert final_answer(text, "announced") == final_answer(text, "announced")
    assert find_number(text) == find_number(text)
    try:
        assert readings(text) == readings(text)
    except Unreadable:
        assert text.count("{") + text.count("}") > 0
