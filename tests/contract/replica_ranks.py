"""Trainers on copies of the sharded parameters (HSDP) as real processes: four ranks, two copies of two."""

from pathlib import Path

import adapter_ranks as ar
import torch
import trainer_ranks as tr

from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore

SETTINGS = {"ranks": 4, "replicas": 2}


def trained(folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Train some steps, then save, publish and export."""
    cfg = tr.config(folder, "qwen2", "grpo", **(SETTINGS if ranks.world == 4 else {}))
    trainer = FSDP2Trainer(cfg.policy, ranks)
    result = tr.train(trainer, tr.batch_of(cfg, ranks.world), cfg.policy, ranks.rank)
    result.extra["held"] = {name: tuple(rows.shape) for name, rows in trainer._rows().items()}
    trainer.save(folder / "saved" / f"ranks-{ranks.world}")
    trainer.writer.finish()
    trainer.export(folder / f"exported-{ranks.world}")
    store = WeightStore.open(folder / f"store-{ranks.world}", generation=1)
    store.write_shards(ranks.rank, 1, trainer.shards(), complete=True)
    again = FSDP2Trainer(cfg.policy, ranks)
    again.load(folder / "saved" / f"ranks-{ranks.world}")
    result.extra["loaded"] = all(torch.equal(again._rows()[name], rows) for name, rows in trainer._rows().items())
    return result


def adapter(folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    cfg = ar.config(folder, "llama", "sft", ar.LORA, **(SETTINGS if ranks.world == 4 else {}))
    return ar.adapter_train(FSDP2Trainer(cfg.policy, ranks), tr.batch_of(cfg, ranks.world, budget=60))


def plan_of(folder: Path) -> WeightPlan:
    trainer = FSDP2Trainer(tr.config(folder, "qwen2", "grpo").policy, ParallelContext())
    return WeightPlan.of((name, p.shape, p.dtype) for name, p in trainer.trained_parameters.items())


CASES: dict[str, tr.Case] = {"trained": trained, "adapter": adapter}
