"""Selects the lines worth parsing: searches large blocks for all literals of the knowledge base in one pass.

`python -m benchmarks.log_reading` compares libraries. On one core, ahocorasick_rs searches 440 MB/s for 400 or 3000
texts, pyahocorasick 70, hyperscan 1300 to 2000; google-re2 cannot build its automaton for 800 texts and needs minutes.
We use ahocorasick_rs: it is small, has wheels for every platform of torch, and builds its automaton in milliseconds.
Hyperscan is faster, but the rest of the pipeline dominates; it has no wheels for Arm and only a subset of Python's
patterns.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from ahocorasick_rs import AhoCorasick, BytesAhoCorasick, Implementation, MatchKind

from lockstep.doctor.logs.log_lines import MAX_LINE_CHARS, Page


class Prefilter:
    """Finds lines that contain one of several texts, ignoring ASCII case."""

    def __init__(self, texts: Collection[str]) -> None:
        self._texts = sorted({each.lower() for each in texts})
        self._blocks: Any = BytesAhoCorasick(
            [each.encode() for each in self._texts],
            matchkind=MatchKind.LeftmostFirst,
            implementation=Implementation.DFA,
        )
        self._lines: Any = AhoCorasick(self._texts)

    def candidates(self, page: Page) -> Iterator[tuple[int, int, int]]:
        """Yields line number, first and last byte of each part of a line that contains a text.

        A line has several parts if it was rewritten with `\\r`.
        """
        data = page.data
        number, line, end, last = page.first, 0, -1, -1
        newlines = np.frombuffer(data, np.uint8) == ord("\n")
        for _, at, _ in self._blocks.find_matches_as_indexes(data.lower()):
            if at < last:
                continue
            if at >= end:
                start = data.rfind(b"\n", max(end, 0), at) + 1 or line
                number += int(np.count_nonzero(newlines[line:start]))
                line, last, end = start, start, data.find(b"\n", at)
                end = len(data) if end < 0 else end
            start = max(line, data.rfind(b"\r", last, at) + 1)
            last = data.find(b"\r", at, end)
            last = end if last < 0 else last
            yield number, start, last

    def texts(self, line: str) -> tuple[str, ...]:
        """Returns all texts that a line contains, in the order of the line, so that equal logs have equal answers."""
        low = line[:MAX_LINE_CHARS].lower()
        found = self._lines.find_matches_as_indexes(low, overlapping=True)
        return tuple(dict.fromkeys(self._texts[each] for each, _, _ in found))
