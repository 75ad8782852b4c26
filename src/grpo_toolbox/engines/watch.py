"""The probe in a run: when it is asked, what becomes of a gap, and what is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo_toolbox.engines.probe import Finding, Gap, Probe, Target
from grpo_toolbox.errors import EngineError

log = logging.getLogger(__name__)


@dataclass
class SyncWatch:
    """Probes every so many syncs; syncs a second time where something is amiss, and then stops the run, or warns."""

    probe: Probe
    targets: Callable[[], Sequence[Target]]
    """Those that can be asked now."""
    every: int = 1
    stops: bool = True
    _syncs: int = -1
    """After the first sync, which only brings what the run starts with, 0."""
    _measured: dict[str, float] = field(default_factory=dict)
    _failed: list[Finding] = field(default_factory=list)

    def after_sync(self, sync_again: Callable[[], object]) -> Gap | None:
        """Probe if it is due, a second time after another sync where a target fails.

        The first time it measures the noise with equal weights and returns it, of the worst target. Raises EngineError
        where a target then has other weights, whatever `stops` says: there would be no noise to go by.
        """
        self._syncs += 1
        if self._syncs == 0:
            return self._before_training()
        if self._syncs % self.every:
            return None
        findings = self.probe.check(self.targets(), moved=True)
        resynced = any(finding.cause is not None for finding in findings)
        if resynced:
            for finding in findings:
                if finding.cause is not None:
                    log.warning("%s The weights are sent a second time.", finding)
            sync_again()
            findings = self.probe.check(self.targets(), moved=False)
        self._failed = [finding for finding in findings if finding.cause is not None]
        if not findings:  # who went away is sent the weights anew when it comes back
            return None
        worst = _worst(findings)
        self._measured = {
            "probe/gap_mean": worst.mean,
            "probe/gap_max": worst.max,
            "probe/resyncs": float(resynced),
            "probe/failed": float(len(self._failed)),
        }
        return None

    def measured(self) -> dict[str, float]:
        """Return the metrics of the latest probe, once."""
        measured, self._measured = self._measured, {}
        return measured

    def settle(self) -> None:
        """Raise EngineError for what the last probe found, or warn; to be called when the step can be saved."""
        failed, self._failed = self._failed, []
        if failed and self.stops:
            raise EngineError(f"after the sync, {failed[0]} rollout.probe.on_mismatch=warn goes on all the same.")
        for finding in failed:
            log.warning("%s", finding)

    def _before_training(self) -> Gap:
        targets = self.targets()
        findings = self.probe.check(targets, moved=False)
        if len(findings) < len(targets):
            raise EngineError("before training, a rollout server went away while it was probed: see the warning above.")
        wrong = [finding for finding in findings if finding.cause is not None]
        if wrong:
            raise EngineError(
                f"before training, {wrong[0]} `toolbox doctor --engine` says more; rollout.probe.limit allows more."
            )
        return _worst(findings)


def _worst(findings: Sequence[Finding]) -> Gap:
    means = [max(one.gap.mean, one.drawn.mean) for one in findings]
    return Gap(max(means, default=0.0), max((max(one.gap.max, one.drawn.max) for one in findings), default=0.0))
