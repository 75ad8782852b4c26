"""The math reward: extraction of a final answer, one spelling for formulas, what is equal, and algebra in workers.

completion ──final_answer──> formula ──latex──> one spelling ──reading──> node ──equality──> verdict
                                                                              └─ open: algebra, in a worker
"""

from grpo_toolbox.rewards.maths.reward import math_reward

__all__ = ["math_reward"]
