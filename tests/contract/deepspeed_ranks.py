"""Cases of the DeepSpeed trainer alone, as real ranks: the optimizer in host memory, reductions that overlap the
backward pass, bfloat16, a damaged memory checkpoint, the collectives of weight sync; and a few cases of the contract at
the stages whose contract is a long suite.
"""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trainer_ranks as tr
from adapter_ranks import SAVED

from lockstep.data.forest_builder import forest_from_documents
from lockstep.data.mini_batches import pack
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import MemoryCheckpointMissing
from lockstep.watch.recorder import recorder

SHORT = ("non_finite", "resume", "qwen2-grpo-split")
"""Cases of the contract."""
KINDS = (
    *tr.LONG,
    *(f"deepspeed-{kind}" for kind in ("1-overlap", "1-offload", "2-offload", "3-offload", "3-hpz")),
)
"""Kinds of which these are the short cases."""
REFORMED = ("deepspeed-2", "deepspeed-3")
PUBLISHED = ("deepspeed-2", "deepspeed-3")
DAMAGED = ("deepspeed-2", "deepspeed-3")
COMPILED = ("deepspeed-0", "deepspeed-1")
SUMS = ("deepspeed-1-sums", "deepspeed-1-sums-offload")
BFLOAT16 = ("deepspeed-1", "deepspeed-2", "deepspeed-3", *SUMS)


def bfloat16(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Some steps in bfloat16, with several micro-batches each."""
    return some_steps(folder, {"dtype": "bfloat16"}, ranks, kind=kind)


def bfloat16_adapter(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """The same with an adapter, and modules that are trained fully beside it."""
    result = some_steps(folder, {"dtype": "bfloat16", "adapter": SAVED}, ranks, kind=kind)
    assert {rows.dtype for _, rows in result.weights.values()} == {torch.bfloat16, torch.float32}, "merged in float32"
    return result


def bfloat16_export(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Exports an adapter that was trained in bfloat16, and what was trained beside it."""
    role = tr.config(folder, "qwen2", "sft", {"dtype": "bfloat16", "adapter": SAVED}, kind=kind).policy
    trainer = tr.create(role, ranks)
    result = tr.train(trainer, tr.batch_of(role, ranks.world), role, ranks.rank)
    trainer.export_adapter(folder / f"bfloat16-adapter-{kind}")
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


def _collectives(group: dist.ProcessGroup | None = None) -> int:
    """The number of collectives that this rank has entered, on the communicator of all ranks or on another one."""
    recorded = recorder.current()
    member = recorded and recorded.member(group or dist.group.WORLD)
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


def compiled(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Compiled layers beside the model's own, with recomputed activations. One document is in the first micro-batch of
    the first rank alone: the last rank has an empty one."""
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "compiled": {"compile": "layers"},
        "recomputed": {"compile": "layers", "activation_checkpointing": True},
    }
    result = tr.Result(ranks.rank)
    for name, trainer in settings.items():
        role = tr.config(folder, "qwen2", "sft", kind=kind, **trainer).policy
        made, losses = tr.create(role, ranks), []
        for count in (3, 1, 4):
            batch = pack(forest_from_documents(tr.documents(count)), ranks.world, 30)
            rows = next(iter(batch.minibatches(1, None, role.objective))).by_rank[ranks.rank]
            losses.append(made.step(rows).values["loss"])
        result.extra[name] = losses, tr.rows_of_all(made)
    return result


def second_copy(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Trains with a second copy of the parameters on each half of the ranks, and saves, loads and continues."""
    role = tr.config(folder, "qwen2", "grpo", kind=kind, ranks=ranks.world).policy
    trainer = tr.create(role, ranks)
    within: dist.ProcessGroup = import_module("deepspeed.utils.groups")._ZERO_PARAM_INTRA_PARALLEL_GROUP
    members = dist.get_process_group_ranks(within)
    before = _collectives(within)
    rows = tr.minibatch_of(trainer, tr.batch_of(role, ranks.world, budget=60), role, ranks.rank).by_rank[ranks.rank]
    result = tr.Result(ranks.rank, tr.take_steps(trainer, rows, 2))
    result.extra |= {"members": members, "within": _collectives(within) - before}
    trainer.save(folder / "saved" / kind)
    tr.wait_saved(trainer)
    result.metrics += tr.take_steps(trainer, rows, 1)
    result.weights = tr.rows_of_all(trainer)
    trainer.evaluate(rows, ["logprobs"])  # the second copy is then of the weights of the third step
    trainer.load(folder / "saved" / kind)
    tr.take_steps(trainer, rows, 1)
    result.extra["again"] = tr.rows_of_all(trainer)
    return result


def second_copy_adapter(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """With an adapter, whose reference is the model without it: frozen weights keep their second copy."""
    role = tr.config(folder, "llama", "grpo", {"adapter": SAVED}, kind=kind, ranks=ranks.world).policy
    return tr.train(tr.create(role, ranks), tr.batch_of(role, ranks.world, budget=60), role, ranks.rank)


FOUR: dict[str, tr.Case] = {
    "deepspeed-3-hpz:second_copy": partial(second_copy, "deepspeed-3-hpz"),
    "deepspeed-3-hpz:second_copy_adapter": partial(second_copy_adapter, "deepspeed-3-hpz"),
}
"""Cases of four ranks."""
SLOW: dict[str, tr.Case] = {f"{kind}:compiled": partial(compiled, kind) for kind in COMPILED}
"""Cases of two ranks that are part of the long suites."""
TWO: dict[str, tr.Case] = {
    **{f"{kind}:{name}": partial(tr.SUITE[name], kind) for kind in KINDS for name in SHORT},
    **{f"{kind}:{name}": partial(tr.SUITE[name], kind) for kind in SUMS for name in ("non_finite", "resume")},
    **{f"{kind}:memory": partial(tr.SUITE["memory"], kind) for kind in (*REFORMED, SUMS[0])},
    **{f"{kind}:bfloat16": partial(bfloat16, kind) for kind in BFLOAT16},
    **{f"{kind}:bfloat16_adapter": partial(bfloat16_adapter, kind) for kind in BFLOAT16},
    **{f"{kind}:bfloat16_export": partial(bfloat16_export, kind) for kind in BFLOAT16},
    **{f"{kind}:published": partial(published, kind) for kind in PUBLISHED},
    **{f"{kind}:damaged": partial(damaged, kind) for kind in DAMAGED},
}
"""Cases of two ranks."""
CASES = TWO | SLOW | FOUR
