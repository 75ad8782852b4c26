"""GRPO on small additions with a model made on the spot: no GPU, no download. `python examples/train_grpo.py`"""

from grpo_toolbox import GRPOConfig, GRPOTrainer

dataset = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def exact(completions, answer, **kwargs):
    """1.0 for the right sum."""
    return [float(said == gold) for said, gold in zip(completions, answer, strict=True)]


trainer = GRPOTrainer(
    model="builtin:tiny",
    reward_funcs=exact,
    args=GRPOConfig(
        output_dir="runs/train_grpo",
        max_steps=300,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=256,
        num_generations=16,
        max_completion_length=3,
        max_grad_norm=0.2,
    ),
    train_dataset=dataset,
)
trainer.train()
