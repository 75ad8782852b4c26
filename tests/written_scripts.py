"""Scripts, configs and command lines that others have written for TRL, read from the texts beside the repository.

A text is prose with code in it. `FRAGMENTS` says where each piece of code begins and ends; `code_in` finds all that
looks like code, so that a test can tell whether a piece is missing. One text has lost its line breaks: an outline says
where lines begin, and nothing but white space is put in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TEXTS = Path(__file__).parents[2] / "shared" / "seeds"

FLAT = "003"
"""The text without line breaks."""


@dataclass(frozen=True)
class Fragment:
    """A piece of code in a text: from the first `begin` after `after` up to `end`."""

    text: str
    begin: str
    end: str
    after: str = ""


FRAGMENTS = {
    "quick start": Fragment("001", "# train_grpo.py\n", "accelerate launch"),
    "launch": Fragment("001", "accelerate launch train_grpo.py", "\n\nHow GRPO"),
    "formats": Fragment("001", "# Standard format\n", "For VLM"),
    "correctness": Fragment("001", "# Reward based on answer", "# Reward based on output"),
    "form": Fragment("001", "# Reward based on output", "Pass reward functions"),
    "several rewards": Fragment("001", "trainer = GRPOTrainer(", "Reward functions can be", "Pass reward functions"),
    "several tasks": Fragment("001", "def math_reward_func", "Built-in rewards"),
    "vllm, colocated": Fragment("001", "from trl import GRPOConfig", "Server mode", "Colocate mode"),
    "vllm, its server": Fragment("001", "# Start the server", "from trl import", "Server mode"),
    "vllm, as a server": Fragment("001", "from trl import GRPOConfig", "In server mode, ensure", "# Start the server"),
    "lora": Fragment("001", "from datasets import", "Agent training", "Training with PEFT"),
    "tools": Fragment("001", "from trl import GRPOTrainer", "Tools must be", "Agent training"),
    "check of the KL": Fragment("004", "import torch\n", "Here the exact KL", "Check 13.1"),
    "check of advantages": Fragment("004", "import torch\n", "The check is arithmetic", "Check 13.2 asserts"),
    "check of weights": Fragment("004", "import torch\n", "The check fixes", "Check 13.3 measures"),
    "check of ratios": Fragment("004", "import math\n", "The check pins", "Check 13.4 runs"),
    "launch beside vllm": Fragment("004", "CUDA_VISIBLE_DEVICES=0", "trl vllm-serve (which"),
    "schema": Fragment("004", "import re\n", "For GSM8K,", "Teaching fragment"),
    "smoke": Fragment("004", "python content/", "grpo_from_scratch.py --smoke trains"),
    "ablation": Fragment("004", "for lt in grpo", "TRL GRPOTrainer with vLLM"),
}

OUTLINES = {
    "SYSTEM_PROMPT": """
from datasets
SYSTEM_PROMPT =
def prepare_dataset
    ''' Transform
    return raw_data
""",
    "def reward_function_name": """
def reward_function_name
    completions, #
    answer=None
    **kwargs #
) ->
    ''' Evaluate
    # Extract
    responses =
    # Compute
    rewards = []
    for response in
        score = compute_score
        rewards.append
    return rewards
""",
    "def correctness_reward": """
def correctness_reward
    '''Reward correct
    responses =
    extracted =
    return [
""",
    "def format_reward": """
import re
def format_reward
    '''Reward XML
    pattern =
    responses =
    return [
""",
    "def incremental_format_reward": """
def incremental_format_reward
    '''Award
    responses =
    rewards = []
    for r in responses:
        score = 0.0
        if '<reasoning>'
        if '</reasoning>'
        if '<answer>'
        if '</answer>'
        # Penalize
        if r.count
            extra_text =
            score -=
        rewards.append
    return rewards
""",
    "warmup_ratio": """
from trl
training_args =
    # Learning
    learning_rate=
    adam_beta1=
    # Batch
    per_device
    gradient_acc
    # GRPO
    num_gen
    max_prompt
    # Training
    num_train
    max_steps
    # Optimization
    bf16
    optim=
    max_grad
    # Logging
    logging
)
""",
    "use_vllm=True": """
training_args =
    max_prompt
    logging
""",
    "peft_config=peft_config": """
import torch
from transformers
from peft
from trl
# Load
model_name =
model =
    device_map
tokenizer =
tokenizer.pad_token =
# Optional
peft_config =
    lora_alpha
    target_modules
# Initialize
trainer =
)
# Train
trainer.train
# Save
trainer.save
""",
    "FastLanguageModel": """
from unsloth
model, tokenizer =
model = Fast
# Rest
trainer =
trainer.train
""",
    "trainer_stage1": """
# Stage 1
trainer_stage1 =
trainer_stage1.train
# Stage 2
trainer_stage2 =
trainer_stage2.train
""",
}
"""How the lines of each block of the flat text begin, by a word that only this block has."""


def text(number: str) -> str:
    """Return a text by its number."""
    (path,) = TEXTS.glob(f"{number}_*.txt")
    return path.read_text(encoding="utf-8")


def fragment(name: str) -> str:
    """Return a piece of code as it stands in its text."""
    whole = text(FRAGMENTS[name].text)
    start, end = _span(FRAGMENTS[name], whole)
    return whole[start:end].strip() + "\n"


def _span(one: Fragment, whole: str) -> tuple[int, int]:
    start = whole.index(one.begin, whole.index(one.after))
    return start, whole.index(one.end, start + len(one.begin))


def block(key: str) -> str:
    """Return the block of the flat text that has `key` in it, its lines broken as its outline says."""
    return broken(*(one for one in blocks() if _key(one) == key), OUTLINES[key])


def blocks() -> list[str]:
    """Return the Python blocks of the flat text."""
    return re.findall(r"```python (.*?) ```", text(FLAT), flags=re.DOTALL)


def _key(flat: str) -> str:
    """Return the key of a block's outline; an error names a block that has none."""
    found = [key for key in OUTLINES if key in flat]
    assert found, f"no outline for: {flat[:80]}"
    return found[0]


def broken(flat: str, outline: str) -> str:
    """Break the flat code into lines that begin as those of the outline; only white space is put in."""
    heads = [line for line in outline.replace("'''", '"""').splitlines() if line]
    starts, place = [], 0
    for head in heads:
        place = flat.index(head.strip(), place)
        starts.append(place)
        place += len(head.strip())
    ends = [*starts[1:], len(flat)]
    indents = [head[: len(head) - len(head.lstrip())] for head in heads]
    lines = [indent + flat[a:b].strip() for indent, a, b in zip(indents, starts, ends, strict=True)]
    made = "\n".join(lines) + "\n"
    assert made.split() == flat.split()
    return made


_BEGINNINGS = (
    r"from \w+(\.\w+)* import ",
    r"import \w+$",
    r"(def|class) \w+\W",
    r"(return|assert) ",
    r"print\(",
    r"[\w, ]+ = \S",
    r"\w+\.\w+\(.*\)$",
    r"\{\"",
    r"(\w+=\S+ )*(python|accelerate|toolbox|trl|vllm|pip) [\w-]+ (?!\()",
)
CODE = re.compile(rf"^\s*({'|'.join(_BEGINNINGS)})", flags=re.MULTILINE)
"""What lines of code and of command lines begin with, and prose does not."""


def uncovered(number: str) -> list[str]:
    """Return what looks like code in a text and is in none of its fragments."""
    whole = text(number)
    spans = [_span(one, whole) for one in FRAGMENTS.values() if one.text == number]
    found = [match for match in CODE.finditer(whole) if not any(a <= match.end() <= b for a, b in spans)]
    return [whole[match.start() :].strip().splitlines()[0][:100] for match in found]
