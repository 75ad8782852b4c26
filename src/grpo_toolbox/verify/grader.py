"""Check of the reward: right answers are told from wrong ones."""

from __future__ import annotations

from grpo_toolbox.measure import Sample
from grpo_toolbox.rewards.selftest import Trial, graders, try_grader
from grpo_toolbox.run import Run
from grpo_toolbox.verify.finding import Finding

MOST_WRONG = 0.25
"""Share of wrong answers that a grader may accept: the last number of a prompt is sometimes the answer."""


def check_grader(run: Run, sample: Sample) -> Finding:
    """The data's own answers score at least 1 in some form, and what is no answer does not."""
    meaning = "the reward does not tell right answers from wrong ones: nothing, or something else, is learned"
    tried = {grader.name: try_grader(grader, sample.prompts) for grader in graders(run.reward)}
    trials = [one for one in tried.values() if isinstance(one, Trial)]
    if not trials:
        reasons = ", ".join(f"{name}: {reason}" for name, reason in tried.items())
        return Finding("grader", reasons or "no part of the reward compares with the data", "", None, meaning)
    shown = "; ".join(_shares(one) for one in trials)
    passed = all(max(one.right.values()) > 0.5 and max(one.wrong.values()) <= MOST_WRONG for one in trials)
    allowed = f"a form > 50%; {', '.join(trials[0].wrong)} ≤ {MOST_WRONG:.0%}"
    return Finding("grader", shown, allowed, passed, meaning)


def _shares(trial: Trial) -> str:
    read = [f"{form} {share:.0%}" for form, share in trial.right.items() if share] or ["no form of the answer"]
    return ", ".join([*read, *(f"{text} {share:.0%}" for text, share in trial.wrong.items())])
