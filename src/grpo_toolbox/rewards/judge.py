"""llm_judge: language models behind OpenAI-compatible endpoints grade the completions."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_toolbox.errors import unknown_option
from grpo_toolbox.rewards.http import Patience
from grpo_toolbox.rewards.judge_cache import ReplyCache
from grpo_toolbox.rewards.judge_form import Form, build_form
from grpo_toolbox.rewards.judge_pairs import check_opponents, judge_pairs, pairs_with_reference, pairs_within_groups
from grpo_toolbox.rewards.judge_panel import VOTES, Found, Panel, build_judges
from grpo_toolbox.rewards.judge_prompts import answer_text, column_text
from grpo_toolbox.rewards.signatures import declare

Judged = list[float | Exception | None]


def llm_judge(
    base_url: str,
    model: str,
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    rubric: Sequence[Mapping[str, Any]] | None = None,
    pairwise: Literal["group", "reference"] | None = None,
    opponents: int | None = None,
    labels: Mapping[str, float] | None = None,
    scale: float | Sequence[float] = 1.0,
    judges: Sequence[Mapping[str, Any]] | None = None,
    vote: Literal["mean", "median", "majority"] = "mean",
    api_key_env: str | None = None,
    temperature: float | None = 0.0,
    max_tokens: int | None = 512,
    request: Mapping[str, Any] | None = None,
    price: Mapping[str, float] | None = None,
    cache: str | None = None,
    timeout: float = 60.0,
    retries: int = 3,
    retry_wait: float = 0.5,
    max_wait: float = 60.0,
    max_concurrency: int = 16,
) -> Callable[..., Coroutine[Any, Any, Judged]]:
    """The verdict of `model` at `base_url` (any chat-completions endpoint), None where its reply holds none.

    It grades against the data's `answer`; or by the weighted criteria of `rubric` (`[{name, weight, description}]`); or
    by the share of comparisons won, `pairwise` with the others of the `group` (`opponents` on either side) or with the
    `reference`, each in both orders. With further `judges` a `vote` decides. A row whose question no judge could be
    asked holds the exception. docs/rewards.md says how replies are read, and what is repeated, kept and counted.
    """
    if vote not in VOTES:
        raise unknown_option("reward.vote", vote, VOTES)
    form = build_form(prompt_template, system_prompt, rubric, pairwise, labels, scale)
    check_opponents(pairwise, opponents)
    described = {"base_url": base_url, "model": model, "api_key_env": api_key_env, "temperature": temperature}
    panel = Panel(
        build_judges(judges, **described, max_tokens=max_tokens, request=request, price=price),
        vote,
        ReplyCache(cache) if cache else None,
        Patience(timeout, retries, retry_wait, max_wait, max_concurrency),
    )
    judging = _Judging(panel, form, pairwise, opponents)

    async def judge(completions: Sequence[Any], log_extra: Any = None, log_metric: Any = None, **inputs: Any) -> Judged:
        found = await judging.rows(completions, inputs)
        if log_extra is not None:
            log_extra("judge_reply", found.replies)
        if log_metric is not None:
            for name, value in found.metrics.items():
                log_metric(name, value)
        return list(found.scores)

    declare(judge, "llm_judge", ["completions", *sorted(map(_argument, judging.columns))])
    return judge


@dataclass(frozen=True)
class _Judging:
    """How completions are judged: each for itself, or against each other or the reference."""

    panel: Panel
    form: Form
    pairwise: str | None
    opponents: int | None

    @property
    def columns(self) -> tuple[str, ...]:
        """What of a row is needed: what the template names, what tells groups apart, the reference."""
        more = {"group": ("prompt",), "reference": ("answer",)}.get(self.pairwise or "", ())
        return tuple(dict.fromkeys((*self.form.columns, *more)))

    async def rows(self, completions: Sequence[Any], inputs: Mapping[str, Sequence[Any]]) -> Found:
        """Judge the rows that have every column; the others have nothing to go by, and no score."""
        given = [{name: inputs[_argument(name)][row] for name in self.columns} for row in range(len(completions))]
        asked = [row for row, values in enumerate(given) if None not in values.values()]
        found = await self._whole([given[row] for row in asked], [answer_text(completions[row]) for row in asked])
        scores: Judged = [None] * len(completions)
        replies: list[Any] = [None] * len(completions)
        for place, row in enumerate(asked):
            scores[row], replies[row] = found.scores[place], found.replies[place]
        return Found(scores, replies, found.metrics)

    async def _whole(self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> Found:
        if self.pairwise == "group":  # rows of which all that the judge sees of the task is equal
            groups = [tuple(column_text(row[name]) for name in self.columns) for row in rows]
            return await judge_pairs(self.panel, self.form, rows, pairs_within_groups(groups, texts, self.opponents))
        if self.pairwise == "reference":
            references = [column_text(row["answer"]) for row in rows]
            return await judge_pairs(self.panel, self.form, rows, pairs_with_reference(references, texts))
        return await judge_each(self.panel, self.form, rows, texts)


async def judge_each(panel: Panel, form: Form, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> Found:
    """The score of each completion for itself, the exception where no judge could be asked, None without a verdict."""
    questions = [form.messages(row, {"completion": text}) for row, text in zip(rows, texts, strict=True)]
    opinions, account = await panel.ask(questions, form.read)
    scored = [one.scores for one in opinions if one.scores is not None]
    scores = [one.failure if one.scores is None else form.score(one.scores) for one in opinions]
    metrics = {**account.metrics(panel.priced), "judge/abstained_total": float(scores.count(None))}
    if scored and len(panel.judges) > 1:
        spreads = [one.spread for one in opinions if one.scores is not None]
        metrics["judge/disagreement"] = sum(spreads) / len(spreads)
    if scored and len(form.weights) > 1:
        metrics |= {f"judge/{name}": sum(one[name] for one in scored) / len(scored) for name in form.weights}
    return Found(scores, [one.replies[0] if len(panel.judges) == 1 else [*one.replies] for one in opinions], metrics)


def _argument(field: str) -> str:
    """The keyword under which a reward is passed what the template calls `field`."""
    return "prompts" if field == "prompt" else field
