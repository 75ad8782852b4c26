"""reward_model: scores from a Bradley–Terry sequence classifier (Bradley & Terry, 1952; Ouyang et al., 2022)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_toolbox.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


def reward_model(
    path: str, batch_size: int = 8, max_length: int | None = None, device: str = "auto", dtype: str = "auto"
) -> RewardModel:
    """The logit that the sequence classifier at `path` (folder or hub name, one label) gives to prompt and completion.

    It reads them with its own tokenizer, in its own chat template where it has one, else one after the other. Texts
    beyond `max_length` tokens (None: what the model can take) lose their beginning; the log says so and the metric
    `reward_model/truncated_rate` counts it. ConfigError where the checkpoint cannot be loaded or has no score head.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if batch_size < 1 or (max_length is not None and max_length < 1):
        raise ConfigError(f"reward.batch_size={batch_size} and reward.max_length={max_length} must be at least 1.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:  # a checkpoint from outside: absent, unreadable, other shapes
        raise ConfigError(f"reward.path={path!r} is not a sequence classifier with one label: {error}") from error
    head = [key for key in info["missing_keys"] if not key.startswith(f"{model.base_model_prefix}.")]
    if head:
        raise ConfigError(
            f"reward.path={path!r} has no trained score head ({', '.join(head)} is missing), so its scores would be"
            " random: give a reward model, not a language model."
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return RewardModel(model.to(device).eval(), tokenizer, batch_size, max_length)


class RewardModel:
    """A sequence classifier with its tokenizer, callable as a reward."""

    __name__ = "reward_model"

    def __init__(self, model: Any, tokenizer: Any, batch_size: int, max_length: int | None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.config = model.config.get_text_config()
        self.max_length = max_length or getattr(self.config, "max_position_embeddings", None)
        self._said_truncated = False

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], log_metric: Any = None) -> list[float]:
        """One logit per completion, the same as if each were scored alone."""
        rows, truncated = self._tokenise(prompts, completions)
        if truncated and not self._said_truncated:
            self._said_truncated = True
            log.warning("reward_model: %d texts exceed %d tokens and lost their beginning.", truncated, self.max_length)
        if log_metric is not None and rows:
            log_metric("reward_model/truncated_rate", truncated / len(rows))
        by_length = sorted(range(len(rows)), key=lambda index: len(rows[index]))  # so that batches hold little padding
        scores = [0.0] * len(rows)
        for start in range(0, len(rows), self.batch_size):
            chosen = by_length[start : start + self.batch_size]
            logits = self._logits([rows[index] for index in chosen])
            for index, score in zip(chosen, logits.tolist(), strict=True):
                scores[index] = score
        return scores

    def _logits(self, rows: Sequence[list[int]]) -> Tensor:
        """Logits (n,) of `rows`, padded on the right."""
        import torch

        declared = self.config.pad_token_id
        # The model pools the last token that is not its padding token. A declared one is kept, for the checkpoint was
        # trained with it; where none is declared, the pad must be a token that no row ends with.
        pad = declared if declared is not None else _unused_end(rows)
        width = max(map(len, rows))
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])  # (n, T)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])  # (n, T)
        device = self.model.device
        self.config.pad_token_id = pad
        try:
            with torch.inference_mode():
                return self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, 0].float().cpu()
        finally:
            self.config.pad_token_id = declared

    def _tokenise(self, prompts: Sequence[Any], completions: Sequence[Any]) -> tuple[list[list[int]], int]:
        """Token ids per row, and how many rows had to be cut on the left."""
        templated = self.tokenizer.chat_template is not None
        texts = [self._text(*pair, templated) for pair in zip(prompts, completions, strict=True)]
        options = {"add_special_tokens": not templated}  # a template writes its special tokens itself
        rows = [list(self.tokenizer(text, **options)["input_ids"]) for text in texts]
        long = [index for index, row in enumerate(rows) if self.max_length and len(row) > self.max_length]
        for index in long:
            cut = self.tokenizer(texts[index], truncation=True, max_length=self.max_length, **options)
            rows[index] = list(cut["input_ids"])
        return rows, len(long)

    def _text(self, prompt: Any, completion: Any, templated: bool) -> str:
        if templated:
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
            return self.tokenizer.apply_chat_template(asked + said, tokenize=False)
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        raise ConfigError(
            "the prompts are conversations, but the reward model's tokenizer has no chat template:"
            " give its tokenizer one, or use text prompts."
        )


def _unused_end(rows: Sequence[list[int]]) -> int:
    ends = {row[-1] for row in rows}
    return next(token for token in range(len(ends) + 1) if token not in ends)
