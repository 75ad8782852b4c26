"""What the dashboard loggers share: the check for their extra, and the numbers they log."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from grpo_toolbox.errors import ConfigError


def need_extra(package: str) -> None:
    """Raise the ConfigError that names the extra to install, unless `package` can be imported."""
    spec = importlib.util.find_spec(package)
    # A folder ./wandb of an earlier run looks like a package without a file (origin None).
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"callbacks.{package} needs the package {package}, which is not installed. "
            f'Run pip install "grpo-toolbox[{package}]", or set callbacks.{package}=null.'
        )


def numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics as plain floats, without `step`, which every logger takes as its axis."""
    return {name: float(value) for name, value in metrics.items() if name != "step"}
