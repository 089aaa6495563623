"""Trainers with an adapter as real processes, and the expected results, computed with peft and torch alone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trainer_ranks as tr
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.config.train_role import TrainRole
from lockstep.train.deepspeed.deepspeed_trainer import DeepSpeedTrainer
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer

KINDS = ("fsdp2", *tr.DEEPSPEED)
Adapted = FSDP2Trainer | DeepSpeedTrainer
Suite = Callable[[str, Path, ParallelContext, int], tr.Result]
# r is odd: the last rank's part of A is shorter
LORA = {"kind": "lora", "r": 5, "lora_alpha": 15, "target_modules": ["q_proj", "v_proj", "down_proj"]}
DORA = {"kind": "dora", "r": 3, "lora_alpha": 6, "use_rslora": True, "init_lora_weights": "gaussian"}
# modules that are trained fully beside the adapter, in the layers and outside of them
SAVED = LORA | {"modules_to_save": ["lm_head", "embed_tokens", "layers.1.input_layernorm"]}
ADAPTERS = {"lora": LORA, "dora": DORA, "saved": SAVED}
DROPPING = LORA | {"lora_dropout": 0.3}


def config(folder: Path, family: str, recipe: str, adapter: dict[str, Any], **trainer: Any) -> SFTConfig | GRPOConfig:
    return tr.config(folder, family, recipe, {"adapter": adapter}, **trainer)


def create(role: TrainRole, ranks: ParallelContext | None = None) -> Adapted:
    made = tr.create(role, ranks)
    assert isinstance(made, Adapted)
    return made


def variant(adapter: str, family: str, recipe: str, budget: int = 400, **trainer: Any) -> Suite:
    def run(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
        made = create(config(folder, family, recipe, ADAPTERS[adapter], kind=kind, **trainer).policy, ranks)
        weights = made.merged_weights
        before, start = rows_of(made, weights.weights), adapter_of(made)
        result = adapter_train(made, tr.batch_of(made.role, ranks.world, budget))
        after = rows_of(made, weights.weights)
        result.extra["start"] = start
        saved = {id(parameter) for parameter in weights.saved.values()}
        result.extra["frozen"] = all(
            torch.equal(before[name], rows) != (id(weights.weights[name]) in saved)
            for name, rows in after.items()
            if rows.numel()
        )
        result.extra["optimizer"] = optimizer_names(made)
        return result

    return run


def optimizer_names(trainer: Adapted) -> list[str]:
    """The names of the weights that have moments."""
    if isinstance(trainer, FSDP2Trainer):
        return sorted(trainer.optimizer.exp_avg)
    names = trainer.state.state()
    return sorted(name.removeprefix("exp_avg.") for name in names if name.startswith("exp_avg."))


def adapter_train(trainer: Adapted, batch: Any, steps: int = 3) -> tr.Result:
    """Train some steps on the same batch. The weights of the result are merged and have the model's names."""
    result = tr.train(trainer, batch, trainer.role, trainer.ranks.rank, steps)
    result.extra["adapter"] = adapter_of(trainer)
    return result


def adapter_of(trainer: Adapted) -> dict[str, torch.Tensor]:
    """The full adapter, and this rank's rows of the modules to save."""
    adapter = {name: rows.clone() for name, rows in trainer.merged_weights.gather_adapter().items()}
    return adapter | rows_of(trainer, trainer.merged_weights.saved)


def rows_of(trainer: Adapted, parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of this rank's rows of some parameters."""
    return {name: part.rows().detach().clone() for name, part in trainer.merged_weights.held(parameters).items()}


def resume(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """With dropout and several micro-batches: two steps, a save, two more steps; then these two again from the
    checkpoint."""
    cfg = config(folder, "qwen2", "sft", DROPPING, kind=kind)
    first = create(cfg.policy, ranks)
    batch = tr.batch_of(cfg, ranks.world, budget=60)
    result = adapter_train(first, batch, 2)
    first.save(folder / "saved" / f"adapter-{ranks.world}")
    result.extra["straight"] = adapter_train(first, batch, 2)
    first.writer.finish()
    second = create(cfg.policy, ranks)
    torch.manual_seed(4)
    second.load(folder / "saved" / f"adapter-{ranks.world}")
    result.extra["loaded"] = adapter_of(second)
    result.extra["resumed"] = adapter_train(second, batch, 2)
    return result


def recomputed(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Train with dropout and activation checkpointing: recomputed activations need the same masks."""
    cfg = config(folder, "qwen2", "sft", DROPPING, activation_checkpointing=True, kind=kind)
    return adapter_train(create(cfg.policy, ranks), tr.batch_of(cfg, ranks.world, budget=60), 2)


def reload(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Load the checkpoint that one rank saved."""
    trainer = create(config(folder, "qwen2", "sft", DROPPING, kind=kind).policy, ranks)
    trainer.load(folder / "saved" / "adapter-1")
    result = tr.Result(ranks.rank, weights=tr.rows_of_all(trainer))
    result.extra["adapter"] = adapter_of(trainer)
    return result


def export(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Export the adapter, and the merged model."""
    return _exported(kind, folder, ranks, DORA, "")


def begun(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Start from the adapter that one rank exported, which is the reference as well; train, save and load."""
    start_from = {"path": str(folder / "saved-adapter-1")}
    cfg = config(folder, "llama", "grpo", start_from | SAVED, kind=kind)
    trainer = create(cfg.policy, ranks)
    start = adapter_of(trainer)
    rows = tr.batch_of(cfg, ranks.world).everything().by_rank[ranks.rank]
    first = trainer.evaluate(rows, ["logprobs"])
    result = adapter_train(trainer, tr.batch_of(cfg, ranks.world))
    after = trainer.evaluate(rows, ["reference_logprobs", "logprobs"])
    result.extra |= {"start": start, "first": first, "after": after, "trained": adapter_of(trainer)}
    trainer.save(folder / "saved" / f"begun-{ranks.world}")
    trainer.writer.finish()
    second = create(cfg.policy, ranks)
    second.load(folder / "saved" / f"begun-{ranks.world}")
    result.extra["loaded"] = adapter_of(second)
    result.extra["again"] = second.evaluate(rows, ["reference_logprobs"])
    return result


def export_saved(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Export an adapter with fully trained modules, and the merged model."""
    return _exported(kind, folder, ranks, SAVED, "saved-")


def _exported(kind: str, folder: Path, ranks: ParallelContext, adapter: dict[str, Any], prefix: str) -> tr.Result:
    cfg = config(folder, "llama", "sft", adapter, kind=kind)
    trainer = create(cfg.policy, ranks)
    result = adapter_train(trainer, tr.batch_of(cfg, ranks.world))
    trainer.export(folder / f"{prefix}merged-{ranks.world}")
    trainer.export_adapter(folder / f"{prefix}adapter-{ranks.world}")
    return result


SUITE: dict[str, Suite] = {
    "saved-llama-grpo": variant("saved", "llama", "grpo", budget=60),
    "lora-qwen2-grpo": variant("lora", "qwen2", "grpo"),
    "lora-llama-sft-split": variant("lora", "llama", "sft", budget=60),
    "lora-llama-grpo-zero2": variant("lora", "llama", "grpo", budget=60, reshard_after_forward=False),
    "dora-qwen2-grpo-recomputed": variant("dora", "qwen2", "grpo", budget=60, activation_checkpointing=True),
    "dora-llama-sft": variant("dora", "llama", "sft"),
    "resume": resume,
    "recomputed": recomputed,
    "reload": reload,
    "export": export,
    "export_saved": export_saved,
    "begun": begun,
}
CASES: dict[str, tr.Case] = {f"{kind}:{name}": partial(case, kind) for kind in KINDS for name, case in SUITE.items()}


# --- expected results


def truth(folder: Path, name: str, start: dict[str, torch.Tensor]) -> tr.Result:
    """The same steps with peft, from the same initial adapter: one sequence at a time, full logits, torch.optim."""
    adapter, family, recipe = name.split("-")[:3]
    cfg = config(folder, family, recipe, ADAPTERS[adapter])
    reference = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32, attn_implementation="eager")
    base = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32, attn_implementation="eager")
    made = FSDP2Trainer(cfg.policy, ParallelContext())
    made.export_adapter(folder / f"start-{name}")
    model: Any = PeftModel.from_pretrained(base, folder / f"start-{name}", is_trainable=True).eval()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for key, value in named.items():
        stored = key.replace(".modules_to_save", "").replace(".default", "").replace("_vector.weight", "_vector")
        assert torch.equal(value, start[stored]), key
    settings = cfg.trainer.optimizer
    decayed = [p for n, p in named.items() if "norm" not in n]
    rest = {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0}
    groups = [{"params": decayed}, *([rest] if rest["params"] else [])]
    optimizer = torch.optim.AdamW(groups, lr=tr.LR, eps=settings.eps, weight_decay=settings.weight_decay)
    result = tr.Result(0)
    old = None
    for step in range(3):
        if isinstance(cfg, SFTConfig):
            loss = tr._sft_truth(model)
        else:
            old = tr._sequences(model)[0].detach() if old is None else old
            loss = tr._grpo_truth(model, reference, old, cfg.loss)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), cfg.trainer.max_grad_norm or 1e9)
        rate = tr.LR * [1 / 3, 2 / 3, 1.0][step]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        result.metrics.append({"loss": float(loss.detach()), "grad_norm": float(norm), "lr": rate})
    result.weights = {n: (0, p.detach()) for n, p in model.merge_and_unload().named_parameters()}
    return result
