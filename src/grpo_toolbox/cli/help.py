"""Help that is read off the files: groups and options from `conf/`, keys and their meaning from the schema's source."""

from __future__ import annotations

import shutil
import textwrap

from grpo_toolbox.config.source import CONF, SCHEMA_GROUPS, SHARED_KEYS, groups, option_names, schema_keys
from grpo_toolbox.errors import unknown_option

_USAGE = """\
usage: toolbox train [group=option …] [key=value …] [--cfg job] [--multirun] [--config-dir DIR]

Composes a run from one option of each group, the experiment's differences, a method's where you name one, and your
overrides, and trains it.
`toolbox train` alone runs experiment=grpo_tiny: a tiny model learns additions in under a minute.

groups and options
{groups}

  toolbox train --help <group>    the options of a group, with every key, its default and meaning

often set
  run_dir=… resume=<run_dir> trainer.max_steps=… trainer.lr=… trainer.seed=… trainer.eval_every=… trainer.save_every=…
  data.path=… data.columns.prompt=… data.columns.answer=… model.path=… model.lora.r=…
  rollout.prompts_per_step=… rollout.group_size=… rollout.max_new_tokens=… rollout.temperature=…

examples
  toolbox train experiment=grpo_tiny method=dapo
  toolbox train experiment=grpo_tiny advantage=rloo objective=reinforce
  toolbox train experiment=grpo_tiny objective.clip_eps_high=0.28
  toolbox train experiment=grpo_tiny trainer.seed=0,1,2 --multirun
  toolbox train resume=runs/<name>"""


def train_help(words: list[str]) -> str:
    """Return the help of `toolbox train`, or of the groups named in `words`."""
    if words:
        for word in words:
            if word not in groups():
                raise unknown_option("--help", word, groups())
        return "\n\n".join(_group_help(word) for word in words)
    width = max(map(len, groups()))
    lines = [_wrapped(f"  {group:<{width}}  ", ", ".join(option_names(group))) for group in groups()]
    return _USAGE.format(groups="\n".join(lines))


def _wrapped(head: str, text: str) -> str:
    """Return a line broken where the terminal ends; what follows the first line is indented as deeply as `head`."""
    width = max(len(head) + 40, min(shutil.get_terminal_size().columns, 120))
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _group_help(group: str) -> str:
    lines = [f"{group}="]
    for path in sorted((CONF / group).glob("*.yaml"), key=lambda path: (not path.stem.startswith("_"), path.stem)):
        text = path.read_text(encoding="utf-8").replace("# @package _global_\n", "")
        lines += ["  all of them" if path.stem.startswith("_") else f"  {path.stem}"]
        lines += [f"    {line}" for line in text.strip().splitlines()]
    if group in SCHEMA_GROUPS:
        lines += ["keys", *_key_lines(group, SCHEMA_GROUPS[group])]
    if group in SHARED_KEYS:
        lines += ["keys of every option", *_key_lines(group, SHARED_KEYS[group])]
    return "\n".join(lines)


def _key_lines(prefix: str, class_name: str) -> list[str]:
    lines = []
    for name, kind, default, meaning in schema_keys(class_name):
        if kind.endswith("Config"):
            lines += _key_lines(f"{prefix}.{name}", kind)
        else:
            lines.append(f"  {prefix}.{name} = {default}")
            lines += [_wrapped(" " * 6, meaning)] if meaning else []
    return lines
