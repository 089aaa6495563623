"""Flight-recorder dumps of jobs that never ran, with faults: for tests of the reader and for measuring it.

A job is a list of ranks, its communicators and, for each rank, the calls that it makes one after the other. `play` lets
them meet as NCCL does: a collective ends when all members entered it with the same signature. `write` puts what each
rank's recorder would hold into files of the form of torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (2.10).
Everything follows from the arguments: two calls make the same files.
"""

import json
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MILLISECOND = 1_000_000
BEGAN_NS = 1_790_000_000 * 1_000_000_000
STUCK_S = 600.0
"""The files are written so long after the last entry."""


@dataclass(frozen=True)
class Comm:
    """A communicator."""

    name: str
    ranks: tuple[int, ...]
    description: str = "undefined"


@dataclass(frozen=True)
class Call:
    """A collective that a rank calls; `line` is the user's."""

    comm: int
    operation: str = "all_reduce"
    shape: tuple[int, ...] = (1024,)
    dtype: str = "Float"
    line: int = 10


@dataclass
class Entry:
    """One in the recorder."""

    call: Call
    sequence: int
    created: int
    completed: int | None = None


@dataclass
class Job:
    """Who calls what: `programs[rank]`."""

    comms: list[Comm]
    programs: list[list[Call]]
    backend: str = "nccl"
    entries: list[list[Entry]] = field(default_factory=list)

    @property
    def world(self) -> int:
        return len(self.programs)

    def play(self) -> "Job":
        """Fill `entries`: every rank goes on until it waits for somebody who does not come."""
        members = [len(comm.ranks) for comm in self.comms]
        counts = [[0] * len(self.comms) for _ in self.programs]
        at = [0] * self.world
        self.entries = [[] for _ in self.programs]
        met: dict[tuple[int, int], list[tuple[int, Entry]]] = {}
        ready = list(range(self.world))
        while ready:
            rank = ready.pop()
            program = self.programs[rank]
            while at[rank] < len(program):
                call = program[at[rank]]
                counts[rank][call.comm] += 1
                sequence = counts[rank][call.comm]
                before = self.entries[rank][-1].completed if self.entries[rank] else BEGAN_NS
                assert before is not None
                entry = Entry(call, sequence, before + MILLISECOND + rank * 137 % 9973)
                self.entries[rank].append(entry)
                at[rank] += 1
                here = met.setdefault((call.comm, sequence), [])
                here.append((rank, entry))
                if len(here) < members[call.comm]:
                    break
                first = here[0][1].call
                if any((e.call.operation, e.call.shape, e.call.dtype) != (first.operation, first.shape, first.dtype)
                       for _, e in here):  # fmt: skip
                    break
                del met[call.comm, sequence]
                ended = max(e.created for _, e in here) + MILLISECOND
                for _, other in here:
                    other.completed = ended
                ready += [other for other, _ in here if other != rank]
        return self


def steps(world: int, comms: Sequence[Comm], calls: int, per_step: int = 20) -> Job:
    """A job that calls on its communicators in turns, `calls` on each rank, as a sharded trainer
    does."""
    kinds = [("_all_gather_base", (4096, 512)), ("_reduce_scatter_base", (4096, 512)), ("all_reduce", (1024,))]
    mine = [[index for index, comm in enumerate(comms) if rank in comm.ranks] for rank in range(world)]
    made: dict[tuple[int, int], Call] = {}
    programs = []
    for rank in range(world):
        program = []
        for number in range(calls):
            comm = mine[rank][number % len(mine[rank])]
            count = number // len(mine[rank])
            if (comm, count) not in made:
                operation, shape = kinds[count % per_step % len(kinds)]
                made[comm, count] = Call(comm, operation, shape, "BFloat16", 100 + count % per_step)
            program.append(made[comm, count])
        programs.append(program)
    return Job(list(comms), programs)


def frames(line: int, depth: int = 8) -> list[dict[str, Any]]:
    """A Python stack, innermost first."""
    torch = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    stack = [
        {"name": "all_reduce", "filename": torch, "line": 3245},
        {"name": "wrapper", "filename": torch, "line": 83},
    ]
    stack.append({"name": "training_step", "filename": "/home/user/train.py", "line": line})
    stack += [
        {"name": f"caller_{level}", "filename": "/home/user/loop.py", "line": level} for level in range(depth - 3)
    ]
    return stack


def dump(job: Job, rank: int, ring: int = 2000, stacks: bool = True, only_active: bool = False) -> dict[str, Any]:
    """What a rank's recorder holds, as torch's dictionary."""
    gloo = job.backend == "gloo"
    inputs = {call: _sizes(job, call) for call in set(job.programs[rank])}
    stack = {call.line: frames(call.line) for call in inputs} if stacks else {}
    entries, recorded = [], job.entries[rank]
    for number in range(max(0, len(recorded) - ring), len(recorded)):
        entry = recorded[number]
        call, comm = entry.call, job.comms[entry.call.comm]
        done = entry.completed is not None
        if only_active and done and not gloo:
            continue
        ins, outs = inputs[call]
        made: dict[str, Any] = {"frames": list(stack[call.line])} if stacks else {}
        made |= {
            "record_id": number, "pg_id": call.comm, "process_group": (comm.name, comm.description),
            "thread_name": "python", "thread_id": "140000000000000", "collective_seq_id": entry.sequence,
            "p2p_seq_id": 0, "op_id": entry.sequence, "profiling_name": f"{job.backend}:{call.operation}",
            "time_created_ns": entry.created, "input_sizes": [list(ins)], "input_dtypes": [call.dtype],
            "output_sizes": [list(outs)], "output_dtypes": [call.dtype],
            "state": "completed" if done and not gloo else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": entry.completed if done and not gloo else None,
            "retired": done, "timeout_ms": 600_000, "is_p2p": False,
        }  # fmt: skip
        entries.append(made)
    return {
        "version": "2.10",
        "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}} if gloo else {
            comm.name: {"name": comm.name, "desc": comm.description, "ranks": str(list(comm.ranks))}
            for comm in job.comms if rank in comm.ranks
        },
        "comm_lib_version": "" if gloo else "2.27.3",
        "pg_status": _status(job, rank),
        "entries": entries,
    }  # fmt: skip


def write(
    job: Job, folder: Path, *, ranks: Iterable[int] | None = None, name: str = "nccl_trace_rank_{rank}",
    **options: Any,
) -> None:  # fmt: skip
    """Write the dumps of ranks (all of them), pickled, or as JSON if the name says so."""
    folder.mkdir(parents=True, exist_ok=True)
    last = max((entry.completed or entry.created for entries in job.entries for entry in entries), default=BEGAN_NS)
    for rank in range(job.world) if ranks is None else ranks:
        path = folder / name.format(rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = dump(job, rank, **options)
        path.write_bytes(as_json(content) if path.suffix == ".json" else pickle.dumps(content, 2))
        os.utime(path, times=(last / 1e9 + STUCK_S,) * 2)


def as_json(content: Mapping[str, Any]) -> bytes:
    """The form of `_dump_fr_trace_json`: no stacks, keys sorted, 0 for no time, texts in pg_status, no empty list."""
    entries = [{key: 0 if value is None else value for key, value in entry.items() if key != "frames"}
               for entry in content["entries"]]  # fmt: skip
    status = {pg: {key: str(count) for key, count in each.items()} for pg, each in content["pg_status"].items()}
    made = {**content, "pg_status": status, "entries": entries}
    if not entries:
        del made["entries"]
    return json.dumps(made, sort_keys=True, separators=(",", ":")).encode()


def _sizes(job: Job, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size = len(job.comms[call.comm].ranks)
    whole, part = call.shape, (call.shape[0] // size or 1, *call.shape[1:])
    if "all_gather" in call.operation:
        return part, (part[0] * size, *part[1:])
    if "reduce_scatter" in call.operation:
        return (part[0] * size, *part[1:]), part
    return whole, whole


def _status(job: Job, rank: int) -> dict[str, dict[str, int]]:
    status = {}
    for entry in job.entries[rank]:
        before = status.get(str(entry.call.comm), {"last_completed_collective": -1})
        completed = entry.sequence if entry.completed is not None else before["last_completed_collective"]
        status[str(entry.call.comm)] = {
            "last_enqueued_collective": entry.sequence, "last_started_collective": -1,
            "last_completed_collective": completed,
        }  # fmt: skip
    return status
