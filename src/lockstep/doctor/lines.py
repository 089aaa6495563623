"""Bytes become pages of whole lines, and bytes of a line become text.

A line ends at `\\n`, and lines are numbered as `text.split("\\n")` counts them, from 1. A progress bar rewrites its
line with `\\r`, a whole run long: that stays one line, of which the parts are looked at one by one.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

LONGEST = 16 << 10
"""Characters of a line, or of a part of it, that are looked at; the rest of a longer one is cut."""
PARTS = 6
"""Of a line that `\\r` rewrites many times, the first and the last so many parts are looked at for counters."""
_NEWLINE = ord("\n")
AHEAD = 64 << 10
"""Bytes of the next page that are at hand, for tracebacks that go over the edge."""
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


@dataclass(frozen=True, slots=True)
class Page:
    """Whole lines of a source.

    Attributes:
        data: The lines.
        first: Number of the first line.
        after: Up to `AHEAD` bytes of what follows.
        newlines: How many the page has.
    """

    data: bytes
    first: int
    after: bytes = b""
    newlines: int = 0

    def onwards(self, start: int) -> bytes:
        """From a byte on, as far as a traceback may reach."""
        data = self.data[start : start + AHEAD]
        return data if len(data) == AHEAD else data + self.after


def pages(blocks: Iterable[bytes]) -> Iterator[Page]:
    """The lines of a stream, each in exactly one page; UTF-16 and UTF-32 with a byte order mark become UTF-8."""
    held: list[bytes | memoryview] = []
    waiting, number = b"", 1
    for block in _utf8(blocks):
        end = block.rfind(b"\n") + 1
        if not end and sum(map(len, held)) < LONGEST * 256:
            held.append(block)
            continue
        end = end or block.rfind(b"\r") + 1 or len(block)
        page = b"".join((*held, memoryview(block)[:end]))
        held = [block[end:]]
        if waiting:
            newlines = count(waiting)
            yield Page(waiting, number, page[:AHEAD], newlines)
            number += newlines
        waiting = page
    rest = b"".join(held)
    if waiting:
        newlines = count(waiting)
        yield Page(waiting, number, rest[:AHEAD], newlines)
        number += newlines
    if rest:
        yield Page(rest, number, b"", count(rest))


def count(data: bytes) -> int:
    """Newlines; several times as fast as `bytes.count` where lines are short."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == _NEWLINE))


def _utf8(blocks: Iterable[bytes]) -> Iterator[bytes]:
    stream = iter(blocks)
    head = next(stream, b"")
    name = ""
    for mark, encoding in ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
                           (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):  # fmt: skip
        if head.startswith(mark):
            name = encoding
            break
    if not name:
        yield head
        yield from stream
        return
    decoder = codecs.getincrementaldecoder(name)(errors="replace")
    yield decoder.decode(head).encode()
    for block in stream:
        yield decoder.decode(block).encode()
    yield decoder.decode(b"", final=True).encode()


def text(raw: bytes) -> str:
    """A line, or a part of one, as characters: escapes and control characters removed."""
    said = raw[: LONGEST * 2].decode("utf-8", "replace")[:LONGEST]
    if "\x1b" in said:
        said = _ESCAPES.sub("", said)
    if not said.isprintable():
        said = _CONTROLS.sub("", said)
    return said


def parts(raw: bytes) -> Sequence[bytes]:
    """What a line showed one after the other, where `\\r` rewrites it; of many the first and the last `PARTS`."""
    if b"\r" not in raw:
        return (raw,)
    found = [each for each in raw.split(b"\r") if each]
    return (found if len(found) <= 2 * PARTS else [*found[:PARTS], *found[-PARTS:]]) or (b"",)


_NARROWEST, _WIDEST, _CUTS = 60, 400, 3
_DIGITS = re.compile(r"\d+")


def wrapped_at(head: str) -> int:
    """The width at which a terminal or a mail has broken the lines of a file; 0 where they are whole.

    No line is longer then, and several that say different things are just as long and end within a word.
    """
    lines = head.split("\n")
    width = max(map(len, lines))
    if "\r" in head.replace("\r\n", "") or not _NARROWEST <= width <= _WIDEST:
        return 0
    cut = [one for one, other in pairwise(lines) if len(one) == width and one[-1].isalnum() and other[:1].isalnum()]
    return width if len({_DIGITS.sub("#", each)[:_NARROWEST] for each in cut}) >= _CUTS else 0


def unwrapped(page: Page, width: int) -> Page:
    """Broken lines put together; empty ones follow in place of their parts, so that all others keep their numbers."""
    whole: list[bytes] = []
    left, broken = 0, False
    for line in page.data.split(b"\n"):
        if broken:
            whole[-1] += line
            left += 1
        else:
            whole += [*[b""] * left, line]
            left = 0
        broken = len(line.decode("utf-8", "replace")) == width
    return replace(page, data=b"\n".join([*whole, *[b""] * left]))


def shown(said: str, at: int = 0, most: int = 400) -> str:
    """Of a line what evidence cites: `most` characters, those around `at` where that is far behind."""
    if len(said) > most:
        begin = 0 if at < most * 3 // 4 else at - most // 4
        said = said[begin : begin + most]
    return said.strip()


def numbered(page: Page, most: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line of a page, or of its first `most` bytes."""
    at, number = 0, page.first
    stop = len(page.data) if most is None else min(most, len(page.data))
    while at < stop:
        end = page.data.find(b"\n", at)
        end = len(page.data) if end < 0 else end
        yield number, page.data[at:end]
        at, number = end + 1, number + 1
