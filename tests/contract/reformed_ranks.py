"""Two ranks of the DeepSpeed trainer, one of which is killed: the survivor destroys its engine, joins a replacement in
the same process, and both continue from the memory checkpoint.
"""

import multiprocessing
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import trainer_ranks as tr

from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.distributed import ParallelContext, join_ranks
from lockstep.train.trainer_protocol import Trainer
from lockstep.watch.beacon.writer import open_beacon

RANKS = 2
LIMIT_S = 250.0


def run(folder: Path, kind: str) -> list[tr.Result]:
    """Returns the results of both ranks of the second generation, and checks that the first lost one of its ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "lockstep.train.trainer_service", __name__])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = (folder, kind, store.port)
    processes = [context.Process(target=each, args=place, daemon=True) for each in (_survivor, _victim, _replacement)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]
    return [torch.load(folder / f"reformed-{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _survivor(folder: Path, kind: str, port: int) -> None:
    ranks = _join(folder, 0, port, 1)
    trainer = _first_step(folder, kind, ranks)
    lost = ""
    try:
        trainer.step(_rows(trainer, folder, kind, 0))
    except (RuntimeError, TimeoutError) as error:
        lost = str(error)
    trainer.close()
    result = _second_generation(folder, kind, _join(folder, 0, port, 2))
    result.extra["lost"] = lost
    torch.save(result, folder / "reformed-0.pt")


def _victim(folder: Path, kind: str, port: int) -> None:
    _first_step(folder, kind, _join(folder, 1, port, 1))
    os.kill(os.getpid(), signal.SIGKILL)


def _replacement(folder: Path, kind: str, port: int) -> None:
    result = _second_generation(folder, kind, _join(folder, 1, port, 2))
    torch.save(result, folder / "reformed-1.pt")


def _join(folder: Path, rank: int, port: int, generation: int) -> ParallelContext:
    torch.set_num_threads(1)
    os.environ["LOCKSTEP_BEACONS"] = str(folder / "beacons")
    open_beacon(f"reformed-{port}", f"policy-{rank}-{os.getpid()}", "policy", rank)
    place = f"tcp://127.0.0.1:{port}"
    return join_ranks(rank, RANKS, tr.device_of(rank), place, f"gen{generation}/policy", 60.0)


def _first_step(folder: Path, kind: str, ranks: ParallelContext) -> Trainer:
    trainer = tr.create(tr.config(folder, "qwen2", "sft", kind=kind).policy, ranks)
    trainer.step(_rows(trainer, folder, kind, ranks.rank))
    copies = MemoryCheckpoints(folder, ranks.rank, RANKS)
    trainer.save_to_memory(copies, 1)
    ranks.gather(torch.zeros(1), "all ranks have their copy")
    return trainer


def _second_generation(folder: Path, kind: str, ranks: ParallelContext) -> tr.Result:
    trainer = tr.create(tr.config(folder, "qwen2", "sft", kind=kind).policy, ranks)
    trainer.load_from_memory(MemoryCheckpoints(folder, ranks.rank, RANKS), 1)
    metrics = tr.take_steps(trainer, _rows(trainer, folder, kind, ranks.rank), 1)
    result = tr.Result(ranks.rank, metrics, weights=tr.rows_of_all(trainer))
    trainer.close()
    return result


def _rows(trainer: Trainer, folder: Path, kind: str, rank: int) -> list[tr.MicroBatch]:
    role = tr.config(folder, "qwen2", "sft", kind=kind).policy
    return tr.minibatch_of(trainer, tr.batch_of(role, RANKS), role, rank).by_rank[rank]
