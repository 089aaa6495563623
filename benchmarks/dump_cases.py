"""Faults with known culprits, as dumps: cases in which analysers of flight-recorder dumps err."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.dump_files import Call, Comm, Job, steps, write

CALLS, AT = 60, 41
"""Calls of each rank, and at which of its calls (from 0) a rank goes wrong."""


@dataclass(frozen=True)
class Case:
    """Dumps that `make` writes into a folder, and who is to blame: nobody where none waits, or nobody can tell."""

    name: str
    culprits: frozenset[int]
    kinds: frozenset[str]
    make: Callable[[Path], None]


def job(size: int = 8, pairs: bool = False) -> Job:
    comms = [Comm("0", tuple(range(size)), "default_pg")]
    if pairs:
        comms += [Comm(str(1 + at), (2 * at, 2 * at + 1), "tp") for at in range(size // 2)]
    return steps(size, comms, CALLS)


def _stop(made: Job, rank: int, at: int = AT) -> Job:
    made.programs[rank] = made.programs[rank][:at]
    return made


def _change(made: Job, rank: int, **how: object) -> Job:
    made.programs[rank][AT] = replace(made.programs[rank][AT], line=77, **how)  # type: ignore[arg-type]
    return made


def _absent(folder: Path) -> None:
    write(_stop(job(), 5).play(), folder)


def _absent_gloo(folder: Path) -> None:
    made = _stop(job(), 5)
    made.backend = "gloo"
    write(made.play(), folder)


def _absent_json(folder: Path) -> None:
    write(_stop(job(), 5).play(), folder, name="rank{rank}.json")


def _active_only(folder: Path) -> None:
    write(_stop(job(), 5).play(), folder, only_active=True)


def _two_absent(folder: Path) -> None:
    write(_stop(_stop(job(), 2), 5).play(), folder)


def _operation(folder: Path) -> None:
    write(_change(job(), 5, operation="broadcast").play(), folder)


def _shape(folder: Path) -> None:
    write(_change(job(), 5, shape=(999,), operation="all_reduce").play(), folder)


def _dtype(folder: Path) -> None:
    write(_change(job(), 5, dtype="Float").play(), folder)


def _first_file(folder: Path) -> None:
    write(_change(job(), 0, dtype="Float").play(), folder)


def _skips(folder: Path) -> None:
    made = job()
    del made.programs[5][AT]
    write(made.play(), folder)


def _several_groups(folder: Path) -> None:
    """Rank 5 does not come to its pair; rank 4 waits for it there, and all others wait for both in the world."""
    made = job(pairs=True)
    write(_stop(made, 5).play(), folder)


def _healthy_wrapped(folder: Path) -> None:
    """Ranks 0 and 1 have calls of their own, so record ids are uneven, and the ring has wrapped."""
    comms = [Comm("0", tuple(range(8)), "default_pg"), Comm("1", (0, 1), "pair")]
    programs = [[Call(1), Call(1), Call(0)] * CALLS if rank < 2 else [Call(0)] * CALLS for rank in range(8)]
    write(Job(comms, programs).play(), folder, ring=40)


def _absent_wrapped(folder: Path) -> None:
    comms = [Comm("0", tuple(range(8)), "default_pg"), Comm("1", (0, 1), "pair")]
    programs = [[Call(1), Call(1), Call(0)] * CALLS if rank < 2 else [Call(0)] * CALLS for rank in range(8)]
    programs[5] = programs[5][:AT]
    write(Job(comms, programs).play(), folder, ring=40)


def _innocent_missing(folder: Path) -> None:
    write(_stop(job(), 5).play(), folder, ranks=[0, 1, 2, 4, 5, 6, 7])


def _culprit_missing(folder: Path) -> None:
    write(_stop(job(), 5).play(), folder, ranks=[0, 1, 2, 3, 4, 6, 7])


def _truncated(folder: Path) -> None:
    write(_stop(job(), 5).play(), folder)
    file = folder / "nccl_trace_rank_3"
    file.write_bytes(file.read_bytes()[:2000])


def _empty_recorder(folder: Path) -> None:
    made = _stop(job(), 5).play()
    made.entries[3] = []
    write(made, folder)


def _earlier_run(folder: Path) -> None:
    """Dumps of a run two hours before lie beside those of this one."""
    write(_stop(job(), 2).play(), folder, name="old_rank_{rank}")
    made = _stop(job(), 5).play()
    for entries in made.entries:
        for entry in entries:
            entry.created += 7_200 * 10**9
            entry.completed = entry.completed and entry.completed + 7_200 * 10**9
    write(made, folder, name="new_rank_{rank}")


def _in_flight(folder: Path) -> None:
    made = job().play()
    for entries in made.entries:
        entries[-1].completed = None
    write(made, folder)


def _lags(folder: Path) -> None:
    made = job().play()
    made.entries[5][-1].completed = None
    write(made, folder)


def _healthy(folder: Path) -> None:
    write(job(pairs=True).play(), folder)


def _case(name: str, make: Callable[[Path], None], culprits: set[int], *kinds: str) -> Case:
    return Case(name, frozenset(culprits), frozenset(kinds), make)


CASES = [
    _case("a rank does not come", _absent, {5}, "absent"),
    _case("two ranks do not come", _two_absent, {2, 5}, "absent"),
    _case("another operation", _operation, {5}, "mismatch"),
    _case("another shape", _shape, {5}, "mismatch"),
    _case("another dtype", _dtype, {5}, "mismatch"),
    _case("the culprit's is the first file", _first_file, {0}, "mismatch"),
    _case("a collective is skipped", _skips, {5}, "mismatch"),
    _case("several groups", _several_groups, {5}, "absent"),
    _case("healthy, ring wrapped, uneven record ids", _healthy_wrapped, set()),
    _case("a rank does not come, ring wrapped, uneven", _absent_wrapped, {5}, "absent"),
    _case("the dump of an innocent is missing", _innocent_missing, {5}, "absent"),
    _case("the dump of the culprit is missing", _culprit_missing, set(), "unknown"),
    _case("the dump of an innocent is truncated", _truncated, {5}, "absent"),
    _case("the recorder of an innocent was off", _empty_recorder, {5}, "absent"),
    _case("dumps of an earlier run beside", _earlier_run, {5}, "absent"),
    _case("raw gloo dumps", _absent_gloo, {5}, "absent"),
    _case("JSON dumps", _absent_json, {5}, "absent"),
    _case("only active entries", _active_only, {5}, "absent"),
    _case("all entered, none completes", _in_flight, set(), "in_flight"),
    _case("one does not complete", _lags, {5}, "device_lag"),
    _case("healthy", _healthy, set()),
]  # fmt: skip
