"""When a row has had enough: end-of-sequence tokens, length, stop strings."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.data.samples import FinishReason
from lockstep.rollout.builtin.rows import Rows
from lockstep.rollout.stops import reach, written


class Stops:
    """Judges the rows after each token. A stop string, once written, stays in the completion."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos = eos

    def finished(self, rows: Rows) -> dict[int, FinishReason]:
        """Rows that end with their last token, and why."""
        count = len(rows)
        last = rows.last[:count]
        stopped = np.zeros(count, bool)
        for token in self.eos:
            stopped |= last == token
        stopped &= ~rows.ignore_eos[:count]
        full = rows.counts[:count] >= rows.limit[:count]
        ended: dict[int, FinishReason] = {int(row): "length" for row in np.flatnonzero(full)}
        ended.update(dict.fromkeys(self._written(rows), "stop"))
        ended.update({int(row): "stop" for row in np.flatnonzero(stopped)})
        return ended

    def _written(self, rows: Rows) -> list[int]:
        """Rows whose tail holds one of their stop strings."""
        watched = [int(row) for row in np.flatnonzero(rows.watched[: len(rows)])]
        if not watched:
            return []
        stops = [rows.requests[row].stop for row in watched]
        tails = [self._tail(rows, row) for row in watched]
        hits = written(self.tokenizer, tails, stops)
        return [row for row, hit in zip(watched, hits, strict=True) if hit]

    @staticmethod
    def _tail(rows: Rows, row: int) -> list[int]:
        count = int(rows.counts[row])
        return list(rows.tokens[row, max(0, count - reach(rows.requests[row].stop)) : count].tolist())
