"""A Hugging Face classifier in this process, with its tokenizer: prompts and completions in, logits out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_toolbox.errors import ConfigError
from grpo_toolbox.rewards.text import completion_text, without_control_tokens

if TYPE_CHECKING:
    from torch import Tensor

Head = Literal["sequence", "token"]
_CLASS = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}
_LABELS = {"sequence": (1,), "token": (1, 2)}


@dataclass(frozen=True)
class Coded:
    """What a classifier reads of one prompt and completion."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]
    """(T,) where each token begins and ends, in characters of the completion: below 0 before it, and where it has
    none of its own."""
    length: int
    """Characters of the completion that are there: a template may cut blanks off its end."""
    lost: int
    """Tokens cut off the beginning."""


@dataclass(frozen=True)
class Coder:
    """The tokenizer of a reward model, which is called `path` in what is said of it."""

    tokenizer: Any
    path: str
    max_length: int | None = None

    def code(self, prompt: Any, completion: Any) -> Coded:
        """Tokenise in the tokenizer's own chat template where it has one, else one after the other.

        Control tokens in the completion are defused: they would begin a turn of somebody else's.
        """
        templated = self.tokenizer.chat_template is not None
        written = self._templated if templated else self._joined
        text, begin, end = written(prompt, completion)
        options = {
            "add_special_tokens": not templated,  # a template writes its special tokens itself
            "return_offsets_mapping": self.tokenizer.is_fast,
            "verbose": False,
        }
        coded = self.tokenizer(text, **options)
        length = len(coded["input_ids"])
        if self.max_length and length > self.max_length:
            coded = self.tokenizer(text, truncation=True, max_length=self.max_length, **options)
        places = coded["offset_mapping"] if self.tokenizer.is_fast else [(0, 0)] * len(coded["input_ids"])
        spans = [(first - begin, last - begin) if last > first else (-1, -1) for first, last in places]
        return Coded(text, list(coded["input_ids"]), spans, end - begin, length - len(coded["input_ids"]))

    def _templated(self, prompt: Any, completion: Any) -> tuple[str, int, int]:
        """The text, and where the completion begins and ends in it (before its beginning where it is not found)."""
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
        said = [{**one, "content": _defused(one.get("content"))} for one in said]
        text = self.tokenizer.apply_chat_template(asked + said, tokenize=False)
        written = completion_text(said)
        found = text.rfind(written) if written in text else text.rfind(written.strip())
        begin = found if written in text else found - (len(written) - len(written.lstrip()))
        end = begin + len(written) if written in text else begin + len(written.rstrip())
        return (text, begin, end) if found >= 0 else (text, 0, -1)

    def _joined(self, prompt: Any, completion: Any) -> tuple[str, int, int]:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + _defused(completion), len(prompt), len(prompt) + len(completion)
        raise ConfigError(
            f"the prompts are conversations, but the tokenizer of reward.path={self.path!r} has no chat template:"
            " give its tokenizer one, or use text prompts."
        )


class Classifier:
    """A model with a score head for whole texts (`sequence`) or for every token (`token`), on its own device."""

    def __init__(self, path: str, head: Head, batch_size: int, max_length: int | None, device: str, dtype: str) -> None:
        """Load from a folder or hub name; ConfigError where there is no such model, or its head is not trained."""
        tokenizer, model = _load(_found(path), head, dtype)
        if head == "token" and not tokenizer.is_fast:
            raise ConfigError(f"reward.path={path!r}: its tokenizer does not say where tokens stand; save a fast one.")
        self._take(path, tokenizer, model.to(_device(device)), batch_size, max_length)

    @classmethod
    def of(cls, model: Any, tokenizer: Any, path: str) -> Classifier:
        """Make one of a loaded sequence classifier with one label; without a tokenizer it takes that of `path`."""
        labels = getattr(model.config, "num_labels", None)
        if labels != 1:
            raise ConfigError(f"the reward model {path!r} has {labels} labels: a reward model has one.")
        made = cls.__new__(cls)
        made._take(path, tokenizer or load_tokenizer(path, "reward_processing_classes"), model, 8, None)
        return made

    def _take(self, path: str, tokenizer: Any, model: Any, batch_size: int, max_length: int | None) -> None:
        self.path, self.tokenizer = path, tokenizer
        self._model = model.eval()
        self._config = model.config.get_text_config()
        self.max_length = max_length or getattr(self._config, "max_position_embeddings", None)
        self._batch_size = batch_size
        self._one_at_a_time = threading.Lock()

    def code(self, prompt: Any, completion: Any) -> Coded:
        """What the model reads of a prompt and a completion, within its length."""
        return Coder(self.tokenizer, self.path, self.max_length).code(prompt, completion)

    def logits(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """The logits of each row of tokens: (labels,) of a sequence head, (T, labels) of a token head, in float32.

        Batches are padded on the right, rows of like length together; the logits are the same as if a row were alone.
        """
        found: list[Any] = [None] * len(rows)
        by_length = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        with self._one_at_a_time:
            for start in range(0, len(rows), self._batch_size):
                chosen = by_length[start : start + self._batch_size]
                for row, logits in zip(chosen, self._batch([rows[row] for row in chosen]), strict=True):
                    found[row] = logits[: len(rows[row])] if logits.ndim == 2 else logits
        return found

    def _batch(self, rows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        import torch

        declared = self._config.pad_token_id
        # A sequence head pools the last token that is not the padding token. A declared one is kept, for the checkpoint
        # was trained with it; where none is declared, the pad must be a token that no row ends with.
        pad = declared if declared is not None else _unused_end(rows)
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *([pad] * (width - len(row)))] for row in rows])  # (n, T)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])  # (n, T)
        device = self._model.device
        self._config.pad_token_id = pad
        try:
            with torch.inference_mode():
                logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        finally:
            self._config.pad_token_id = declared
        return iter(logits.float().cpu())


def _defused(content: Any) -> Any:
    return without_control_tokens(content) if isinstance(content, str) else content


def _unused_end(rows: Sequence[Sequence[int]]) -> int:
    ends = {row[-1] for row in rows}
    return next(token for token in range(len(ends) + 1) if token not in ends)


def _device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # whatever torch says of a device that is not there
        reason = str(error).splitlines()[0]
        raise ConfigError(f"reward.device={device!r} cannot be used ({reason}): set cpu, cuda:<n> or auto.") from error
    return device


def _found(path: str) -> str:
    """A hub name as it is, a folder only where there is one: a mistyped folder would be looked for on the hub."""
    folder = Path(path).expanduser()
    if not folder.is_dir() and (path.startswith(("/", ".", "~")) or path.count("/") > 1 or ":" in path):
        raise ConfigError(f"reward.path={path!r} is no folder: give that of a reward model, or its name on the hub.")
    return str(folder) if folder.is_dir() else path


def load_tokenizer(path: str, setting: str) -> Any:
    """The tokenizer at `path` (folder or hub name), which `setting` named; ConfigError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, truncation_side="left")
    except (OSError, ValueError, RuntimeError) as error:  # files from outside: absent, unreadable
        raise ConfigError(f"{setting}={path!r} has no tokenizer that can be loaded: {error}") from error


def _load(path: str, head: Head, dtype: str) -> tuple[Any, Any]:
    import transformers

    what = f"reward.path={path!r} is not a {head} classifier"
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        labels = _labels_of(config, head, what)
        tokenizer = load_tokenizer(path, "reward.path")
        model, info = getattr(transformers, f"AutoModel{_CLASS[head]}").from_pretrained(
            path, num_labels=labels, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:  # a checkpoint from outside: absent, unreadable, other shapes
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what}: {error}") from error
    untrained = [key for key in info["missing_keys"] if not key.startswith(f"{model.base_model_prefix}.")]
    if untrained:
        raise ConfigError(
            f"reward.path={path!r} has no trained score head ({', '.join(untrained)} is missing), so its scores would"
            " be random: give a reward model, not a language model."
        )
    return tokenizer, model


def _labels_of(config: Any, head: Head, what: str) -> int:
    """The number of labels to load a checkpoint with; ConfigError where its head says that it is of another kind."""
    classes = " ".join(getattr(config, "architectures", None) or ())
    other = _CLASS["token" if head == "sequence" else "sequence"]
    if other in classes:
        level = "step" if head == "sequence" else "completion"
        raise ConfigError(f"{what} but a {classes}: set reward.level={level}.")
    if _CLASS[head] not in classes:
        return 1  # of a class of its own, or a language model, which is found by the head that it lacks
    labels = int(config.num_labels)
    if labels not in _LABELS[head]:
        allowed = " or ".join(map(str, _LABELS[head]))
        raise ConfigError(f"{what} with {allowed} label, but has {labels}: it scores something else than rewards.")
    return labels
