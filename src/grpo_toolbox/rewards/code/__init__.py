"""The code reward: hidden tests, run where nothing can be reached and judged where nothing can be forged.

    completion ─find_code─> program ──> a sandbox of its own  <─ questions ─  the referee's sandbox  <─ hidden tests
                                        └──── answers, plain data ────────>  └─> verdict

`member.py` is the reward; `judge.py` the judge; `inside/` is what runs in sandboxes; `sandbox.py` makes them.
"""

from grpo_toolbox.rewards.code.member import code

__all__ = ["code"]
