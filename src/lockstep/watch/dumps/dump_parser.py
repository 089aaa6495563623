"""Parses flight-recorder dumps safely: pickle without classes, JSON, entries of every version, stacks.

A dump consists of dicts, lists, tuples, strings and numbers. The unpickler refuses any pickle that names a class or a
function, so a dump cannot execute code. A hostile pickle of a few bytes can need gigabytes, so `reader_process` limits
memory and time. This module imports only the standard library.
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
    """Numbers the call sites of a dump. Its entries share frame objects, so known stacks are recognised by identity."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._by_identity: dict[tuple[int, ...], int] = {}

    def of(self, entries: Sequence[Mapping[str, Any]]) -> list[int]:
        """The number of each entry's call site; 0 without a stack."""
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
    """The text, cut to the maximum length; empty if the value is not a string."""
    return value[:_MAX_SITE_CHARS] if isinstance(value, str) else ""


def _parse_frames(frames: Any) -> list[tuple[str, int, str]]:
    """Parses frames, innermost first, into (file, line, function). Frames are dicts or torch's text."""
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
    """`train.py:31 in step`: the innermost frame outside of libraries, else the innermost one outside of torch."""
    outside_libraries = [frame for frame in frames if frame[0] and not _LIBRARY.search(frame[0])]
    outside_torch = [frame for frame in frames if frame[0] and "/torch/" not in frame[0]]
    for file, line, function in (outside_libraries or outside_torch or frames)[:1]:
        return f"{file.rpartition('/')[2]}:{line} in {function}"[:_MAX_SITE_CHARS]
    return ""


MAX_RANKS = 1 << 17
"""No job has more ranks; larger numbers are not ranks."""


class NotADump(ValueError):
    """The file is not a dump, or is damaged; the message is a verb phrase that says why."""


_PEEK_BYTES = 1 << 17
"""More bytes than the unpickler ever peeks at."""


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
    # If the C unpickler cannot peek, it reads the file opcode by opcode, which takes four times as long.
    return _RestrictedUnpickler(io.BufferedReader(io.BytesIO(data), _PEEK_BYTES)).load()


DAMAGED_INPUT_ERRORS = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
    MemoryError, RecursionError, UnicodeError,
)  # fmt: skip
"""Errors that reading a damaged dump may raise."""


_P2P_OPERATIONS = ("send", "recv")
MAX_TEXT_CHARS = 300
_HEAD_BYTES = 4096


def parse_dump(data: bytes) -> Any:
    """Parses a dump, pickled or JSON.

    Raises:
        NotADump: the dump is empty, truncated or damaged.
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
    name_and_description = (
        (group, "") if isinstance(group, str) else tuple(group) if isinstance(group, list | tuple) else ()
    )
    if not name_and_description:
        name_and_description = (str(entry.get("pg_id", "")), "")
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    name, created = entry.get("profiling_name"), entry.get("time_created_ns", 0)
    has_texts = len(name_and_description) == 2 and all(type(part) is str for part in (*name_and_description, name))
    if not has_texts or type(sequence) is not int or type(created) is not int or not 0 <= sequence < 2**62:
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
        "process_group": name_and_description, "collective_seq_id": sequence, "time_created_ns": created,
        "state": entry.get("state"), "retired": bool(entry.get("retired")),
        "is_p2p": bool(entry.get("is_p2p", operation.startswith(_P2P_OPERATIONS))),
    }  # fmt: skip
