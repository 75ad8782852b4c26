"""language_consistency: the completion is written in one language."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_toolbox.errors import DataError, unknown_option
from grpo_toolbox.rewards.answers import after_thinking
from grpo_toolbox.rewards.golds import Golds
from grpo_toolbox.rewards.signatures import declare
from grpo_toolbox.rewards.text import completion_text, without_stop_tokens

PARTS = ("all", "thinking", "answer")
SCRIPTS = {  # where the letters of a script stand in Unicode
    "latin": ((0x41, 0x24F), (0x1E00, 0x1EFF), (0x2C60, 0x2C7F), (0xA720, 0xA7FF), (0xFB00, 0xFB06)),
    "greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F)),
    "hebrew": ((0x590, 0x5FF), (0xFB1D, 0xFB4F)),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0x8A0, 0x8FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFC)),
    "devanagari": ((0x900, 0x97F), (0xA8E0, 0xA8FF)),
    "bengali": ((0x980, 0x9FF),),
    "thai": ((0xE00, 0xE7F),),
    "hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7FF)),
    "kana": ((0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9D)),
    "han": ((0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
}
LANGUAGES = {
    **dict.fromkeys(("en", "de", "fr", "es", "it", "pt", "nl"), ("latin",)),
    **{"ru": ("cyrillic",), "uk": ("cyrillic",), "el": ("greek",), "he": ("hebrew",), "ar": ("arabic",)},
    **{"hi": ("devanagari",), "bn": ("bengali",), "th": ("thai",), "ko": ("hangul",)},
    **{"zh": ("han",), "ja": ("kana", "han")},
}
"""The scripts of a language."""
_FUNCTION_WORDS = {
    "en": "the of and to is that it for was with as are this be have from or by not but what we if which so they you"
    " there has can then each all these their my let because how in on at an am no me he she do also die hat had door"
    " come per plus pour main son hay man more since than would should will been into about them our",
    "de": "der die das und ist nicht ein eine einen zu mit den von dem auf für sich auch es wir sie ich wenn dass wird"
    " sind oder aber wie bei nach also dann hat haben noch um aus in an am so was war er man des im zum zur uns alle",
    "fr": "le la les et est une des du pour dans que qui pas sur plus avec ce il elle nous vous sont au aux donc par"
    " ne se mais ou cette ces être avons ont comme si de en un on me te tu ma son as es",
    "es": "el la los las y es un una del por que con para no se lo como más pero su al son entonces hay este esta"
    " tenemos porque si cuando ser están o de en me te tu le les sin ha he come ella",
    "it": "il lo la gli e è un una del della che per con non di si sono come più ma nel alla quindi questo questa"
    " abbiamo perché se anche i dei delle ogni in le al no me te tu su ne da dal o a ci ha hanno",
    "pt": "o a os as e é um uma do da dos das que para com não em no na se por mais como mas são então temos porque"
    " isso este esta ao ser também de me te tu ele ela",
    "nl": "de het een en is van dat niet te met voor zijn op aan we er ook als maar wordt dus om bij naar hebben deze"
    " dit zij ik wat nog uit of door in die was per me alle plus",
    "ru": "и в не на что это с как по из у за то мы он она так все его для если но или есть нет к от до",
    "uk": "і в не на що це з як по із у за то ми він вона так усе все його для якщо але або є немає до від та",
}
"""Words that any text of a language has; what is a word of several stands in each, and tells nothing."""
_WORDS = {language: frozenset(words.split()) for language, words in _FUNCTION_WORDS.items()}
_NO_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.*?\\\)|\\\[.*?\\\]|\\boxed\{[^{}]*\}|\\[a-zA-Z]+"
    r"|</?[a-zA-Z_]+>|https?://\S+",
    re.DOTALL,
)
_SENTENCE = re.compile(r"[。！？!?\n]+")
_STARTS = sorted((first, last, script) for script, ranges in SCRIPTS.items() for first, last in ranges)


def language_consistency(
    language: str = "en", column: str | None = None, part: str = "all"
) -> Callable[..., list[float | None]]:
    """The share of a completion that is in `language`, from 0 to 1 (as in DeepSeek-R1, 2025); None without words.

    The share of letters that are of the language's script, times the share of function words that are its own, of
    those that belong to just one of the languages of its script. Code, formulas, commands, tags, addresses and single
    Latin or Greek letters are of no language. `column` names a data column with each row's language (None: not
    applicable); `part` is what is read: all, the thinking, or the answer behind it.
    """
    if part not in PARTS:
        raise unknown_option("reward.part", part, PARTS)
    if language not in LANGUAGES:
        raise unknown_option("reward.language", language, LANGUAGES)

    def score(
        completions: Sequence[Any], log_extra: Any = None, log_metric: Any = None, **columns: Sequence[Any]
    ) -> list[float | None]:
        texts = [_part(without_stop_tokens(completion_text(completion)), part) for completion in completions]
        wanted = [language] * len(texts) if column is None else columns[column]
        return [None if one is None else language_share(text, one) for text, one in zip(texts, wanted, strict=True)]

    score.golds = Golds(  # type: ignore[attr-defined]
        lambda row: sample(language if column is None else row[column], part),
        lambda row: _in_another(language if column is None else row[column], part),
        charges=True,
    )
    declare(score, "language_consistency", ["completions", *([] if column is None else [column])])
    if column is not None:
        score.check_rows = partial(_check_rows, column)  # type: ignore[attr-defined]
    return score


def language_share(text: str, language: str) -> float | None:
    """The share of `text` that is in `language`; None where it has no letters that are of any."""
    said = _NO_LANGUAGE.sub(" ", unicodedata.normalize("NFKC", text))
    words = re.findall(r"[^\W\d_]+", said)
    counted = [word for word in words if len(word) > 1 or script_of(word) not in ("latin", "greek")]
    letters = [script_of(letter) for word in counted for letter in word]
    if not letters:
        return None
    own = sum(script in LANGUAGES[language] for script in letters)
    if language == "ja":
        own -= sum(_chinese_letters(sentence) for sentence in _SENTENCE.split(said))
    return own / len(letters) * _own_words([word.lower() for word in counted], language)


def sample(language: str | None, part: str) -> str | None:
    """Some words of a language that has them here, else some letters of it, as a completion; None for no language."""
    if language is None:
        return None
    others = [words for other, words in _WORDS.items() if other != language and LANGUAGES[other] == LANGUAGES[language]]
    own = sorted(_WORDS.get(language, frozenset()) - frozenset().union(*others))
    first, _ = max(SCRIPTS[LANGUAGES[language][0]], key=lambda ends: ends[1] - ends[0])
    letters = [one for one in map(chr, range(first, first + 0x60)) if one.isalpha()]
    text = " ".join(own[:12]) or " ".join(map("".join, zip(letters[::3], letters[1::3], letters[2::3], strict=False)))
    return f"<think>{text}</think>\n42" if part == "thinking" else text


def _in_another(language: str | None, part: str) -> dict[str, str]:
    other = sample("ru" if LANGUAGES.get(language or "") == ("latin",) else "en", part)
    return {"another language": other} if language is not None and other is not None else {}


def script_of(letter: str) -> str:
    """The script of a letter; other for what SCRIPTS does not list."""
    place = bisect_right(_STARTS, (ord(letter[0]), 0x110000, "")) - 1
    first, last, script = _STARTS[max(place, 0)]
    return script if first <= ord(letter[0]) <= last else "other"


def _own_words(words: Sequence[str], language: str) -> float:
    """The share of the language's function words among those of its script; 1 where there are none."""
    if language not in _WORDS:
        return 1.0
    others = [_WORDS[one] for one in _WORDS if one != language and LANGUAGES[one] == LANGUAGES[language]]
    foreign = frozenset().union(*others)
    own = sum(word in _WORDS[language] and word not in foreign for word in words)
    wrong = sum(word in foreign and word not in _WORDS[language] for word in words)
    return own / (own + wrong) if own + wrong else 1.0


def _chinese_letters(sentence: str) -> int:
    """The characters of a sentence that has eight or more and none of the kana that Japanese cannot do without."""
    scripts = [script_of(letter) for letter in re.findall(r"[^\W\d_]", sentence)]
    return 0 if "kana" in scripts or scripts.count("han") < 8 else scripts.count("han")


def _part(text: str, part: str) -> str:
    if part == "all":
        return text
    answer = after_thinking(text)
    return answer if part == "answer" else text[: len(text) - len(answer)]


def _check_rows(column: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError for a row whose language is none of LANGUAGES."""
    for row in rows:
        if row[column] is not None and row[column] not in LANGUAGES:
            raise DataError(
                f"prompt {row['prompt']!r:.60}: language {row[column]!r} in column '{column}' is not known: it may be"
                f" {', '.join(LANGUAGES)}, or empty."
            )
