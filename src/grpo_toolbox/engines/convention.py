"""Whether the trainer can work with what a sampler's log-probs mean.

The trainer's are those of softmax(logits / temperature) over the whole vocabulary. A draw that top-k, top-p, min-p or
min_new_tokens restrict comes from another distribution q. With log-probs of q ("processed") the weights π/q of a
correction are those of importance sampling; with any others they would be 1 as if nothing had been cut.
"""

from __future__ import annotations

import logging

from grpo_toolbox.engines import Traits
from grpo_toolbox.errors import ConfigError
from grpo_toolbox.types import Convention, Sampling

log = logging.getLogger(__name__)


def asked_convention(traits: Traits, sampling: Sampling) -> Convention:
    """Return what an engine's log-probs will mean under `sampling`."""
    return Convention.of("processed" if sampling.drawn_logps else traits.logps, sampling)


def check_sampling(traits: Traits, sampling: Sampling, *, corrected: bool) -> None:
    """Raise ConfigError where training could not use what the engine will report; warn of cuts without a correction."""
    convention = asked_convention(traits, sampling)
    cuts = ", ".join(f"rollout.{cut}" for cut in sampling.cuts)
    if convention.is_cut and convention.kind != "processed" and not traits.drawn_logps:
        raise ConfigError(
            f"{cuts}: the engine draws from a part of the vocabulary and reports log-probs of all of it, so that no "
            "correction could tell. Leave it out, or let the server report what it draws from (vLLM: --logprobs-mode "
            "processed_logprobs)."
        )
    check_convention(convention, corrected=corrected)
    if convention.is_cut and not corrected:
        log.warning(
            "%s: tokens are drawn from a part of the vocabulary, and the update takes them as drawn from the whole "
            "softmax at rollout.temperature. Leave it out to draw from the policy that is trained, or weigh each token "
            "with objective.correction=token_truncate.",
            cuts,
        )


def check_convention(convention: Convention, *, corrected: bool) -> None:
    """Raise ConfigError for log-probs that mean something else than the trainer takes them for."""
    if convention.kind == "raw" and not convention.is_trainers:
        raise ConfigError(
            f"rollout.temperature={convention.temperature}: the engine's log-probs are those of temperature 1, and the "
            "trainer's are not. Set rollout.temperature=1, or let the server report log-probs after the temperature "
            "(vLLM: --logprobs-mode processed_logprobs)."
        )
    if convention.is_cut and convention.kind != "processed" and corrected:
        raise ConfigError(
            "objective.correction weighs tokens by the policy's probability over that of the draw, and the engine's "
            f"log-probs leave its cuts out (top_k={convention.top_k}, top_p={convention.top_p}, "
            f"min_p={convention.min_p}, min_new_tokens={convention.min_new_tokens}). Leave the cuts or the correction "
            "out."
        )
