"""The code reward: hidden tests, run where nothing can be reached and judged where nothing can be forged.

    completion ─find_code─> program ──> a sandbox of its own  <─ questions ─  the referee's sandbox  <─ hidden tests
                                        └──── answers, plain data ────────>  └─> verdict

`member.py` is the reward; `judge.py` the judge; `inside/` is what runs in sandboxes; `sandbox.py` makes them.
`hacks.py` finds programs that go for the grader, and `monitor.py` counts them in a run.
"""

from grpo_toolbox.rewards.code.extraction import find_code
from grpo_toolbox.rewards.code.hacks import Hack, detect_hacks
from grpo_toolbox.rewards.code.member import code
from grpo_toolbox.rewards.code.monitor import hack_monitor

__all__ = ["Hack", "code", "detect_hacks", "find_code", "hack_monitor"]
