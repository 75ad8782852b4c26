"""From a data set's name to the prompts of a step.

    path --read_rows--> rows --check_rows--> {prompt, answer, ...} --encode_prompts--> Prompts --PromptStream--> batches

Everything that can be wrong with data is found here, before a model is loaded.
"""

from __future__ import annotations

from grpo_toolbox.data.builtin import BUILTIN, additions, word_problems
from grpo_toolbox.data.encoding import (
    decode_completion,
    encode_prompts,
    encode_texts,
    render_chat,
)
from grpo_toolbox.data.reading import load_rows, read_rows
from grpo_toolbox.data.rows import RESERVED_COLUMNS, Row, check_rows, split_rows
from grpo_toolbox.data.stream import PromptStream

__all__ = [
    "BUILTIN",
    "RESERVED_COLUMNS",
    "PromptStream",
    "Row",
    "additions",
    "check_rows",
    "decode_completion",
    "encode_prompts",
    "encode_texts",
    "load_rows",
    "read_rows",
    "render_chat",
    "split_rows",
    "word_problems",
]
