"""One spelling for the many that LaTeX, Unicode and plain text have for the same formula."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_SYMBOLS = {
    **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/"},
    **{"∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "⩽": r"\leq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ", "°": r"^{\circ}"},
    **{"π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "ω": r"\omega "},
    **{"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}"},
    **{"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
    **{"⟨": r"\langle ", "⟩": r"\rangle ", "∖": r"\setminus ", "√": r"\sqrt ", "→": r"\rightarrow ", "′": "'"},
    **dict.fromkeys("−﹣－–‒", "-"),
    **dict.fromkeys("\u200b\u2061\u2062\ufeff", ""),
}
_UNICODE = str.maketrans(_SYMBOLS)
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_ON_THE_LINE = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")

_GAP = r"\\[,;:>! ]|~|[\u00a0\u2009\u202f]|\\(?:thin|med|thick)space(?![a-zA-Z])|\{[,\s]\}|['’]|\\mathpunct\{,\}"
_GROUP_GAP = re.compile(rf"(?<=\d)(?:{_GAP})+(?=\d{{3}}(?!\d))")
_GROUPED_BY_BLANKS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
_SYSTEM = re.compile(
    r"\\begin\{(?P<kind>aligned|align\*?|alignedat|gathered|gather\*?|cases|split|equation\*?)\}(?P<lines>[^\0]*?)\\end\{(?P=kind)\}"
)
_DOUBLED = re.compile(r"\\\\(?=[a-zA-Z{}$%])")
_DECIMAL_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_DOTS = r"(?:\.{3,}|\\[lc]?dots(?![a-zA-Z]))"
_LISTED_DOTS = re.compile(r"(?<=[,;:+])\s*\.{3,}")
_GOES_ON = re.compile(rf"(?P<whole>\d*\.)(?P<places>\d{{1,300}})\s*{_DOTS}(?!\s*\d)")
_TURNS = re.compile(r"(?P<fixed>\d*?)(?:(?P<one>\d)(?P=one){2,}|(?P<turn>\d{2,6}?)(?P=turn)+)")
_CIS = re.compile(
    r"(?:\\text\{ ?cis ?\}|\\cis(?![a-zA-Z]) ?)"
    r"(?P<angle>\([^()]*\)|(?:[\d.]+|\\frac\{[^{}]*\}\{[^{}]*\})(?:\\pi ?|\^\{\\circ ?\})?)"
)

_TOKEN = re.compile(r"\\[a-zA-Z]+\*?|\\.|\d+|[a-zA-Z]+|\*\*|[<>!=]=|\s+|.", re.DOTALL)
_TEXT = {
    *{"text", "textnormal", "textrm", "textbf", "textit", "texttt", "textsf", "textsc", "textup", "emph", "mbox"},
    *{"hbox", "mathrm", "operatorname", "mathit", "mathsf"},
}
_FONTS = {
    *{"mathbf", "boldsymbol", "bm", "pmb", "mathcal", "mathscr", "mathfrak", "mathtt", "underline", "fbox", "boxed"},
    *{"ensuremath", "displaylines", "framebox"},
}
_FRACTIONS = {"frac", "dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"}
_SIZES = {"left", "right", "middle", *(a + b for a in ("big", "Big", "bigg", "Bigg") for b in ("", "l", "r", "m"))}
_IGNORED = {
    *{"displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "rm", "bf", "it", "boldmath", "centering"},
    *{"hline", "nonumber", "notag", "checkmark"},
}
_IGNORED_WITH_ARGUMENT = {"hspace", "vspace", "label", "tag", "color", "textcolor", "phantom", "hphantom", "vphantom"}
_SPACES = {"quad", "qquad", "thinspace", "medspace", "thickspace", "enspace", "space", "newline"}
_NAMES = {
    **{"le": "leq", "leqslant": "leq", "ge": "geq", "geqslant": "geq", "ne": "neq", "varnothing": "emptyset"},
    **{"ast": "cdot", "dbinom": "binom", "tbinom": "binom", "arctg": "arctan", "tg": "tan", "ctg": "cot", "lg": "log"},
    **{"ldots": "dots", "cdots": "dots", "dotsc": "dots", "iff": "Leftrightarrow", "to": "rightarrow"},
    **{"degree": "circ", "degrees": "circ", "bigcup": "cup", "backslash": "setminus", "euro": "€", "pounds": "£"},
}
_CHARACTERS = {
    **{"lt": "<", "gt": ">", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "vert": "|"},
    **{"lvert": "|", "rvert": "|", "Vert": "|", "div": "/", "colon": ":", "mid": "|", "dollar": "$", "percent": "%"},
    **{"land": r"\text{ and }", "wedge": r"\text{ and }", "lor": r"\text{ or }", "vee": r"\text{ or }"},
    **{"%": "%", "$": "$", "#": "#", "&": "&", "_": " ", "|": "|", "{": r"\{", "}": r"\}", "\\": r"\\", "/": ""},
}
_PLAIN = {"<=": r"\leq ", ">=": r"\geq ", "!=": r"\neq ", "==": "=", "*": r"\cdot ", "$": ""}
FUNCTIONS = frozenset(
    (
        *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln"),
        *("exp", "min", "max", "gcd", "lcm"),
    )
)
_PLAIN_NAMES = {"pi": r"\pi ", "infinity": r"\infty ", "infty": r"\infty ", "inf": r"\infty ", "oo": r"\infty "}
_DEEPEST = 100
TEXT = re.compile(r"\\text\{([^{}]*)\}")
"""Words in a canonical formula."""

_BLANK = re.compile(
    r"(?P<kept>\\text\{[^{}]*\}|\\[a-zA-Z]+ (?=[a-zA-Z])|(?<=[^\W_]) (?=[^\W_])|(?<=\d,) (?=\d{3}(?!\d)))|\s+"
)
_BEFORE = " \t\n,;:"
_AFTER = _BEFORE + "."


class Unreadable(ValueError):
    """A text that is no formula."""


def canonical(text: str) -> str:
    """Rewrite a formula so that what looks the same in print is spelled the same.

    Fractions become `\\frac{a}{b}`, exponents `^{n}`, plain-text functions commands, text of any font `\\text{words}`
    without braces inside; sizes, fonts, spaces and math delimiters go; thousands groups made with spaces or `{,}` are
    closed, while commas between digits stay. `$` stands for the currency only. Takes linear time.
    """
    text = text.strip("*`")  # of Markdown
    text = _SYSTEM.sub(lambda match: match["lines"].replace("&", " ").replace(r"\\", ", "), text)
    if r"\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_ON_THE_LINE)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_ON_THE_LINE)}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_UNICODE))
    text = _DECIMAL_COMMA.sub(".", _GROUP_GAP.sub("", text))
    text = _LISTED_DOTS.sub(r"\\dots ", _GOES_ON.sub(_going_on, text))
    return trimmed(_CIS.sub(lambda match: f"e^{{i({match['angle'].strip('()')})}}", tidy(_Rewriter(text).rest())))


def _going_on(match: re.Match[str]) -> str:
    """A decimal that goes on: `0.1666...` repeats its end, of `3.14159...` the digits are what is known."""
    turns = _TURNS.fullmatch(match["places"])
    if turns is None:
        return match["whole"] + match["places"]
    return rf"{match['whole']}{turns['fixed']}\overline{{{turns['one'] or turns['turn']}}}"


def tidy(text: str) -> str:
    """Drop the blanks that separate nothing; `12, 500` keeps its blank, because `12,500` is a number."""
    text = _GROUPED_BY_BLANKS.sub(lambda match: match[0].replace(" ", ""), " ".join(text.split()))
    return _BLANK.sub(lambda match: match["kept"] or "", text)


def trimmed(text: str) -> str:
    """Drop blanks and stops at both ends, and a pair of braces around the whole of `text`."""
    while True:
        shorter = text.lstrip(_BEFORE).rstrip(_AFTER).removesuffix(r"\\")
        if shorter.startswith("{") and closing(shorter, 0) == len(shorter) - 1:
            shorter = shorter[1:-1]
        if shorter == text:
            return text
        text = shorter


def closing(text: str, start: int) -> int:
    """The index of the brace that closes the one at `start`; -1 where none does. `\\{` and `\\}` do not count."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.start()
    return -1


class _Rewriter:
    """Reads a formula token by token, as TeX does, and writes it in one spelling."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = _TOKEN.findall(text)
        self.at = 0
        self.depth = 0

    def rest(self, until: str = "") -> str:
        """What is left, or what is left before the token `until`, which is read, too."""
        out: list[str] = []
        while self.at < len(self.tokens):
            token = self._next()
            if token == until:
                break
            out.append(self._rewritten(token))
        return "".join(out)

    def _next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def _peek(self) -> str:
        """The next token that is no blank, which becomes the current one; empty at the end."""
        while self.at < len(self.tokens) and self.tokens[self.at].isspace():
            self.at += 1
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _argument(self, whole_number: bool = True) -> str:
        """What a command or `^` applies to: a group in braces or round brackets, or one token."""
        token = self._peek()
        if not token or token in "}&":
            return ""
        self.at += 1
        if token == "{":
            return self.rest("}")
        if token.isalpha() or (token.isdigit() and not whole_number):  # TeX takes one letter or digit
            self.tokens[self.at - 1 : self.at] = [token[0], *([token[1:]] if token[1:] else [])]
            return token[0]
        if token == "-":
            return "-" + self._rewritten(self._next()) if self._peek() else "-"
        return self._rewritten(token)

    def _rewritten(self, token: str) -> str:
        """What a token, with all that belongs to it, is in the one spelling."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unreadable("too much inside each other")
        written = self._write(token)
        self.depth -= 1
        return written

    def _write(self, token: str) -> str:
        if token == "{":
            return self._braces(self.rest("}"))
        if token in "^_" and token:
            return f"{token}{{{self._raised()}}}"
        if token.startswith("\\"):
            name = token[1:].rstrip("*") or token[1:]
            return self._command(name)
        if token == "**":
            return f"^{{{self._raised()}}}" if self._peek() else ""
        if token.isalpha() and token.isascii():
            return self._letters(token)
        if token.isspace() or token == "~":
            return " "
        return _PLAIN.get(token, token)

    def _braces(self, inside: str) -> str:
        """A group in braces, which may be a fraction or a binomial in TeX's own way: `{5 \\choose 2}`."""
        above, over, below = inside.partition(r"\over ")
        if over:
            return rf"\frac{{{above.strip()}}}{{{below.strip()}}}"
        n, choose, k = inside.partition(r"\choose ")
        if choose:
            return _binomial(n.strip(), k.strip())
        return f"{{{inside}}}" if inside.strip() else " "

    def _raised(self) -> str:
        if self._peek() == "(":
            self.at += 1
            return self._round()
        return self._argument()

    def _round(self) -> str:
        """What stands between the round bracket just read and the one that closes it."""
        out: list[str] = []
        depth = 1
        while self.at < len(self.tokens):
            token = self._next()
            depth += (token == "(") - (token == ")")
            if depth == 0:
                break
            out.append(self._rewritten(token))
        return "".join(out)

    def _letters(self, word: str) -> str:
        if word.lower() == "sqrt" and self._peek():
            self.at += self._peek() == "("
            inside = self._round() if self.tokens[self.at - 1] == "(" else self._argument()
            return rf"\sqrt{{{inside}}}"
        if word in FUNCTIONS:
            return f"\\{word} "
        return _PLAIN_NAMES.get(word, word)

    def _command(self, name: str) -> str:
        for names, write in _HANDLED:
            if name in names:
                return write(self, name)
        if name in _CHARACTERS:
            return _CHARACTERS[name]
        if not name.isalpha():
            return " "  # a control space
        name = _NAMES.get(name, name)
        return f"\\{name} " if name.isascii() else name

    def _fraction(self, name: str) -> str:
        above = self._argument(whole_number=False)
        return rf"\frac{{{above}}}{{{self._argument(whole_number=False)}}}"

    def _binomial(self, name: str) -> str:
        n = self._argument(whole_number=False)
        return _binomial(n, self._argument(whole_number=False))

    def _root(self, name: str) -> str:
        index = ""
        if self._peek() == "[":
            self.at += 1
            index = f"[{self.rest(']')}]"
        if self._peek() == "(":
            self.at += 1
            return rf"\sqrt{index}{{{self._round()}}}"
        return rf"\sqrt{index}{{{self._argument(whole_number=False)}}}"

    def _words(self, name: str) -> str:
        if self._peek() != "{":
            return self._argument(whole_number=False)
        self.at += 1
        start, depth = self.at, 1
        while self.at < len(self.tokens) and depth:
            token = self._next()
            depth += (token == "{") - (token == "}")
        raw = self.tokens[start : self.at - (depth == 0)]
        words = "".join(" " if one in _GAPS else one for one in raw if one not in _NOT_WORDS)
        if words.strip() in FUNCTIONS:
            return f"\\{words.strip()} "
        if not any(map(str.isalpha, words)) or (name == "mathrm" and words.strip() in _CONSTANTS):
            return f" {words} ".replace("  ", " ")
        return rf"\text{{{words}}}"

    def _content(self, name: str) -> str:
        inside = self._argument(whole_number=False)
        return f"{{{inside}}}" if len(inside) > 1 else inside

    def _modulo(self, name: str) -> str:
        return rf"\text{{ mod }}{self._argument()}"

    def _skip(self, name: str) -> str:
        self._argument()
        return " "

    def _size(self, name: str) -> str:
        self.at += self._peek() == "."
        return ""

    def _environment(self, name: str) -> str:
        kind = self._argument().strip()
        if kind == "array" and name == "begin" and self._peek() == "{":
            self._argument()
        return rf"\{name}{{{'matrix' if kind == 'array' else kind}}}"


def _binomial(n: str, k: str) -> str:
    return rf"\frac{{({n})!}}{{({k})!(({n})-({k}))!}}"  # a parser that multiplies out would hang on a large one


_GAPS = {"~", r"\,", r"\ ", r"\;", r"\quad"}
_CONSTANTS = {"e", "i", "d", "T"}
_NOT_WORDS = {"{", "}", "$", "\\", r"\textbf", r"\text", r"\mathrm", r"\textit", r"\(", r"\)"}
_HANDLED: tuple[tuple[set[str], Callable[[_Rewriter, str], str]], ...] = (
    (_FRACTIONS, _Rewriter._fraction),
    ({"binom", "dbinom", "tbinom"}, _Rewriter._binomial),
    ({"sqrt"}, _Rewriter._root),
    ({"pmod", "mod"}, _Rewriter._modulo),
    (_TEXT, _Rewriter._words),
    (_FONTS, _Rewriter._content),
    (_SIZES, _Rewriter._size),
    (_IGNORED, lambda rewriter, name: ""),
    (_IGNORED_WITH_ARGUMENT, _Rewriter._skip),
    (_SPACES, lambda rewriter, name: " "),
    ({"begin", "end"}, _Rewriter._environment),
)
