"""format: the completion has the asked form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_toolbox.errors import ConfigError, unknown_option
from grpo_toolbox.rewards.text import compile_pattern, completion_text, without_stop_tokens

LAYOUTS = {
    "think_answer": ("think", "answer"),
    "reasoning_answer": ("reasoning", "answer"),
    "think": ("think", None),
}
"""The blocks of a layout; None stands for some text without tags."""


def format_reward(
    pattern: str | None = None, whole: bool = False, layout: str | None = None, prefill: str = ""
) -> Callable[..., list[float]]:
    """1.0 where the completion has the asked form, 0.0 where not.

    The form is a regular expression (`pattern`, found anywhere, or `whole` for the whole text; the dot matches
    newlines) or a `layout`: think_answer (which also stands in when neither is set), reasoning_answer or think.
    `prefill` is text that the prompt already ends with; it counts as part of the completion. The function logs the
    share of completions without the form as metric `invalid_format_rate`.
    """
    matches = _matcher(pattern, whole, layout)

    def score(completions: Sequence[Any], log_metric: Any = None) -> list[float]:
        texts = (prefill + without_stop_tokens(completion_text(completion)) for completion in completions)
        scores = [float(matches(text)) for text in texts]
        if log_metric is not None and scores:
            log_metric("invalid_format_rate", scores.count(0.0) / len(scores))
        return scores

    score.__name__ = "format"
    # exact_match logs under the same name what it could not read; the format's own verdict is the one to show
    score.owned_metrics = ("invalid_format_rate",)  # type: ignore[attr-defined]
    return score


def has_layout(text: str, layout: str) -> bool:
    """Whether `text` consists of the layout's non-blank blocks, each tag exactly once, with only blanks between.

    Takes time linear in the length of `text`. Tags are literal: `<THINK>` is not one.
    """
    first, second = LAYOUTS[layout]
    inside, rest = _split_block(text, first)
    if not inside.strip() or not rest.strip():
        return False
    if second is None:
        return True
    inside, rest = _split_block(rest, second)
    tags = (f"<{second}>", f"</{second}>")
    return bool(inside.strip()) and not rest.strip() and all(text.count(tag) == 1 for tag in tags)


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
        return lambda text: has_layout(text, chosen)
    compiled = compile_pattern(pattern)
    search = compiled.fullmatch if whole else compiled.search
    return lambda text: search(text) is not None
