"""Parses flight-recorder dumps safely: restricted pickle, JSON, entries of every version, stacks.

A dump holds dicts, lists, tuples, strings and numbers. The unpickler refuses a pickle that names a class or a
function, so a dump can execute no code. The process that reads dumps (`reader_process`) limits memory and time,
because a hostile pickle of a few bytes can need gigabytes. This module imports only the standard library.
"""

import io
import json
import marshal
import pickle
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NoReturn

_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen|/torch/(?:distributed|nn|_)|^\?\?$")
_FRAME_LINE = re.compile(r"#\d+ (?P<name>.+) from (?P<filename>.+):(?P<line>\d+)")
_FRAMES = itemgetter("frames")
_MAX_SITE_CHARS = 300


class DumpCallSites:
    """Numbers call sites. The entries of a dump share frame objects, so known stacks are recognised by identity."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._by_identity: dict[tuple[int, ...], int] = {}

    def of(self, entries: Sequence[Mapping[str, Any]]) -> list[int]:
        """The number of each entry's call site, 0 if the dump has no stacks."""
        try:
            stacks = list(map(_FRAMES, entries))
        except KeyError:
            stacks = [entry.get("frames") for entry in entries]
        known, sites = self._by_identity, []
        for stack in stacks:
            key = tuple(map(id, stack)) if type(stack) is list else (id(stack),)
            site_number = known.get(key)
            if site_number is None:
                site_number = known[key] = self._number(user_call_site(_parse_frames(stack)))
            sites.append(site_number)
        return sites

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


def bounded_text(value: Any) -> str:
    """The text, cut to the maximum length; empty if the value is no text."""
    return value[:_MAX_SITE_CHARS] if isinstance(value, str) else ""


def _parse_frames(frames: Any) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first, from dicts or from torch's text of them."""
    if isinstance(frames, str):
        return [(m["filename"], int(m["line"]), m["name"]) for m in _FRAME_LINE.finditer(frames[: 2**16])]
    found = []
    for frame in frames[:200] if isinstance(frames, list | tuple) else ():
        if isinstance(frame, str):
            found += _parse_frames(frame)
        elif isinstance(frame, dict):
            line = frame.get("line", 0)
            found.append(
                (bounded_text(frame.get("filename")), line if type(line) is int else 0, bounded_text(frame.get("name")))
            )
    return found


def user_call_site(frames: Sequence[tuple[str, int, str]]) -> str:
    """`train.py:31 in step`: the innermost frame outside libraries, else the innermost outside torch."""
    ours = [frame for frame in frames if frame[0] and not _LIBRARY.search(frame[0])]
    beyond = [frame for frame in frames if frame[0] and "/torch/" not in frame[0]]
    for file, line, function in (ours or beyond or frames)[:1]:
        return f"{file.rpartition('/')[2]}:{line} in {function}"[:_MAX_SITE_CHARS]
    return ""


MAX_RANKS = 1 << 17
"""No job has more ranks; a dump with larger numbers is rejected."""


class NotADump(ValueError):
    """The file is no dump, or is damaged; the message says why."""


_PEEK_BYTES = 1 << 17
"""The unpickler never peeks at more bytes."""


class UnpickleRefused(pickle.UnpicklingError):
    """The pickle contains objects other than containers, texts and numbers."""


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise UnpickleRefused(f"asks for {module}.{name}, which no dump of the flight recorder does")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise UnpickleRefused("asks for a persistent object, which no dump of the flight recorder does")


def loads_restricted(data: bytes) -> Any:
    """Unpickles plain data.

    Raises:
        UnpickleRefused: the pickle contains objects that are not plain data.

    Truncated or damaged input may raise any of `DAMAGED_INPUT_ERRORS`.
    """
    # The C unpickler reads a file opcode by opcode, unless it can peek: four times as slow.
    return _RestrictedUnpickler(io.BufferedReader(io.BytesIO(data), _PEEK_BYTES)).load()


DAMAGED_INPUT_ERRORS = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
    MemoryError, RecursionError, UnicodeError,
)  # fmt: skip
"""Errors that a damaged dump may raise."""


_P2P_OPERATIONS = ("send", "recv")
MAX_TEXT_CHARS = 300
_HEAD_BYTES = 4096


def parse_dump(data: bytes) -> Any:
    """The content of a dump, pickled or JSON.

    Raises:
        NotADump: Empty, truncated or damaged.
    """
    start = data[:_HEAD_BYTES].lstrip()
    if not start.strip(b"\0"):
        raise NotADump("is empty")
    try:
        return json.loads(data) if start[:1] in b"{[" else loads_restricted(data)
    except DAMAGED_INPUT_ERRORS as error:
        what = str(error) or type(error).__name__
        raise NotADump(f"is truncated or damaged: {what[:MAX_TEXT_CHARS]}") from error


def normalize_entry(entry: Any) -> dict[str, Any] | None:
    """Converts an entry of any version to the current version; None if required fields are missing."""
    if not isinstance(entry, dict):
        return None
    group = entry.get("process_group", entry.get("pg_name"))
    pair = (group, "") if isinstance(group, str) else tuple(group) if isinstance(group, list | tuple) else ()
    if not pair:
        pair = (str(entry.get("pg_id", "")), "")
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    name, created = entry.get("profiling_name"), entry.get("time_created_ns", 0)
    texts = len(pair) == 2 and all(type(part) is str for part in (*pair, name))
    if not texts or type(sequence) is not int or type(created) is not int or not 0 <= sequence < 2**62:
        return None
    if not -(2**62) < created < 2**62:
        return None
    operation = str(name).partition(":")[2]
    lists: dict[str, Any] = {key: entry.get(key) if isinstance(entry.get(key), list | tuple) else [] for key in
             ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")}  # fmt: skip
    try:
        marshal.dumps(list(lists.values()), 2)
    except ValueError:
        return None
    return entry | lists | {
        "process_group": pair, "collective_seq_id": sequence, "time_created_ns": created,
        "state": entry.get("state"), "retired": bool(entry.get("retired")),
        "is_p2p": bool(entry.get("is_p2p", operation.startswith(_P2P_OPERATIONS))),
    }  # fmt: skip
