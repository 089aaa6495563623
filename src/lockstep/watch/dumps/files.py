"""Which files of a folder are dumps, and of which rank."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.watch.dumps.trace import MOST_RANKS

_HEAD = 4096
_DEPTH = 6
"""Of folders below the one given: torchrun's are four deep (run, attempt, rank, file)."""
_MOST = 100_000
_KEYS = (b"pg_config", b"pg_status", b"collective_seq_id", b"comm_lib_version", b"nccl_comm_state", b"nccl_version",
         b"profiling_name")  # fmt: skip
"""One of them is in the first bytes of every dump, pickled or JSON, of every version."""
_NAMED = re.compile(r"(?:trace|dump|flight|recorder|rank|nccl|fr)", re.IGNORECASE)

_RANK = (
    re.compile(r"(?<![a-z])(?:global[_-]?)?rank[_=.-]?(\d+)", re.IGNORECASE),
    re.compile(r"(\d+)$"),
)
"""In the name without its suffix: where the word stands, then a number at the end."""
_FOLDER_RANK = re.compile(r"(?:^|(?<![a-z])rank[_=.-]?)(\d+)$", re.IGNORECASE)
_SUFFIXES = {".pickle", ".pkl", ".json", ".bin", ".dump", ".trace", ".pt", ".txt", ".log", ".out", ".dat"}


@dataclass(frozen=True, slots=True)
class Found:
    """A file that may be a dump."""

    path: Path
    rank: int | None
    size: int
    modified: float


def find(folder: Path, pattern: str | None = None) -> list[Found]:
    """The dumps below a folder, or the one file itself, in the order of their names.

    `pattern` says where the rank stands in a file's path below the folder: `host-*/fr.{rank}.bin`; files that it does
    not fit are left out. Without it the usual names are understood. Symbolic links are not followed.

    Raises:
        ValueError: The pattern has no `{rank}`.
    """
    expression = None if pattern is None else _expression(pattern)
    found = []
    for path in [folder] if folder.is_file() else _files(folder):
        stat = path.stat()
        name = path.name if path == folder else path.relative_to(folder).as_posix()
        if expression is not None:
            match = expression.fullmatch(name) or expression.fullmatch(path.name)
            if match:
                found.append(Found(path, _rank(match["rank"]), stat.st_size, stat.st_mtime))
        elif _is_dump(path, stat.st_size):
            found.append(Found(path, rank_of(name), stat.st_size, stat.st_mtime))
    return found


def rank_of(name: str) -> int | None:
    """The rank that a path (below the folder that was given) speaks of: `nccl_trace_rank_3`, `trace_3`,
    `rank3.pickle`, `attempt_0/3/fr.pickle`."""
    *folders, last = name.split("/")
    stem = last
    while (dot := stem.rfind(".")) > 0 and stem[dot:].lower() in _SUFFIXES:
        stem = stem[:dot]
    for expression in _RANK:
        if match := expression.search(stem):
            return _rank(match[1])
    for folder in reversed(folders):
        if match := _FOLDER_RANK.search(folder):
            return _rank(match[1])
    return None


def _rank(digits: str) -> int | None:
    """A number that no job has ranks for is a date or a process."""
    return int(digits) if len(digits) <= 7 and int(digits) < MOST_RANKS else None


def _expression(pattern: str) -> re.Pattern[str]:
    if pattern.count("{rank}") != 1:
        raise ValueError(f"ranks={pattern!r}: say once where the rank stands, like 'trace-{{rank}}.pickle'")
    parts = [re.escape(part).replace(r"\*", r"[^/]*").replace(r"\?", ".") for part in pattern.split("{rank}")]
    return re.compile(r"(?P<rank>\d{1,7})".join(parts))


def _files(folder: Path) -> Iterator[Path]:
    """Regular files, at most `_DEPTH` folders deep, sorted."""
    seen = 0
    folders = [(folder, 0)]
    while folders:
        here, depth = folders.pop()
        try:
            inside = sorted(here.iterdir())
        except OSError:
            continue
        inside = [path for path in inside if not path.is_symlink()]
        if depth < _DEPTH:
            folders += [(path, depth + 1) for path in reversed(inside) if path.is_dir()]
        for path in inside:
            if path.is_file():
                seen += 1
                if seen > _MOST:
                    raise ValueError(f"{folder} has more than {_MOST} files: give the folder that holds the dumps")
                yield path


def _is_dump(path: Path, size: int) -> bool:
    """By its first bytes; an empty file by its name."""
    if size == 0:
        return bool(_NAMED.search(path.stem)) and path.suffix.lower() in {"", ".pickle", ".pkl", ".json"}
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return bool(_NAMED.search(path.name))
    if head.startswith(b"\x80"):
        return any(key in head for key in _KEYS) or bool(_NAMED.search(path.name))
    return head.startswith((b"{", b"[")) and any(key in head for key in _KEYS)
