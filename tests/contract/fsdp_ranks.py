"""Ranks of the FSDP2 trainer as real processes, looked into: gradients, sharded state, sizes of exported files."""

from pathlib import Path
from typing import Any

import trainer_ranks as tr
from torch import Tensor

from lockstep.data.mini_batches import TrainingBatch
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.train.model_export import export_model


def train(trainer: FSDP2Trainer, batch: TrainingBatch, steps: int = 3) -> tr.Result:
    """Train some steps on the same batch; the result has the clipped gradient of the first."""
    role, rank = trainer.role, trainer.ranks.rank
    rows = tr.minibatch_of(trainer, batch, role, rank).by_rank[rank]
    result = tr.Result(rank, tr.take_steps(trainer, rows, 1))
    scale = 1 - role.trainer.optimizer.betas[0]  # of the gradient in Adam's first moment after one step
    result.gradient = rows_of(trainer, {name: each / scale for name, each in trainer.optimizer.exp_avg.items()})
    result.metrics += tr.take_steps(trainer, rows, steps - 1)
    result.weights = tr.rows_of_all(trainer)
    return result


def rows_of(trainer: FSDP2Trainer, values: dict[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
    """First row and rows of values that are sharded as the parameters are."""
    return {shard.name: (shard.offset, values[shard.name].clone()) for shard in trainer.shards()}


def variant(family: str, recipe: str, budget: int = 400, **trainer: Any) -> tr.Case:
    def run(folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
        made = FSDP2Trainer(tr.config(folder, family, recipe, **trainer).policy, ranks)
        return train(made, tr.batch_of(made.role, ranks.world, budget))

    return run


def saved(folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Save after two steps; and load what one rank saved, if that was before."""
    role = tr.config(folder, "qwen2", "grpo").policy
    trainer = FSDP2Trainer(role, ranks)
    result = train(trainer, tr.batch_of(role, ranks.world), 2)
    result.extra["moments"] = rows_of(trainer, trainer.optimizer.exp_avg_sq)
    trainer.save(folder / "saved" / f"ranks-{ranks.world}")
    trainer.writer.finish()
    if ranks.world == 2:
        trainer.load(folder / "saved" / "ranks-1")
        result.extra["loaded moments"] = rows_of(trainer, trainer.optimizer.exp_avg_sq)
    return result


def export_in_parts(folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Export into several small files."""
    role = tr.config(folder, "llama", "sft").policy
    trainer = FSDP2Trainer(role, ranks)
    weights, place = trainer.merged_weights.merged(), folder / f"small-{ranks.world}"
    export_model(place, trainer.policy, weights, role.model, trainer.compute_dtype, ranks, file_bytes=20_000)
    return tr.Result(ranks.rank, weights=tr.rows_of_all(trainer))


VARIANTS: dict[str, tr.Case] = {
    f"{family}-{recipe}-{name}": variant(family, recipe, **settings)
    for family in tr.FAMILIES
    for recipe in ("sft", "grpo")
    for name, settings in {
        "split": {"budget": 60},
        "zero2": {"reshard_after_forward": False},
        "zero2-split": {"reshard_after_forward": False, "budget": 60},
    }.items()
}
CASES: dict[str, tr.Case] = {**VARIANTS, "saved": saved, "export": export_in_parts}
