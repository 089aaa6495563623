"""Cases of the DeepSpeed trainer alone, as real ranks: the optimizer in host memory, reductions that overlap the
backward pass, bfloat16, a damaged memory checkpoint, the collectives of weight sync; and a few cases of the contract at
the stages whose contract is a long suite.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trainer_ranks as tr
from adapter_ranks import SAVED

from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import MemoryCheckpointMissing
from lockstep.watch.recorder import recorder

SHORT = ("non_finite", "resume", "qwen2-grpo-split")
"""Cases of the contract."""
KINDS = (*tr.LONG, "deepspeed-1-overlap", "deepspeed-1-offload", "deepspeed-2-offload", "deepspeed-3-offload")
"""Kinds of which these are the short cases."""
REFORMED = ("deepspeed-2", "deepspeed-3")
PUBLISHED = ("deepspeed-2", "deepspeed-3")
DAMAGED = ("deepspeed-2", "deepspeed-3")
BFLOAT16 = ("deepspeed-1", "deepspeed-2", "deepspeed-3")


def bfloat16(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Some steps in bfloat16, with several micro-batches each."""
    return some_steps(folder, {"dtype": "bfloat16"}, ranks, kind=kind)


def bfloat16_adapter(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """The same with an adapter, and modules that are trained fully beside it."""
    result = some_steps(folder, {"dtype": "bfloat16", "adapter": SAVED}, ranks, kind=kind)
    assert {rows.dtype for _, rows in result.weights.values()} == {torch.bfloat16, torch.float32}, "merged in float32"
    return result


def some_steps(folder: Path, model: dict[str, Any], ranks: ParallelContext, **trainer: Any) -> tr.Result:
    role = tr.config(folder, "llama", "sft", model, **trainer).policy
    return tr.train(tr.create(role, ranks), tr.batch_of(role, ranks.world, budget=60), role, ranks.rank)


def damaged(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """The last rank's memory checkpoint is damaged: all ranks say so, and can load the other one."""
    role = tr.config(folder, "qwen2", "sft", kind=kind).policy
    trainer, result = tr.create(role, ranks), tr.Result(ranks.rank)
    place = folder / f"damaged-{kind}"
    place.mkdir(exist_ok=True)
    rows = tr.minibatch_of(trainer, tr.batch_of(role, ranks.world), role, ranks.rank).by_rank[ranks.rank]
    copies = MemoryCheckpoints(place, ranks.rank, ranks.world)
    for version in (1, 2):
        tr.take_steps(trainer, rows, 1)
        trainer.save_to_memory(copies, version)
        if version == 1:
            result.extra["first"] = tr.rows_of_all(trainer)
    if ranks.rank == ranks.world - 1:
        slot = place / f"rank-{ranks.rank}-1"
        content = bytearray(slot.read_bytes())
        content[0] ^= 0xFF
        slot.write_bytes(content)
    try:
        trainer.load_from_memory(copies, 2)
    except MemoryCheckpointMissing as error:
        result.extra["error"] = str(error)
    trainer.load_from_memory(copies, 1)
    result.weights = tr.rows_of_all(trainer)
    copies.close()
    return result


def _collectives() -> int:
    """The number of collectives that this rank has entered."""
    recorded = recorder.current()
    member = recorded and recorded.member(dist.group.WORLD)
    assert member is not None
    return member.collectives


def published(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Counts the collectives in which all weights are gathered in two buckets, without and with an adapter."""
    result = tr.Result(ranks.rank)
    models: dict[str, dict[str, Any]] = {"plain": {}, "adapter": {"adapter": {"r": 3}}}
    for name, model in models.items():
        trainer = tr.create(tr.config(folder, "qwen2", "sft", model, kind=kind).policy, ranks)
        wanted = [(info.name, torch.float32) for info in trainer.parameters()]
        before = _collectives()
        buckets = list(trainer.gather_weights([wanted[:5], wanted[5:]], everyone=True))
        result.extra[name] = _collectives() - before
        result.extra["weights"] = sum(len(each or ()) for each in buckets)
    return result


CASES: dict[str, tr.Case] = {
    **{f"{kind}:{name}": partial(tr.SUITE[name], kind) for kind in KINDS for name in SHORT},
    **{f"{kind}:memory": partial(tr.SUITE["memory"], kind) for kind in REFORMED},
    **{f"{kind}:bfloat16": partial(bfloat16, kind) for kind in BFLOAT16},
    **{f"{kind}:bfloat16_adapter": partial(bfloat16_adapter, kind) for kind in BFLOAT16},
    **{f"{kind}:published": partial(published, kind) for kind in PUBLISHED},
    **{f"{kind}:damaged": partial(damaged, kind) for kind in DAMAGED},
}
