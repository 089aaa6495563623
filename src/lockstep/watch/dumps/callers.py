"""Which line of the user's called: from the stacks of entries. Imports the standard library only."""

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen|/torch/(?:distributed|nn|_)|^\?\?$")
_FRAME_LINE = re.compile(r"#\d+ (?P<name>.+) from (?P<filename>.+):(?P<line>\d+)")
_FRAMES = itemgetter("frames")
_MOST_TEXT = 300


class Sites:
    """Call sites, each once. Frames of a dump are shared, so who was asked before is known by identity."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._by_identity: dict[tuple[int, ...], int] = {}

    def of(self, entries: Sequence[Mapping[str, Any]]) -> list[int]:
        """The number of the call site of each entry, 0 where the dump has no stacks."""
        try:
            stacks = list(map(_FRAMES, entries))
        except KeyError:
            stacks = [entry.get("frames") for entry in entries]
        known, places = self._by_identity, []
        for stack in stacks:
            key = tuple(map(id, stack)) if type(stack) is list else (id(stack),)
            place = known.get(key)
            if place is None:
                place = known[key] = self._number(site(_frames(stack)))
            places.append(place)
        return places

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


def text_of(value: Any) -> str:
    """A text as it is, bounded; nothing for anything else."""
    return value[:_MOST_TEXT] if isinstance(value, str) else ""


def _frames(frames: Any) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first, of dicts or of the text that torch makes of them."""
    if isinstance(frames, str):
        return [(m["filename"], int(m["line"]), m["name"]) for m in _FRAME_LINE.finditer(frames[: 2**16])]
    found = []
    for frame in frames[:200] if isinstance(frames, list | tuple) else ():
        if isinstance(frame, str):
            found += _frames(frame)
        elif isinstance(frame, dict):
            line = frame.get("line", 0)
            found.append((text_of(frame.get("filename")), line if type(line) is int else 0, text_of(frame.get("name"))))
    return found


def site(frames: Sequence[tuple[str, int, str]]) -> str:
    """`train.py:31 in step`: the innermost frame that is in no library, else the innermost outside of torch."""
    ours = [frame for frame in frames if frame[0] and not _LIBRARY.search(frame[0])]
    beyond = [frame for frame in frames if frame[0] and "/torch/" not in frame[0]]
    for file, line, function in (ours or beyond or frames)[:1]:
        return f"{file.rpartition('/')[2]}:{line} in {function}"[:_MOST_TEXT]
    return ""
