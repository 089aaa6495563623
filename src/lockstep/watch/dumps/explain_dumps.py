"""Reads the flight-recorder dumps in a folder and diagnoses the job.

Separate processes read the files, because a hostile file may crash its reader. `read_dumps` returns the evidence,
`explain_dumps` returns the verdicts.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import lockstep
from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.verdict import Fact, Verdict, VerdictKind, VerdictLevel
from lockstep.watch.dumps.call_selection import find_undecided
from lockstep.watch.dumps.decode import CallTexts
from lockstep.watch.dumps.dump_evidence import build_dump_evidence
from lockstep.watch.dumps.dump_files import (
    DumpFile,
    RankDump,
    UnreadableDump,
    find_dump_files,
    ranks_text,
    select_dumps,
)
from lockstep.watch.dumps.reader_process import ANSWER_HEADER, unpack_trace
from lockstep.watch.dumps.traces import RankTrace

MEMORY_BYTES = 2 << 30
"""The limit of a reader process's address space. A dump of 20,000 entries needs about 100 MiB."""
_PREFETCH = 2
"""The most files sent to a reader in advance, so that it never waits for the next one."""
_START_S = 60.0
_END_S = 10.0
_FILE_S, _PER_BYTE_S = 60.0, 1 / 500_000
"""The time limit for a file: a constant plus a time per byte. A typical file takes hundredths of a second."""


@dataclass(eq=False)
class _ReaderProcess:
    """A reader process, and the files sent to it that it has not answered yet."""

    process: "subprocess.Popen[bytes]"
    deadline: float
    full: bool
    ready: bool = False
    files: deque[DumpFile] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)


def read_traces(
    files: Sequence[DumpFile], calls: CallTexts, *, full: bool = False, readers: int | None = None,
    memory: int = MEMORY_BYTES, file_s: float = _FILE_S,
) -> Iterator[tuple[DumpFile, RankTrace | UnreadableDump]]:  # fmt: skip
    """Reads dumps in parallel and yields each as soon as it is decoded; adds the texts of their calls to `calls`. With
    `full`, every call is kept individually; else older calls become digests of blocks.

    A reader that crashes or times out on a file is replaced, and the file becomes an `UnreadableDump`.

    Raises:
        RuntimeError: a reader does not start.
    """
    todo = deque(files)
    count = min(readers or len(os.sched_getaffinity(0)), len(todo), 16)
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        running: set[_ReaderProcess] = set()
        stack.callback(lambda: [_stop_reader(reader) for reader in running])

        def start() -> None:
            reader = _start_reader(memory, full)
            running.add(reader)
            selector.register(_stdout(reader), selectors.EVENT_READ, reader)

        def drop(reader: _ReaderProcess) -> str:
            selector.unregister(_stdout(reader))
            running.discard(reader)
            how_it_ended = ": timed out" if reader.deadline < time.monotonic() else ""
            return how_it_ended + _stop_reader(reader, 0.0 if how_it_ended else _END_S)

        for _ in range(count):
            start()
        unread = len(todo)
        while unread:
            wait = max(0.0, min(60.0, *(reader.deadline - time.monotonic() for reader in running)))
            done = [key.data for key, _ in selector.select(wait)]
            lost = [reader for reader in running - set(done) if reader.deadline < time.monotonic()]
            for reader in done:
                alive = _receive(reader)
                for result in _parse_answers(reader, calls):
                    unread -= 1
                    yield result
                _send_files(reader, todo, file_s)
                if alive:
                    continue
                lost.append(reader)
            for reader in lost:
                how_it_ended = drop(reader)
                if not reader.ready:
                    raise RuntimeError(f"a process that reads dumps did not start{how_it_ended}")
                if reader.files:
                    unread -= 1
                    yield reader.files.popleft(), UnreadableDump(f"cannot be read{how_it_ended}")
                todo.extendleft(reversed(reader.files))
                if unread > sum(len(other.files) for other in running):
                    start()
            for reader in running:
                if reader.ready:
                    _send_files(reader, todo, file_s)


def _start_reader(memory: int, full: bool) -> _ReaderProcess:
    # -S -P: no site-packages and no current folder; the reader needs only the standard library and this package.
    environment = {**os.environ, "PYTHONPATH": str(Path(lockstep.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-S", "-P", "-m", "lockstep.watch.dumps.reader_process", str(memory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    return _ReaderProcess(process, time.monotonic() + _START_S, full)


def _stdout(reader: _ReaderProcess) -> int:
    assert reader.process.stdout is not None
    return reader.process.stdout.fileno()


def _send_files(reader: _ReaderProcess, todo: deque[DumpFile], file_s: float) -> None:
    """Sends files to a reader and sets its deadline."""
    assert reader.process.stdin is not None
    if not reader.ready:
        return
    while todo and len(reader.files) < _PREFETCH:
        reader.files.append(todo.popleft())
        request = [str(reader.files[-1].path.absolute()), reader.full]
        with contextlib.suppress(BrokenPipeError):  # detected when reading
            reader.process.stdin.write(json.dumps(request).encode() + b"\n")
            reader.process.stdin.flush()
    size = reader.files[0].size if reader.files else 0
    reader.deadline = time.monotonic() + file_s + size * _PER_BYTE_S if reader.files else float("inf")


def _receive(reader: _ReaderProcess) -> bool:
    """Receives the available data. Returns False at the end of the output."""
    data = os.read(_stdout(reader), 1 << 20)
    reader.received += data
    return bool(data)


def _parse_answers(reader: _ReaderProcess, calls: CallTexts) -> Iterator[tuple[DumpFile, RankTrace | UnreadableDump]]:
    """Parses the complete answers in the received data."""
    received = reader.received
    while len(received) >= ANSWER_HEADER.size:
        text_size, blob_size = ANSWER_HEADER.unpack_from(received)
        end = ANSWER_HEADER.size + text_size + blob_size
        if len(received) < end:
            return
        about = json.loads(received[ANSWER_HEADER.size : ANSWER_HEADER.size + text_size])
        blob = bytes(received[ANSWER_HEADER.size + text_size : end])
        del received[:end]
        if "ready" in about:
            reader.ready = True
        elif "error" in about:
            yield reader.files.popleft(), UnreadableDump(about["error"])
        else:
            calls.update((int(signature), tuple(call)) for signature, call in about.pop("calls"))
            yield reader.files.popleft(), unpack_trace(about, blob)


def _stop_reader(reader: _ReaderProcess, exit_s: float = 0.0) -> str:
    """Waits `exit_s` for a reader to exit, then kills it. Returns how it ended."""
    process = reader.process
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=exit_s)
    if process.returncode is None:
        process.kill()
    try:
        _, errors = process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        return ", and cannot be killed"
    lines = errors.decode(errors="replace").strip().splitlines()
    return f" (exit code {process.returncode})" + (f": {lines[-1][:300]}" if lines else "")


ReadDump = tuple[DumpFile, RankTrace | UnreadableDump]
ReadInFull = Callable[[Sequence[DumpFile]], Iterable[ReadDump]]


class NoDumps(ValueError):
    """The folder contains no readable dump; the message says what was searched for."""


def read_dumps(
    folder: Path, *, ranks: str | None = None, world_size: int | None = None, readers: int | None = None
) -> Evidence:
    """Builds evidence from the dumps below a folder. `Evidence.gaps` names unreadable files.

    Args:
        folder: a folder, or a single dump.
        ranks: a pattern that shows where the rank is in the files' paths, `host-*/trace.{rank}.pickle`; None recognises
            the usual names.
        world_size: the number of ranks of the job; None takes it from the dumps.
        readers: the number of reader processes; None means one per CPU.

    Raises:
        NoDumps: no file is a readable dump.
        ValueError: `ranks` has no `{rank}`.
    """
    if not folder.exists():
        raise NoDumps(f"{folder} does not exist")
    files = find_dump_files(folder, ranks)
    if not files:
        raise NoDumps(_no_dumps_text(folder, ranks))
    calls: CallTexts = {}
    dumps, gaps = _select_decided(
        read_traces(files, calls, readers=readers),
        lambda undecided: read_traces(undecided, calls, full=True, readers=readers),
    )
    if not dumps:
        raise NoDumps(f"none of the {len(files)} dumps in {folder} can be read: " + "; ".join(gaps[:5]))
    return build_dump_evidence(dumps, gaps, calls, world_size)


def _select_decided(read: Iterable[ReadDump], read_full: ReadInFull) -> tuple[list[RankDump], list[str]]:
    """One dump per rank, decoded in full where older calls may matter, and texts about the files left out."""
    dumps, gaps = select_dumps(read)
    undecided = [dump.file for dump in find_undecided(dumps)]
    if undecided:
        full_traces = {file.path: trace for file, trace in read_full(undecided)}
        dumps = [
            replace(dump, trace=trace) if isinstance(trace := full_traces.get(dump.file.path), RankTrace) else dump
            for dump in dumps
        ]
    return dumps, gaps


def _no_dumps_text(folder: Path, ranks: str | None) -> str:
    if ranks is not None:
        return f"no file in {folder} matches --ranks {ranks!r}"
    return (
        f"no flight-recorder dump in {folder}: searched for pickled or JSON dumps under any name "
        "(PyTorch's own are nccl_trace_rank_0, comm_lib_trace_rank_0, ...)"
    )


_MISSING_CONFIDENCE = 0.6
"""The highest confidence of a verdict about a rank without a dump."""
_MAX_CULPRITS = 4
"""The most culprits whose newest entry becomes a fact."""


def explain_dumps(folder: Path, *, ranks: str | None = None, world_size: int | None = None) -> list[Verdict]:
    """Diagnoses the dumps below a folder. Returns at least one verdict; the one that explains the others comes first.
    For arguments and errors see `read_dumps`."""
    return _judge_evidence(read_dumps(folder, ranks=ranks, world_size=world_size))


def judge_dumps(
    read: Iterable[ReadDump], read_full: ReadInFull, calls: CallTexts, world_size: int | None = None
) -> list[Verdict]:
    """Diagnoses dumps that are decoded already; `read_full` decodes those again whose older calls matter."""
    dumps, gaps = _select_decided(read, read_full)
    return _judge_evidence(build_dump_evidence(dumps, gaps, calls, world_size))


def _judge_evidence(evidence: Evidence) -> list[Verdict]:
    found = diagnose(evidence)
    return [_with_dump_facts(verdict, evidence) for verdict in found] or [no_stall_verdict(evidence)]


def no_stall_verdict(evidence: Evidence) -> Verdict:
    """The verdict if no stalled collective is found in the dumps."""
    read, missing = evidence.extra["files"], evidence.extra["missing"]
    of_all = "Every collective that was entered was completed by its members" if not missing else (
        "No collective is in flight on the ranks whose dumps could be read"
    )  # fmt: skip
    ranks = len(evidence.processes.info)
    return Verdict(
        VerdictKind.UNKNOWN,
        VerdictLevel.NOTICE,
        cause="unknown" if missing else "benign",
        confidence=0.3 if missing else 0.7,
        evidence=_gap_facts(evidence),
        explanation=f"{of_all}: {evidence.extra['entries']} entries in the dumps of {len(read)} of {ranks} ranks. "
        "Either the job continued while the dumps were written, or it waits for something other than a collective.",
        collect=(*_missing_dumps(evidence), "stacks of all ranks (py-spy dump)"),
    )


def _with_dump_facts(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Adds the newest entries of the culprits' dumps and the missing evidence to a verdict."""
    accused = {culprit.rank for culprit in verdict.culprits} & set(evidence.extra["accused"])
    own = [fact for fact in verdict.evidence if fact.source != "agent"]
    collect = (
        (*_missing_dumps(evidence), *verdict.collect)
        if verdict.kind is VerdictKind.UNKNOWN or accused
        else verdict.collect
    )
    confidence = min(verdict.confidence, _MISSING_CONFIDENCE) if accused else verdict.confidence
    facts = (*own, *_last_entries(verdict, evidence), *_gap_facts(evidence))
    return replace(verdict, confidence=confidence, evidence=facts, collect=tuple(dict.fromkeys(collect)))


def _missing_dumps(evidence: Evidence) -> tuple[str, ...]:
    missing = evidence.extra["missing"]
    return (f"the flight-recorder dump of {ranks_text(missing)}",) if missing else ()


def _gap_facts(evidence: Evidence) -> tuple[Fact, ...]:
    return tuple(Fact(gap, "dumps") for gap in evidence.gaps)


def _last_entries(verdict: Verdict, evidence: Evidence) -> Iterator[Fact]:
    """Yields the newest entry of each culprit, preferably on the verdict's communicator."""
    communicator_name = verdict.collective.communicator if verdict.collective else ""
    members, info = evidence.communicators, evidence.processes.info
    of_rank = {each.rank: at for at, each in enumerate(info)}
    names = [about.name for about in members.info]
    communicator = np.repeat(np.arange(len(names)), np.diff(members.starts))
    for culprit in verdict.culprits[:_MAX_CULPRITS]:
        process = -1 if culprit.rank is None else of_rank.get(culprit.rank, -1)
        rows = [row for row in np.flatnonzero(members.process == process).tolist() if evidence.extra["issued"][row] > 0]
        if not rows:
            continue
        row = max(rows, key=lambda row: (names[communicator[row]] == communicator_name, members.entered_at[row]))
        yield Fact(_entry_text(evidence, row, names[communicator[row]], info[process].rank),
                   file=evidence.extra["files"].get(culprit.rank, ""))  # fmt: skip


def _entry_text(evidence: Evidence, row: int, communicator: str, rank: int) -> str:
    members, calls = evidence.communicators, evidence.calls
    seq = int(evidence.extra["issued"][row])
    found = np.flatnonzero((calls.membership == row) & (calls.seq == seq))
    call = calls.by_signature.get(int(calls.signature[found[0]])) if len(found) else None
    site = calls.sites.get((row, seq), "")
    entered = members.entered_at[row]
    when = "" if np.isnan(entered) else time.strftime(", entered %Y-%m-%d %H:%M:%S", time.localtime(entered))
    ended = "completed" if members.completed[row] >= seq else "not completed"
    return (
        f"rank {rank}'s newest entry on '{communicator}' is {call.operation if call else 'collective'} #{seq}"
        f"{f' at {site}' if site else ''}, {ended}{when}"
    )
