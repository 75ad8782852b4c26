"""format: the completion has the asked form."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.rewards.golds import FORMS, Golds, Row, from_pattern
from grpo_toolbox.rewards.text import compile_pattern, completion_text, content_text, without_stop_tokens

log = logging.getLogger(__name__)

LAYOUTS = {
    "think_answer": ("think", "answer"),
    "reasoning_answer": ("reasoning", "answer"),
    "think": ("think", None),
}
"""The blocks of a layout; None stands for some text without tags."""
CREDITS = ("all", "tags", "tags_once")
_BLANKS = "\u200b\u200c\u200d\u2060\ufeff"
"""Characters without width, which are no blanks to Python and nothing to a reader."""


def format_reward(
    pattern: str | None = None,
    whole: bool = False,
    layout: str | None = None,
    prefill: str | None = None,
    credit: str = "all",
    trailing_cost: float = 0.001,
    saturate: float = 1.0,
) -> Callable[..., list[float]]:
    """1.0 where the completion has the asked form, 0.0 where not; with `credit` the share of its tags.

    The form is a regular expression (`pattern`, found anywhere, or `whole` for the whole text; the dot matches
    newlines) or a `layout`: think_answer (which also stands in when neither is set), reasoning_answer or think.
    `prefill` is text that the prompt already ends with; it counts as part of the completion. None reads it from the
    prompt: a last message of the assistant, or the layout's opening tag at the end of a text. `credit=tags` pays a
    layout's tags that are there, `tags_once` those that are there exactly once, less `trailing_cost` per character
    behind the last block; credit of `saturate` and more is full credit: min(1, credit/saturate). The function logs the
    share of completions without the form as metric `invalid_format_rate`.
    """
    matches = _matcher(pattern, whole, layout)
    chosen = None if pattern is not None else layout or "think_answer"
    pay = _payment(chosen, credit, trailing_cost, saturate)

    def score(completions: Sequence[Any], prompts: Sequence[Any] | None = None, log_metric: Any = None) -> list[float]:
        begun = _prefills(prompts, len(completions), chosen) if prefill is None else [prefill] * len(completions)
        said = [without_stop_tokens(completion_text(completion)) for completion in completions]
        texts = [start + text for start, text in zip(begun, said, strict=True)]
        fits = [matches(text) for text in texts]
        if log_metric is not None and fits:
            log_metric("invalid_format_rate", fits.count(False) / len(fits))
        if chosen is not None and texts and all(_begins_inside(text, chosen) for text in texts):
            _say_prefilled(LAYOUTS[chosen][0])
        return [float(fit) if pay is None else pay(text) for fit, text in zip(fits, texts, strict=True)]

    score.__name__ = "format"
    # exact_match logs under the same name what it could not read; the format's own verdict is the one to show
    score.owned_metrics = ("invalid_format_rate",)  # type: ignore[attr-defined]
    score.golds = _golds(matches, pattern, layout or "think_answer", prefill)  # type: ignore[attr-defined]
    return score


def has_layout(text: str, layout: str) -> bool:
    """Whether `text` consists of the layout's non-blank blocks, each tag exactly once, with only blanks between.

    Takes time linear in the length of `text`. Tags are literal: `<THINK>` is not one.
    """
    first, second = LAYOUTS[layout]
    inside, rest = _split_block(text, first)
    if _is_blank(inside) or _is_blank(rest):
        return False
    if second is None:
        return True
    inside, rest = _split_block(rest, second)
    tags = (f"<{second}>", f"</{second}>")
    return not _is_blank(inside) and _is_blank(rest) and all(text.count(tag) == 1 for tag in tags)


def layout_tags(layout: str) -> list[str]:
    """The tags of a layout, in order."""
    return [tag for block in LAYOUTS[layout] if block is not None for tag in (f"<{block}>", f"</{block}>")]


def tag_credit(text: str, layout: str, once: bool = False, trailing_cost: float = 0.001) -> float:
    """The share of the layout's tags that `text` has (`once`: exactly once), from 0 to 1.

    Where the last block is closed exactly once, each character behind it, blanks at either end left out, takes off
    `trailing_cost`; not in layout think, whose block is followed by text.
    """
    tags = layout_tags(layout)
    counts = [text.count(tag) for tag in tags]
    earned = sum(count == 1 if once else count > 0 for count in counts) / len(tags)
    if LAYOUTS[layout][1] is not None and counts[-1] == 1:
        earned -= trailing_cost * len(text.partition(tags[-1])[2].strip())
    return max(0.0, earned)


def _payment(layout: str | None, credit: str, trailing_cost: float, saturate: float) -> Callable[[str], float] | None:
    """What a text earns by its tags; None where it is all or nothing."""
    if credit not in CREDITS:
        raise unknown_option("reward.credit", credit, CREDITS)
    if not _is_number(trailing_cost) or trailing_cost < 0:
        raise ConfigError(f"reward.trailing_cost={trailing_cost!r} must be a number of at least 0, such as 0.001.")
    if not _is_number(saturate) or not 0 < saturate <= 1:
        raise ConfigError(
            f"reward.saturate={saturate!r} must be above 0 and at most 1: the credit that is paid in full."
        )
    if credit == "all":
        if saturate != 1:
            raise ConfigError(f"reward.saturate={saturate} has no effect with credit=all: set reward.credit=tags_once.")
        return None
    if layout is None:
        raise ConfigError(f"reward.credit={credit} pays the tags of a layout, and reward.pattern has none: set one.")
    return lambda text: min(1.0, tag_credit(text, layout, credit == "tags_once", trailing_cost) / saturate)


def _prefills(prompts: Sequence[Any] | None, size: int, layout: str | None) -> list[str]:
    return [""] * size if prompts is None else [_prefill(prompt, layout) for prompt in prompts]


def _prefill(prompt: Any, layout: str | None) -> str:
    """What a prompt has already said of the completion."""
    if not isinstance(prompt, str):
        last = prompt[-1] if prompt else {}
        return content_text(last.get("content")) if last.get("role") == "assistant" else ""
    opening = "" if layout is None else f"<{LAYOUTS[layout][0]}>"
    return opening if opening and prompt.rstrip().endswith(opening) else ""


def _begins_inside(text: str, layout: str) -> bool:
    opening, closing = layout_tags(layout)[:2]
    return opening not in text and closing in text


@functools.cache
def _say_prefilled(tag: str) -> None:
    log.warning(
        "reward 'format': completions end a <%s> that they never begin, so they score 0. If the chat template opens it"
        " for them, set reward.prefill='<%s>\\n'.",
        tag,
        tag,
    )


def _is_blank(text: str) -> bool:
    return not text.strip() or not text.translate(dict.fromkeys(map(ord, _BLANKS))).strip()


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _golds(matches: Callable[[str], bool], pattern: str | None, layout: str, prefill: str | None) -> Golds:
    """A text of the form, and one whose closing tags were lost; of a pattern only where a text can be guessed."""
    if pattern is None:
        first, second = LAYOUTS[layout]
        whole = f"<{first}>\n6 times 7\n</{first}>\n" + (f"<{second}>\n42\n</{second}>" if second else "42")

        def write(row: Row) -> str:
            return whole.removeprefix(_prefill(row.get("prompt"), layout) if prefill is None else prefill)

        return Golds(write, lambda row: {"closing tags lost": write(row).replace("</", "<")})
    tried = (from_pattern(pattern, "42"), *(form("42") for form in FORMS.values()))
    found = next((text for text in tried if matches((prefill or "") + text)), None)
    return Golds(lambda row: found)


def _split_block(text: str, tag: str) -> tuple[str, str]:
    """Content of the block that `text` begins with, and what follows; both empty where there is no such block."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    text = text.lstrip()
    if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
        return "", ""
    inside, _, rest = text.removeprefix(opening).partition(closing)
    return inside, rest


def _matcher(pattern: str | None, whole: bool, layout: str | None) -> Callable[[str], bool]:
    if pattern is not None and layout is not None:
        raise ConfigError(f"reward.pattern={pattern!r} and reward.layout={layout!r} are both set: set one of them.")
    if pattern is None:
        chosen = layout or "think_answer"
        if chosen not in LAYOUTS:
            raise unknown_option("reward.layout", chosen, LAYOUTS)
        if whole:
            raise ConfigError("reward.whole=true goes with reward.pattern; a layout is always the whole completion.")
        return lambda text: has_layout(text, chosen)
    compiled = compile_pattern(pattern)
    search = compiled.fullmatch if whole else compiled.search
    return lambda text: search(text) is not None
