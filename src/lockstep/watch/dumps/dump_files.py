"""Finds the flight-recorder dumps in a folder and selects one per rank, all of the same run."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.watch.dumps.dump_parser import MAX_RANKS
from lockstep.watch.dumps.traces import RankTrace

_HEAD = 4096
_MAX_DEPTH = 6
"""The deepest folder level that is searched; torchrun's dumps are four levels deep (run, attempt, rank, file)."""
_MAX_FILES = 100_000
_DUMP_KEYS = (
    b"pg_config", b"pg_status", b"collective_seq_id", b"comm_lib_version", b"nccl_comm_state", b"nccl_version",
    b"profiling_name",
)  # fmt: skip
"""Every dump, pickled or JSON, of any version, has one of these keys in its first bytes."""
_LIKELY_NAME = re.compile(r"(?:trace|dump|flight|recorder|rank|nccl|fr)", re.IGNORECASE)

_RANK = (
    re.compile(r"(?<![a-z])(?:global[_-]?)?rank[_=.-]?(\d+)", re.IGNORECASE),
    re.compile(r"(\d+)$"),
)
"""Patterns for the rank in a file name without suffixes: a number after the word `rank`, else a number at the end."""
_FOLDER_RANK = re.compile(r"(?:^|(?<![a-z])rank[_=.-]?)(\d+)$", re.IGNORECASE)
_SUFFIXES = {".pickle", ".pkl", ".json", ".bin", ".dump", ".trace", ".pt", ".txt", ".log", ".out", ".dat"}


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A file that may be a dump."""

    path: Path
    rank: int | None
    size: int
    modified: float


def find_dump_files(folder: Path, pattern: str | None = None) -> list[DumpFile]:
    """Finds the dumps below a folder, ordered by name; `folder` may also be a file.

    `pattern` matches a file's path below the folder and shows where the rank is: `host-*/fr.{rank}.bin`. Files that do
    not match are left out. Without a pattern, the usual names are recognised. Symbolic links are not followed.

    Raises:
        ValueError: the pattern has no `{rank}`.
    """
    expression = None if pattern is None else _compile_pattern(pattern)
    found = []
    for path in [folder] if folder.is_file() else _files(folder):
        stat = path.stat()
        name = path.name if path == folder else path.relative_to(folder).as_posix()
        if expression is not None:
            match = expression.fullmatch(name) or expression.fullmatch(path.name)
            if match:
                found.append(DumpFile(path, _valid_rank(match["rank"]), stat.st_size, stat.st_mtime))
        elif _is_dump(path, stat.st_size):
            found.append(DumpFile(path, rank_in_path(name), stat.st_size, stat.st_mtime))
    return found


def rank_in_path(name: str) -> int | None:
    """The rank in a path relative to the given folder: `nccl_trace_rank_3`, `trace_3`, `rank3.pickle`,
    `attempt_0/3/fr.pickle`."""
    *folders, last = name.split("/")
    stem = last
    while (dot := stem.rfind(".")) > 0 and stem[dot:].lower() in _SUFFIXES:
        stem = stem[:dot]
    for expression in _RANK:
        if match := expression.search(stem):
            return _valid_rank(match[1])
    for folder in reversed(folders):
        if match := _FOLDER_RANK.search(folder):
            return _valid_rank(match[1])
    return None


def _valid_rank(digits: str) -> int | None:
    """The number as a rank; None if it is too large to be one (dates, process ids)."""
    return int(digits) if len(digits) <= 7 and int(digits) < MAX_RANKS else None


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    if pattern.count("{rank}") != 1:
        raise ValueError(f"ranks={pattern!r} must contain {{rank}} exactly once, like 'trace-{{rank}}.pickle'")
    parts = [re.escape(part).replace(r"\*", r"[^/]*").replace(r"\?", ".") for part in pattern.split("{rank}")]
    return re.compile(r"(?P<rank>\d{1,7})".join(parts))


def _files(folder: Path) -> Iterator[Path]:
    """Yields the regular files at most `_MAX_DEPTH` folders deep, sorted."""
    seen = 0
    folders = [(folder, 0)]
    while folders:
        current, depth = folders.pop()
        try:
            paths = sorted(current.iterdir())
        except OSError:
            continue
        paths = [path for path in paths if not path.is_symlink()]
        if depth < _MAX_DEPTH:
            folders += [(path, depth + 1) for path in reversed(paths) if path.is_dir()]
        for path in paths:
            if path.is_file():
                seen += 1
                if seen > _MAX_FILES:
                    raise ValueError(f"{folder} has more than {_MAX_FILES} files: give the folder that holds the dumps")
                yield path


def _is_dump(path: Path, size: int) -> bool:
    """Whether a file looks like a dump, by its first bytes; by its name if it is empty."""
    if size == 0:
        return bool(_LIKELY_NAME.search(path.stem)) and path.suffix.lower() in {"", ".pickle", ".pkl", ".json"}
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return bool(_LIKELY_NAME.search(path.name))
    if head.startswith(b"\x80"):
        return any(key in head for key in _DUMP_KEYS) or bool(_LIKELY_NAME.search(path.name))
    return head.startswith((b"{", b"[")) and any(key in head for key in _DUMP_KEYS)


@dataclass(slots=True)
class UnreadableDump:
    """A file that could not be read, and why."""

    why: str


DEFAULT_TIMEOUT_S = 1800.0
"""The longest of torch's default time-outs (gloo's and the store's; NCCL's is 600 s)."""
_MAX_NAMED = 8
"""The most ranks that a sentence names."""


@dataclass(frozen=True, slots=True)
class RankDump:
    """The dump of a rank."""

    rank: int
    file: DumpFile
    trace: RankTrace

    @property
    def taken_at(self) -> float:
        """When the dump was taken, in Unix seconds: when its file was written, but not before its newest entry."""
        newest = self.trace.newest
        return self.file.modified if math.isnan(newest) else max(newest, self.file.modified)


def select_dumps(results: Iterable[tuple[DumpFile, RankTrace | UnreadableDump]]) -> tuple[list[RankDump], list[str]]:
    """Selects one dump per rank, of the newest run, ordered by rank. Also returns texts about the files left out."""
    gaps: list[str] = []
    by_rank: dict[int, list[RankDump]] = defaultdict(list)
    versions: dict[str, list[int]] = defaultdict(list)
    for file, trace in sorted(results, key=lambda result: str(result[0].path)):
        if isinstance(trace, UnreadableDump):
            rank_note = "" if file.rank is None else f" (rank {file.rank})"
            gaps.append(f"{file.path.name}{rank_note} {trace.why}")
        elif file.rank is None:
            gaps.append(f"{file.path.name}: its name has no rank; use --ranks to specify where the rank is")
        else:
            by_rank[file.rank].append(RankDump(file.rank, file, trace))
            gaps += [f"{file.path.name} (rank {file.rank}): {note}" for note in trace.notes]
    chosen = []
    for rank, dumps in sorted(by_rank.items()):
        best = max(dumps, key=_preference)
        chosen.append(best)
        versions[best.trace.version or "unknown"].append(rank)
        if len(dumps) > 1:
            gaps.append(f"rank {rank} has {len(dumps)} dumps: read {best.file.path.name}, the newest and fullest")
    if len(versions) > 1:
        gaps.append("dumps of several versions: " + ", ".join(f"{v} of {ranks_text(r)}" for v, r in versions.items()))
    return _newest_run(chosen, gaps), gaps


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`, `ranks 0, 1, ... (512 in all)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= _MAX_NAMED:
        return "ranks " + ", ".join(map(str, ranks))
    return "ranks " + ", ".join(map(str, ranks[: _MAX_NAMED - 2])) + f", ... ({len(ranks)} in all)"


def _preference(dump: RankDump) -> tuple[float, bool, int, bool, float]:
    """The sort key of dumps of one rank: newer is better; of equally new ones, more complete is better."""
    trace = dump.trace
    newest = -math.inf if math.isnan(trace.newest) else trace.newest
    return newest, trace.complete, trace.entries, len(trace.sites) > 1, dump.file.modified


def _newest_run(dumps: list[RankDump], gaps: list[str]) -> list[RankDump]:
    """Drops dumps of earlier runs: those written before the newest run began, and those whose newest entry is older
    than its beginning by more than the time-out. A rank may get stuck before another one begins, but not by more."""
    began = max((dump.trace.began for dump in dumps if not math.isnan(dump.trace.began)), default=math.nan)
    if math.isnan(began):
        return dumps
    kept = []
    for dump in dumps:
        timeout = dump.trace.timeout_s if dump.trace.timeout_s > 0 else DEFAULT_TIMEOUT_S
        if dump.trace.newest < began and (dump.taken_at < began or dump.trace.newest + timeout < began):
            ago = began - dump.trace.newest
            gaps.append(f"{dump.file.path.name} (rank {dump.rank}) is of an earlier run: its last entry is {ago:.0f} s "
                        "older than the first of the newest run; left out")  # fmt: skip
        else:
            kept.append(dump)
    return kept
