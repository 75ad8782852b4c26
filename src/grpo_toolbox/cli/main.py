"""`toolbox <command>`: dispatch, help, and errors as people read them."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

from grpo_toolbox.errors import ToolboxError, suggest

COMMANDS = {
    "train": "train a model: compose a run from YAML and overrides, and run it",
    "compare-backends": "train a run with the toolbox's trainer and with TRL's, side by side",
    "doctor": "measure how far a run's engine is from its trainer before training, and say why",
    "verify": "check a run's gradients, log-probs, masks and grader on its own model and data",
    "reward": "check a run's reward on right and wrong answers, without a model",
    "traces": "summarise a run's rollouts: rewards, solve rates, lengths, repeats; re-score them",
    "memory": "export the best verified completions of a run as SFT rows",
    "serve": "start the rollout server that a run asks for, or print its command",
    "models": "fetch and list the models that come without a hub; export trained ones",
}

HELP = """\
GRPO Toolbox: online RL of language models.

usage: toolbox <command> [options]

{commands}

`toolbox <command> --help` shows a command's options. Start with: toolbox train"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    2 for a command or flag that is not there, 1 for everything else that the toolbox refuses, 128 + n for signal n.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP.format(commands="\n".join(f"  {name:<16} {about}" for name, about in COMMANDS.items())))
        return 0
    if arguments[0] == "--version":
        from grpo_toolbox import __version__

        print(__version__)
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(
            f"toolbox: {command!r} is not a command: {', '.join(COMMANDS)}.{suggest(command, COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    try:
        return int(importlib.import_module(f"grpo_toolbox.cli.{command.replace('-', '_')}").run(rest))
    except ToolboxError as error:
        print(f"toolbox {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:  # before there was a step to save
        received = getattr(error, "received", signal.SIGINT)
        print(f"toolbox {command}: stopped by {received.name}.", file=sys.stderr)
        return 128 + int(received)
    except BrokenPipeError:  # `toolbox traces … | head`
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
