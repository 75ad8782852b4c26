"""math: what is equal. Each table is a rule of docs/rewards.md; a line is gold answer, what is right, what is wrong."""

from __future__ import annotations

import asyncio

import pytest

from grpo_toolbox.rewards.maths.equality import NoAlgebra, same_answer
from grpo_toolbox.rewards.maths.grading import grade
from grpo_toolbox.rewards.maths.latex import Unreadable, canonical
from grpo_toolbox.rewards.maths.reading import readings
from grpo_toolbox.rewards.maths.units import unit_name

Rule = list[tuple[str, list[str], list[str]]]

NUMBERS: Rule = [
    (
        "7",
        ["007", "7.", "7.0", "+7", "(7)", "$7$", r"\(7\)", "{7}", r"\boxed{7}", "7e0", r"\text{7}"],
        ["-7", "70", "7!"],
    ),
    ("-5", ["−5", "–5", r"-\,5", "-5.00"], ["5", "+5"]),
    ("0.5", [".5", r"\frac12", "0.50", "1/2", r"\tfrac{2}{4}", "½"], ["5", "0.05", r"\frac{2}{1}"]),
    (r"-\frac{1}{2}", [r"\frac{-1}{2}", r"\frac{1}{-2}", "-0.5", "-1/2"], [r"\frac12", r"-\frac{2}{1}"]),
    (
        r"\frac{3}{7}",
        [r"\frac 3 7", r"\frac37", r"\frac{6}{14}", r"\\frac{3}{7}"],
        [r"\frac{3}{8}", "3", "37", r"\frac{7}{3}"],
    ),
    (r"2\frac{1}{3}", [r"\frac{7}{3}", "2 1/3", r"2 \frac13", r"2+\frac13"], [r"\frac{2}{3}", r"2\cdot\frac13", "2"]),
    (
        "12500",
        ["12,500", "12{,}500", r"12\,500", r"12\ 500", "12 500", r"12\!,500", "12500.0"],
        ["12, 500", "12,501", "12.5"],
    ),
    ("1234567.89", ["1,234,567.89", r"1\,234\,567.89"], ["1234567.9", "123456.789"]),
    ("12.5", ["12{,}5", r"\frac{25}{2}"], ["125", "12,5"]),
    (
        r"3\times 10^{-7}",
        ["3e-7", r"3\cdot10^{-7}", "0.0000003", "3 × 10⁻⁷", "3 x 10^-7"],
        [r"9\times 10^{-7}", "3e-8", "3e7"],
    ),
    ("1000000", ["10^6", "1{,}000{,}000", "1e6", r"1 \text{ million}"], ["1000001", "10^7", "999999.99"]),
    (r"0.1\overline{6}", [r"\frac16", "0.1(6)"], ["0.16", "0.1"]),
    ("0", [r"\frac{0}{5}", "-0"], ["0.(3)", r"\emptyset"]),
    ("2^{100}", ["1267650600228229401496703205376"], ["1267650600228229401496703205377", "2^{101}"]),
    ("1.5", [r"3\cdot\frac12"], [r"3\frac12"]),
    ("72", ["12*6=72", "x = 72", r"12 \cdot 6 = 72"], ["12*6", "72 = 71"][1:]),
]
APPROXIMATIONS: Rule = [
    (
        r"\sqrt{19}",
        ["4.358898943540674", "4.35890", "4.358899", "4.35889", r"\sqrt{19} \approx 4.36"],
        ["4.36", "4.3589", "4.35891"],
    ),
    (r"\frac{1}{3}", ["0.333333", "0.3333333333333333"], ["0.33", "0.33333", "0.333334", "0.3333343"]),
    (r"\frac{2}{3}", ["0.666667", "0.666666"], ["0.667", "0.666668"]),
    (r"\frac{1}{8}", ["0.125"], ["0.1250001", "0.124999"]),
    (r"\pi", ["3.14159265358979", "3.141593"], ["3.14", r"\frac{22}{7}", "3.1415"]),
    ("3.14", ["3.140"], [r"\pi", "3.14159265"]),
    ("3", ["3.000000"], ["2.9999999", "3.0000001"]),
    ("0.1", ["0.10000000000000001"], ["0.1000001"]),
    ("0.6931471805599453", ["0.693147180559945", r"\ln 2"], ["0.693146"]),
    ("262537412640768744", [], [r"e^{\pi\sqrt{163}}"]),  # equal in its first thirty digits
]
PERCENT: Rule = [
    (r"35\%", ["0.35", "35", "35%", r"\frac{7}{20}", "35 percent", r"35\text{ percent}"], ["0.035", "36%", "3.5"]),
    ("0.35", [r"35\%"], ["35", r"0.35\%"]),
    ("35", [r"35\%"], ["0.35", r"3500"]),
    (r"\frac{1}{3}", [r"33\frac{1}{3}\%"], [r"33\%"]),
]
UNITS: Rule = [
    (
        "12",
        [
            r"12\text{ cm}",
            r"12\,\mathrm{cm}^2",
            "12 cm",
            "12 apples",
            r"12 \text{ units}",
            r"\$12",
            "12 dollars",
            "12^\\circ",
            "12 m",
        ],
        ["12m", r"12 \text{ or more}", r"\text{at least }12", "12 million"],
    ),
    (
        r"12\text{ cm}",
        ["12", "12 centimeters", r"12\;\mathrm{cm}"],
        [r"12\text{ m}", r"12\text{ cm}^2", r"13\text{ cm}", "120 mm"],
    ),
    (r"\$12.50", ["12.5", r"12.50\text{ dollars}", r"\$12.5"], ["12.05", "€12.50", "12.50 cents"]),
    (r"\$1{,}000{,}000", [r"\$1 million", "1000000"], ["1 million euros"]),
    (r"90^\circ", ["90", "90°", r"90\text{ degrees}", r"90^{\circ}"], [r"\frac{\pi}{2}", "9"]),
    (r"2\sqrt{3}\text{ cm}", [r"2\sqrt3", r"2\sqrt{3}\text{ units}"], [r"2\sqrt{3}\text{ m}", "2"]),
    (
        r"9.8\text{ m/s}^2",
        [r"9.8\,\frac{\text{m}}{\text{s}^2}", r"9.8\ \text{m}/\text{s}^2", r"9.8\,\mathrm{m/s^2}", "9.8"],
        [r"9.8\text{ m/s}", r"9.8\frac{\text{km}}{\text{s}^2}", "9.7"],
    ),
    ("3", [r"3\text{ kg}\cdot\text{m}"], []),
    (r"7 \pmod{10}", ["7", r"x\equiv 7\pmod{10}"], [r"7 \pmod{11}", r"8 \pmod{10}", "10"]),
    (r"60\text{ miles per hour}", ["60 mph", r"60\text{ mi/h}", "60"], ["60 km/h"]),
    ("5m", [r"5\cdot m", "5 m"], ["5"]),
    ("2000000", [r"2\text{ million}"], [r"2\text{ billion}", "2"]),
]
ALGEBRA: Rule = [
    (r"2 - \sqrt{3}", [r"-\sqrt3+2", r"\frac{1}{2+\sqrt{3}}", "2-sqrt(3)", "2-√3"], ["2", r"2+\sqrt{3}", r"\sqrt{3}"]),
    (r"4\sqrt{2}", [r"\sqrt{32}", "4*sqrt(2)", "4√2", r"4 \cdot 2^{1/2}"], ["4", r"2\sqrt{4}"]),
    (r"\frac{3\pi}{4}", ["3*pi/4", r"\frac34\pi", r"0.75\pi", "3π/4"], [r"\frac34", r"\frac{4\pi}{3}"]),
    ("x^2+2x+1", ["(x+1)^2", "1+2x+x^2", "x**2 + 2*x + 1"], ["(x+1)^3", "x^2+2x", "(y+1)^2"]),
    (r"\sqrt{x^2}", ["|x|"], ["x"]),
    ("R^2-r^2", ["(R-r)(R+r)"], ["0", "r^2-R^2"]),
    (r"\sqrt{5/k}", [r"\frac{\sqrt{5}}{\sqrt{k}}"], [r"\frac{5}{\sqrt{k}}"]),
    (r"7\sin(\frac{\pi}{5}x)", ["7 sin(pi*x/5)"], ["7 sin(pi*x/4)", "7 cos(pi*x/5)"]),
    (r"\sin^2 x+\cos^2 x", ["1"], ["0"]),
    (r"\ln(x^2)", [r"2\ln x"], [r"\ln x"]),
    (r"\sin 30^\circ", [r"\frac12"], [r"\sin 30"]),
    (r"\log_{10} 2", [r"\log 2"], [r"\ln 2"]),
    (r"\binom{n}{2}", [r"\frac{n(n-1)}{2}"], [r"\frac{n^2}{2}"]),
    ("3+4i", ["4i+3", r"3+4\mathrm{i}"], ["3-4i", "7"]),
    (r"\int_0^1 x\,dx", [r"\frac12"], ["1"]),
    (r"\frac{n(n+1)}{2}", [r"\sum_{i=1}^n i"], [r"\sum_{i=1}^n i^2"]),
    ("e", [r"\lim_{n\to\infty}(1+\frac1n)^n"], ["2.718"]),
    ("-1", [r"e^{i\pi}", "i^2"], ["1"]),
    (r"\frac{\pi}{2}+k\pi", [r"k\pi+\frac{\pi}{2}, k\in\mathbb{Z}"], [r"k\pi"]),
    (r"\frac{1}{x}", ["x^{-1}"], [r"\frac{1}{x+1}"]),
    (r"\alpha_1+\gamma", [r"\gamma+\alpha_1"], [r"\alpha_2+\gamma", r"\alpha_1+\Gamma"]),
    (r"7^{9^{9^8}}", ["7^{9^{9^{8}}}"], ["7^{9^{9^{9}}}", "43"]),
    (r"\frac{1}{2004!}", [r"\frac{2005}{2005!}"], [r"\frac{1}{2006!}", "0"]),  # however small
    (
        r"\frac{2^{2005}+1}{3\cdot2^{2006}}",
        [r"\frac16+\frac{1}{3\cdot2^{2006}}"],
        [r"\frac{1}{3\cdot2^{2006}}", r"\frac16"],
    ),
    (r"\gcd(34,510)", ["34", r"\gcd(68,102)"], ["34510", "510", "6"]),
    ("18", [r"\gcd(36,54)", r"\gcd(36, 54)=18", r"\text{gcd}(a,b)=18", r"\max\{3,18\}"], [r"\text{lcm}(36,54)"]),
    ("10.0", [r"{5 \choose 2}", r"\binom52", r"\dbinom{5}{2}"], [r"{5 \choose 1}"]),
    (r"\frac{3}{11}", [r"{3 \over 11}"], [r"{11 \over 3}"]),
    (
        r"2\operatorname{cis}(60^\circ)",
        [r"2\text{ cis }60^\circ", r"2e^{i\pi/3}", r"1+\sqrt3 i"],
        [r"2\text{ cis }30^\circ"],
    ),
]
DOTS: Rule = [
    (r"1, 2, \ldots, n", [r"1,2,\dots,n", "1, 2, 3, ..., n"], [r"1, 3, 5, \ldots, 2n-1", r"1,2,\ldots", "1,2,n"]),
    (r"\{2,4,6,\ldots,20\}", [r"\{2,4,\dots,20\}"], [r"\{2,4,\dots,22\}", r"\{2,3,\dots,20\}", r"\{2,20\}"]),
    (r"1,2,4,8,\ldots", [r"1, 2, 4, 8, \dots"], [r"1,2,4,\ldots"]),  # no equal steps
    (r"1:2:3:\ldots", [r"1:2:3:\dots"], [r"1:4:9:\ldots"]),
    (r"\frac49", ["0.444...", r"0.4444\ldots", "0.444…"], ["0.44...", "0.444"]),
    (r"\frac56", ["0.8333..."], ["0.8383..."]),
    (r"\frac17", [r"0.142857142857\ldots"], [r"0.142857\ldots142"]),
    (r"\pi", [r"3.14159\ldots"], [r"3.14\ldots"]),
]
EQUATIONS: Rule = [
    ("x=5", ["5", "x = 5", "x=2+3=5", "2x=10"], ["y=5", "x=6", "5x"]),
    (
        "5",
        ["x=5", "f(2)=5", r"\text{Area}=5", "Answer: 5", r"\text{The answer is } 5", r"m+n = 2+3 = 5"],
        ["x=6", "x>5"],
    ),
    ("5x - 2y + 9=0", ["5x-2y=-9", "-10x+4y=18", r"y = \frac{5x+9}{2}"], ["5x + 7y + 11=0", "5x-2y=9", "0"]),
    ("y=2x+1", ["2x+1", "f(x)=2x+1", "2x-y+1=0"], ["2x", "y=2x-1"]),
    ("x^2+y^2=4", ["y^2+x^2=4"], ["4", "x^2+y^2=2"]),
    ("x+y=11", ["y+x=11", "x=11-y"], ["11", "x+y=4"]),
    ("11", ["x+y=11"], []),
    ("m=4,6,9", ["4,6,9", "m=9, m=4, m=6"], ["m=4,6,8", "m=4,6", "9"]),
    ("x=1, y=2", [r"\begin{cases}x=1\\y=2\end{cases}", "(1,2)", "y=2, x=1", "(x,y)=(1,2)"], ["x=2, y=1", "(2,1)"]),
]
SEVERAL: Rule = [
    ("3,5", ["5, 3", r"x=3 \text{ or } x=5", "3 and 5", r"\{3,5\}", "(3,5)"], ["3", "3,5,7", "3,6"]),
    (r"8 \text{ and } 27", ["27, 8"], ["27", "8, 27, 64"]),
    ("5", [r"5 \text{ or } 5.0", "5,5"], ["4,5", r"5 \text{ or } 6", r"\pm 5"]),
    (r"\pm 12", ["12, -12", r"-12 \text{ and } 12", r"\mp 12"], ["12", "-12"]),
    (r"1\pm\sqrt{2}", [r"1+\sqrt2, 1-\sqrt2"], [r"1+\sqrt2"]),
    (r"\{8, 27\}", [r"\{27, 8\}", "8, 27", r"\{8,27,8\}"], [r"\{8\}", "(8,27)", r"\{8,28\}"]),
    (
        "(8, 27)",
        ["(8,27)", "8, 27", r"\langle 8,27\rangle", r"\left(8,\,27\right)"],
        ["(27, 8)", "27, 8", "(8,27,0)", "[8,27]"],
    ),
    ("(30,5)", [], ["(27,8)"]),  # not two empty intervals
    (r"\{(1,2),(3,4)\}", [r"\{(3,4),(1,2)\}"], [r"\{(2,1),(3,4)\}"]),
    ("100,200,300", ["100, 200, 300", "300, 200, 100"], ["100, 200"]),
    (r"\emptyset", [r"\{\}", r"\varnothing"], ["0"]),
]
INTERVALS: Rule = [
    ("[0,1)", [r"\left[0,1\right)", r"0 \le x < 1", r"x\in[0,1)"], ["(0,1)", "[0,1]", "(0,1]", "[0,2)"]),
    ("x<3", ["3>x", r"(-\infty,3)", "x < 3.0"], [r"x\le 3", "x>3", r"(-\infty,3]", "y<3"]),
    (r"x\geq 3", [r"[3,\infty)", "x>=3", "x ≥ 3", r"3 \leqslant x"], ["x>3", r"(3,\infty)"]),
    ("1<x<2", ["(1,2)", r"x>1 \text{ and } x<2", r"\{x \mid 1<x<2\}"], [r"1<x\le2", "x>1"]),
    (r"(0,1)\cup(2,3)", [r"(2,3)\cup(0,1)", "(0,1)∪(2,3)"], ["(0,1)", r"(0,1)\cup[2,3)", r"(0,1)\cap(2,3)"]),
    (r"(-\infty,1)\cup(3,\infty)", [r"x<1 \text{ or } x>3"], ["1<x<3"]),
    (r"(-\infty,\infty)", [r"\mathbb{R}", r"\text{all real numbers}"], [r"[0,\infty)"]),
    (r"\mathbb{R}\setminus\{3\}", [r"(-\infty,3)\cup(3,\infty)"], [r"\mathbb{R}", r"(-\infty,3)"]),
    (r"x\neq 3", [r"x \ne 3", r"(-\infty,3)\cup(3,\infty)"], [r"x\neq4", "3"]),
    ("x+y<3", ["y+x<3", "-x-y>-3"], ["x+y>3", "x+y<4"]),
]
MATRICES: Rule = [
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\left[\begin{array}{cc}1&2\\3&\frac82\end{array}\right]"],
        [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"],
    ),
    (
        r"(3,4)",
        [r"\begin{pmatrix}3\\4\end{pmatrix}", r"\begin{pmatrix}3&4\end{pmatrix}"],
        [r"\begin{pmatrix}4\\3\end{pmatrix}"],
    ),
    (
        r"\begin{pmatrix}3\\\sqrt{8}\end{pmatrix}",
        [r"(3,2\sqrt2)", r"\vec{v}=\begin{pmatrix}3\\2\sqrt2\end{pmatrix}"],
        [r"\begin{pmatrix}3&\sqrt8\end{pmatrix}"],
    ),
]
TEXT: Rule = [
    (
        "C",
        [r"\text{C}", r"\textbf{(C)}", "(C)", "C.", "C)", r"\mathrm{C}", "(C) 12", r"\text{(C) }12", "Option C"],
        ["B", "c", "(B) 12", "CC"],
    ),
    ("12", ["(C) 12"], ["(C) 13"]),
    ("(C) 12", ["C", "12", r"\text{(C)}\ 12"], ["(C) 13", "(B) 12", "B"]),
    ("A, C", ["C and A", r"\text{(A), (C)}"], ["A", "A, B"]),
    (r"2:30 \text{ PM}", ["2:30 PM", r"\text{2:30 pm}"], ["2:30 AM", "2:31 PM", "2:30"]),
    (r"\infty", [r"\text{infinity}", r"+\infty"], [r"-\infty"]),
    (r"\text{east}", ["East", r"\textbf{east.}"], ["west", "northeast"]),
    ("Yes", ["yes", r"\text{YES.}"], ["No", "Yes and no"]),
    ("Alice and Bob", ["Bob and Alice"], ["Alice"]),
    ("12:00", ["12:00"], ["1:00", "12:30"]),
    ("2:30", ["2:30", "02:30"], ["1:15", "3:45", r"2:30 \text{ PM}"]),  # a time is no ratio
    ("C", ["C: 12", r"\text{C: }12"], ["B: 12", "C:D"]),
    (r"\text{(A) and (B)}", ["A, B", "B and A", "AB"], ["A", "AC"]),
    ("ACD", ["A, C, D", r"\{D,A,C\}"], ["AC", "A, C"]),
    (r"\text{DNE}", ["does not exist"], ["0", r"\infty"]),
    ("no solution", [r"\text{No solution}", r"\text{no solutions}", r"\emptyset"], ["solution", "0", r"\{0\}"]),
    ("101_2", ["101_{2}", r"101_{\text{two}}", "101"], ["101_3", "5", "110_2"]),
    ("3:4", ["6:8", r"\frac34", "3 : 4"], ["4:3", "3:5"]),
    ("1:2:3", ["2:4:6"], ["1:3:2", "1:2"]),
    (r"x \equiv 3 \pmod 7", [r"x\equiv3\pmod{7}"], [r"x\equiv 4 \pmod 7"]),
]

RULES = {
    **{"numbers": NUMBERS, "approximations": APPROXIMATIONS, "percent": PERCENT, "units": UNITS, "algebra": ALGEBRA},
    "dots": DOTS,
    **{"equations": EQUATIONS, "several": SEVERAL, "intervals": INTERVALS, "matrices": MATRICES, "text": TEXT},
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_right_and_what_is_wrong(name: str) -> None:
    expected = {
        (gold, answer): verdict
        for gold, right, wrong in RULES[name]
        for verdict, answers in ((True, right), (False, wrong))
        for answer in answers
    }
    found = dict(zip(expected, asyncio.run(grade(list(expected), timeout=300.0)), strict=True))
    assert {pair: verdict for pair, verdict in found.items() if verdict != expected[pair]} == {}


SAME = [
    *(("12", "(C) 12"), ("12", r"12\text{ cm}"), (r"12\text{ cm}", "(C) 12"), ("C", "(C) 12"), ("35", r"35\%")),
    *(("0.35", r"35\%"), ("x=5", "5"), ("12.5", r"\$12.50"), ("1000000", r"\$1{,}000{,}000")),
    *(("3", r"x \equiv 3 \pmod 7"), (r"7 \pmod{10}", "7"), ("11", "x+y=11")),
    *((r"\emptyset", "no solution"), (r"8 \text{ and } 27", r"\{8, 27\}"), ("(8, 27)", r"8 \text{ and } 27")),
]


def test_no_gold_answer_is_another_one() -> None:
    golds = [gold for rule in RULES.values() for gold, _, _ in rule]
    assert all(_decided(gold, gold) for gold in golds)
    equal = {frozenset((gold, other)) for gold in golds for other in golds if gold != other and _decided(gold, other)}
    assert equal == {frozenset(pair) for pair in SAME}


def _decided(gold: str, answer: str) -> bool | None:
    return same_answer(readings(gold), readings(answer), NoAlgebra())


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        (r"\left(\dfrac12,\ 3\right]", r"(\frac{1}{2},3]"),
        ("x**2 + sqrt(x+1)", r"x^{2}+\sqrt{x+1}"),
        ("2√3", r"2\sqrt{3}"),
        ("x² ≤ 3", r"x^{2}\leq 3"),
        (r"\sqrt[3]{\tfrac{a}{b}}", r"\sqrt[3]{\frac{a}{b}}"),
        (r"12\,\mathrm{cm}^2", r"12\text{cm}^{2}"),
        (r"\displaystyle\color{red}{5}", "5"),
        (r"\textcolor{red}{\mathbf{5}}", "5"),
        (r"\begin{array}{cc}1&2\end{array}", r"\begin{matrix}1&2\end{matrix}"),
        ("sin(pi x)", r"\sin(\pi x)"),
        (r"\$7{,}250", "$7250"),
        ("", ""),
        ("\\", ""),
    ],
)
def test_formulas_have_one_spelling(text: str, spelled: str) -> None:
    assert canonical(text) == spelled
    assert canonical(spelled.replace("$", r"\$")) == spelled


@pytest.mark.parametrize("text", ["\\frac{1}{", "}{", "{" * 200 + "}" * 200, "(" * 900, "\\sqrt" * 150])
def test_what_has_no_end_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        readings(text)


@pytest.mark.parametrize(
    ("words", "unit"),
    [
        *(("square centimeters", "cm^2"), ("cm^2", "cm^2"), ("sq cm", "cm^2"), ("meters per second", "m/s")),
        *(("kilometers", "km"), ("feet", "ft"), ("mph", "mi/h"), ("cubic feet", "ft^3"), ("days", "day")),
        *(("apples", None), ("", None), ("m/", None), ("x", None)),
    ],
)
def test_units_have_one_name(words: str, unit: str | None) -> None:
    assert unit_name(words) == unit
