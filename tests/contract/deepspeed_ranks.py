"""Cases of the DeepSpeed trainer alone, as real ranks: the optimizer in host memory, bfloat16, a damaged memory
checkpoint; and a few cases of the contract at the stages whose contract is a long suite.
"""

from functools import partial
from pathlib import Path

import trainer_ranks as tr

from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import MemoryCheckpointMissing

SHORT = ("non_finite", "resume", "qwen2-grpo-split")
"""Cases of the contract."""
KINDS = (*tr.LONG, "deepspeed-1-offload", "deepspeed-2-offload", "deepspeed-3-offload")
"""Kinds of which these are the short cases."""
DAMAGED = ("deepspeed-2", "deepspeed-3")
BFLOAT16 = ("deepspeed-1", "deepspeed-2", "deepspeed-3")


def bfloat16(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Some steps in bfloat16, with several micro-batches each."""
    role = tr.config(folder, "llama", "sft", {"dtype": "bfloat16"}, kind=kind).policy
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


CASES: dict[str, tr.Case] = {
    **{f"{kind}:{name}": partial(tr.SUITE[name], kind) for kind in KINDS for name in SHORT},
    **{f"{kind}:bfloat16": partial(bfloat16, kind) for kind in BFLOAT16},
    **{f"{kind}:damaged": partial(damaged, kind) for kind in DAMAGED},
}
