"""Reading a folder of flight-recorder dumps."""

from dataclasses import replace
from pathlib import Path

from lockstep.watch.dumps.build import build
from lockstep.watch.dumps.choose import choose
from lockstep.watch.dumps.compare import unsettled
from lockstep.watch.dumps.files import find
from lockstep.watch.dumps.pool import Calls, read_all
from lockstep.watch.dumps.trace import Trace
from lockstep.watch.evidence import Evidence


class NoDumps(ValueError):
    """There is nothing to read in the folder; the text says what was looked for."""


def read_dumps(
    folder: Path, *, ranks: str | None = None, world_size: int | None = None, readers: int | None = None
) -> Evidence:
    """What the dumps below a folder say of their job. Files that cannot be read are named in `gaps`.

    Args:
        folder: A folder, or one dump.
        ranks: Where the rank stands in the files' paths, `host-*/trace.{rank}.pickle`; None understands the usual ones.
        world_size: How many ranks the job has; None takes what the dumps say.
        readers: How many processes read; None takes as many as there are CPUs.

    Raises:
        NoDumps: No file is a dump.
        ValueError: `ranks` has no `{rank}`.
    """
    if not folder.exists():
        raise NoDumps(f"{folder} does not exist")
    files = find(folder, ranks)
    if not files:
        raise NoDumps(_nothing(folder, ranks))
    calls: Calls = {}
    dumps, gaps = choose(read_all(files, calls, readers=readers))
    again = [dump.file for dump in unsettled(dumps)]
    if again:
        fuller = {file.path: trace for file, trace in read_all(again, calls, full=True, readers=readers)}
        dumps = [
            replace(dump, trace=trace) if isinstance(trace := fuller.get(dump.file.path), Trace) else dump
            for dump in dumps
        ]
    if not dumps:
        raise NoDumps(f"none of the {len(files)} dumps in {folder} can be read: " + "; ".join(gaps[:5]))
    return build(dumps, gaps, calls, world_size)


def _nothing(folder: Path, ranks: str | None) -> str:
    if ranks is not None:
        return f"no file in {folder} fits --ranks {ranks!r}"
    return (
        f"no flight-recorder dump in {folder}: looked for files that hold one, pickled or JSON, by any name "
        "(PyTorch's own are nccl_trace_rank_0, comm_lib_trace_rank_0, ...)"
    )
