"""GRPO from scratch: the whole algorithm in one file, to be read from top to bottom.

    python examples/grpo_from_scratch.py            random weights learn to add, on a CPU, in about a minute
    python examples/grpo_from_scratch.py --smoke    a table of logits instead of a model, in seconds
    python examples/grpo_from_scratch.py --full --model Qwen/Qwen3-1.7B --loss-type dr_grpo --scale-rewards none

It is GRPO (Shao et al., 2024) with nothing left out: groups, clipped ratios, k3 KL to a reference, the token weights of
GRPO, DAPO (Yu et al., 2025) and Dr. GRPO (Liu et al., 2025), the sequence ratio of GSPO (Zheng et al., 2025).
It is not fast (padding, prompts run once per completion, whole logits), does not evaluate or save, and shares no code
with the toolbox: the tests hold `toolbox train experiment=grpo_tiny` to it, number for number.

P prompts, G completions of each (a group), B = P·G rows, S tokens of prompt and completion, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import random
import re
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor

# Each setting is a flag (--group-size 8). A step is a batch of rollouts, gone through ppo_epochs times, each time in
# steps_per_generation optimizer steps on a share of it, with rows_at_once in memory (no gradient depends on that).
TINY = {"max_steps": 500, "prompts_per_step": 16, "group_size": 16, "max_new_tokens": 3, "temperature": 1.0, "seed": 0}
TINY |= {"scale_rewards": "group", "loss_type": "grpo", "is_level": "token", "clip_eps": 0.2, "clip_eps_high": 0.2}
TINY |= {"beta": 0.04, "mask_truncated": 0, "ppo_epochs": 1, "steps_per_generation": 1, "rows_at_once": 256}
TINY |= {"lr": 1e-3, "max_grad_norm": 0.2, "model": "", "data": "openai/gsm8k", "lora_r": 0, "report_to": "none"}
FULL = {"max_steps": 300, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 1024, "rows_at_once": 4}
FULL |= {"beta": 0.0, "lr": 1e-6, "max_grad_norm": 1.0, "mask_truncated": 1}  # 1: what was cut off may not be wrong
GSPO = {"clip_eps": 3e-4, "clip_eps_high": 4e-4, "steps_per_generation": 8}  # a mean over tokens moves that much less
CHOICES = {"scale_rewards": ("group", "none"), "loss_type": ("grpo", "dapo", "dr_grpo")}
CHOICES |= {"is_level": ("token", "sequence"), "report_to": ("none", "trackio", "wandb")}
NUMBER = re.compile(r"[* ]*(?:[a-z ]*[=:])?[* $]*((?:[-+] ?)?[\d,]*\.?\d+)(?: ?[a-z]{2,}| ?%)?[* .$]*", re.IGNORECASE)
FINAL = re.compile(r"(?:####|\\boxed\{(?=[^{}\n]*\}))([^{}\\\n]*)")
TASK = "\n\nReason step by step, and end with the answer on a line of its own: #### <number>"


def group_advantages(rewards: Tensor, scale: str) -> Tensor:  # (P, G) -> (P, G)
    """How much better each completion is than its group: the baseline for which PPO trains a critic."""
    rewards = (rewards - rewards[:, :1]).double()  # equal rewards are exact zeros now, and leave no rounding residue
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4) if scale == "group" else centred


def token_weights(mask: Tensor, s: Namespace) -> Tensor:  # (B, S) -> (B, S)
    """What each token counts in the loss. Taken over a whole optimizer step, so that its parts simply add up."""
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    if s.loss_type == "grpo":  # sequences count the same, so tokens of long ones count less
        return mask / (len(mask) * lengths)
    return mask / (lengths.sum() if s.loss_type == "dapo" else len(mask) * s.max_new_tokens)  # tokens count the same


def token_losses(logps: Tensor, batch: dict[str, Tensor], s: Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """−min(ρA, clip(ρ)A) + β·k3 of each token; for the log, where it is clipped, and k3. All (B, S)."""
    log_ratio, mask = logps - batch["old_logps"], batch["mask"]
    if s.is_level == "sequence":  # the geometric mean of the token ratios
        log_ratio = (log_ratio * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp().expand_as(logps)
    free = ratio * batch["advantages"]
    clipped = ratio.clamp(1 - s.clip_eps, 1 + s.clip_eps_high) * batch["advantages"]  # DAPO: 0.28 up
    r = batch.get("ref_logps", logps) - logps
    k3 = r.exp() - r - 1  # estimates KL(policy ‖ reference) without bias, and is never negative
    return -torch.min(free, clipped) + s.beta * k3, clipped < free, k3


def forward(model: Any, new: Tensor, real: Tensor, **options: Any) -> Any:
    """Run the tokens `new` (B, N), the last ones of rows in which `real` (B, S) is 1 on tokens and 0 on padding."""
    places = (real.cumsum(dim=1) - 1).clamp(min=0)[:, -new.shape[1] :]  # padding on the left takes no place
    with torch.autocast(new.device.type, torch.bfloat16, enabled=new.device.type == "cuda"):
        return model(input_ids=new, attention_mask=real, position_ids=places, **options)


def token_logps(model: Any, ids: Tensor, real: Tensor, s: Namespace) -> Tensor:  # (B, S) -> (B, S)
    """log π of each token, in float32 or better; place j of the logits predicts token j + 1, and none the first."""
    logits = forward(model, ids, real, use_cache=False).logits[:, :-1] / torch.tensor([s.temperature]).to(ids.device)
    return torch.nn.functional.pad(logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2), (1, 0))


@torch.no_grad()
def sample(model: Any, prompts: list[list[int]], stops: list[int], s: Namespace, draw: Any) -> Any:
    """Complete each prompt: token ids, where they are real, where completion (B, S), and which were cut off (B,)."""
    width = max(map(len, prompts))  # padding stands on the left, so that all completions begin in one column
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts], device=model.device)
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    kv = "cache" if "cache" in signature(model.get_decoder().forward).parameters else "past_key_values"  # its old name
    new, running, cache = ids, real[:, -1] == 1, {kv: transformers.DynamicCache(config=model.config)}
    for place in range(s.max_new_tokens):
        logits = forward(model, new, real, use_cache=True, **cache).logits[:, -1].double() / s.temperature  # (B, V)
        cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
        point = draw(place, len(ids)).to(model.device)[:, None] * cumulative[:, -1:]
        new = (cumulative > point).int().argmax(dim=1, keepdim=True)  # (B, 1) the first token that reaches beyond it
        ids, real = torch.cat([ids, new], dim=1), torch.cat([real, running[:, None].long()], dim=1)
        running = running & ~torch.isin(new[:, 0], torch.tensor(stops).to(new))
        if not running.any():
            break
    completion = torch.nn.functional.pad(real[:, width:] == 1, (width, 0))  # with its stop token, which is trained, too
    return ids, real, completion, running


def update(model: Any, optimizer: Any, batch: dict[str, Tensor], s: Namespace) -> dict[str, float]:
    """Take one optimizer step on these rows, with `rows_at_once` of them in memory at a time."""
    weights, totals = token_weights(batch["mask"], s), torch.zeros(2, device=model.device)
    for rows in torch.arange(len(weights)).split(s.rows_at_once):
        part = {name: column[rows] for name, column in batch.items()}
        losses, *terms = token_losses(token_logps(model, part["ids"], part["real"], s), part, s)
        (losses * weights[rows]).sum().backward()
        totals += torch.stack([(term.detach() * part["mask"]).sum() for term in terms])
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
    clip_fraction, kl = (totals / batch["mask"].sum().clamp(min=1)).tolist()
    return {"clip_fraction": clip_fraction, "kl": kl, "grad_norm": norm.item()}


def train(model: Any, tokenizer: Any, batches: Any, reward: Any, s: Namespace, uniforms: Any = None) -> Any:
    """Train on each of `batches`, lists of (prompt ids, answer); yield each step's texts, rewards, tensors, metrics."""
    generator = torch.Generator().manual_seed(s.seed)  # all the randomness there is; tests bring their own
    uniforms = uniforms or (lambda step, place, rows: torch.rand(rows, generator=generator))
    frozen = {"old_logps": model} | ({"ref_logps": copy.deepcopy(model)} if s.beta else {})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=s.lr, weight_decay=0.0)
    ends = model.generation_config.eos_token_id  # one, several or none: instruct models end turns and texts
    stops = sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})
    for step, examples in enumerate(batches, start=1):
        prompts, answers = zip(*(one for one in examples for _ in range(s.group_size)), strict=True)  # B, by groups
        ids, real, completion, cut_off = sample(model, prompts, stops, s, partial(uniforms, step))
        shown = completion & ~torch.isin(ids, torch.tensor([*{*stops, tokenizer.pad_token_id} - {None}]).to(ids))
        texts = [tokenizer.decode(row[visible]) for row, visible in zip(ids, shown, strict=True)]
        rewards = torch.tensor([reward(*pair) for pair in zip(texts, answers, strict=True)]).view(-1, s.group_size)
        batch = {"ids": ids, "real": real, "mask": completion & ~cut_off[:, None] if s.mask_truncated else completion}
        batch["advantages"] = group_advantages(rewards, s.scale_rewards).view(-1, 1).float().to(ids.device)  # (B, 1)
        parts = [*zip(ids.split(s.rows_at_once), real.split(s.rows_at_once), strict=True)]
        with torch.no_grad():  # the old policy is the one that drew the rollouts: the policy before its updates
            batch |= {name: torch.cat([token_logps(net, *part, s) for part in parts]) for name, net in frozen.items()}
        metrics = {"reward_mean": rewards.mean(), "frac_reward_zero_std": (rewards.std(dim=1) == 0).float().mean()}
        metrics |= {"completion_tokens": completion.sum() / len(ids), "clipped_ratio": cut_off.float().mean()}
        for share in [*range(s.steps_per_generation)] * s.ppo_epochs:
            rows = {name: column.tensor_split(s.steps_per_generation)[share] for name, column in batch.items()}
            metrics |= update(model, optimizer, rows, s)
        yield texts, rewards, batch, {name: float(value) for name, value in metrics.items()}


def same_number(text: str, answer: str) -> float:
    """1 if a text is the right number and no more than its label and unit (`72`, `x = $1,000`, `72 apples`), else 0."""
    said, right = (NUMBER.fullmatch(one.strip()) for one in (text, answer))
    return float(bool(said and right) and float(re.sub("[, ]", "", said[1])) == float(re.sub("[, ]", "", right[1])))


def final_number(text: str, answer: str) -> float:
    """The same of what stands behind the last `####` or in the last box: a number elsewhere is no answer."""
    return sum((same_number(said, answer) for said in FINAL.findall(text)[-1:]), 0.0)


def tiny() -> tuple[Any, Any, Any, Any]:
    """The 55 additions with a one-digit sum, for a Llama of 77 thousand random weights and a token per character."""
    vocabulary = {token: index for index, token in enumerate(("<pad>", "<eos>", "<unk>", *"0123456789+-*= abc"))}
    characters = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    characters.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.125}  # 1 / √64 keeps the scale
    shape |= {"vocab_size": len(vocabulary), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    model.model.embed_tokens.weight.data *= 2.0  # what attention gathers must outweigh the last character, always "="
    model.lm_head.weight.data *= 0.35  # nearly uniform at first, so that every answer is tried
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10 - a)]
    return model, tokenizer, [(tokenizer(text)["input_ids"], answer) for text, answer in sums], same_number


def full(s: Namespace) -> tuple[Any, Any, Any, Any]:
    """A model from the hub or a folder (Qwen3 does not think), and problems whose answers end in `#### <number>`."""
    assert s.model, "--full needs --model NAME_OR_FOLDER"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = transformers.AutoTokenizer.from_pretrained(s.model)
    dtype = "auto" if s.lora_r and device == "cuda" else torch.float32  # half precision rounds small steps away
    model = transformers.AutoModelForCausalLM.from_pretrained(s.model, dtype=dtype).to(device)
    if r := s.lora_r:
        peft = import_module("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear"))
    if s.data.endswith(".jsonl"):
        with open(s.data, encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
    else:
        rows = import_module("datasets").load_dataset(s.data, "main", split="train")
    tokenizer.chat_template = tokenizer.chat_template or "{{ bos_token }}{{ messages[0].content }}"
    chat = partial(tokenizer.apply_chat_template, add_generation_prompt=True, enable_thinking=False, return_dict=False)
    prompts = [chat([{"role": "user", "content": row["question"] + TASK}]) for row in rows]
    answers = [row["answer"].split("####")[-1].strip() for row in rows]
    return model, tokenizer, list(zip(prompts, answers, strict=True)), final_number


def smoke() -> None:
    """Train a table of logits, 25 additions by 9 answers: the algorithm without a language model around it."""
    sums = torch.tensor([[a + b] for a in range(5) for b in range(5)])  # (P, 1)
    for options in ({}, {"loss_type": "dapo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"beta": 0.02}):
        s = Namespace(**TINY | {"beta": 0.0} | options)
        torch.manual_seed(s.seed)
        table = torch.zeros(25, 9, requires_grad=True)
        optimizer = torch.optim.Adam([table], lr=0.1)
        for _ in range(100):
            drawn = table.softmax(dim=1).multinomial(s.group_size, replacement=True)  # (P, G)
            rewards = (drawn == sums).float()
            logps = table.log_softmax(dim=1).gather(1, drawn).view(-1, 1)  # (B, 1): completions of one token
            batch = {"mask": logps < 1, "old_logps": logps.detach(), "ref_logps": torch.full_like(logps, 1 / 9).log()}
            batch["advantages"] = group_advantages(rewards, s.scale_rewards).view(-1, 1).float()
            optimizer.zero_grad()
            (token_losses(logps, batch, s)[0] * token_weights(batch["mask"], s)).sum().backward()
            optimizer.step()
            still = table.grad[rewards.std(dim=1) == 0]  # of groups of equal rewards: only a KL can move them
            assert s.beta or not still.any(), f"{s.loss_type}: a group without spread has a gradient"
        reward = table.softmax(dim=1).gather(1, sums).mean().item()
        assert reward > 0.8, f"{s.loss_type}: reward {reward:.3f}"
        print(f"{s.loss_type:8} beta {s.beta:<4}  reward {reward:.3f}  gradient of flat groups {still.norm():.0e}")


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, argument_default=SUPPRESS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--full", action="store_true")
    for name, value in TINY.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), choices=CHOICES.get(name), help=f"{value}")
    given = vars(parser.parse_args(argv))
    if "smoke" in given:
        return smoke()
    presets = (FULL if "full" in given else {}) | (GSPO if given.get("is_level") == "sequence" else {})
    s = Namespace(**TINY | presets | given)
    model, tokenizer, examples, reward = full(s) if "full" in given else tiny()
    batches = (random.Random(f"{s.seed} {step}").sample(examples, s.prompts_per_step) for step in range(s.max_steps))
    if s.report_to != "none":
        tracker = import_module(s.report_to)
        tracker.init(project="grpo-from-scratch", name=f"{s.loss_type}-{s.scale_rewards}-{s.is_level}", config=vars(s))
    for step, (*_, metrics) in enumerate(train(model, tokenizer, batches, reward, s), start=1):
        if s.report_to != "none":
            tracker.log(metrics, step=step)
        if "full" in given or step % 20 == 0:
            print(f"step {step:3}", *(f"{name} {value:.3g}" for name, value in metrics.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
