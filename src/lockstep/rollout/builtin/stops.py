"""When a row has had enough: end-of-sequence tokens, length, stop strings."""

from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lockstep.data.samples import FinishReason
from lockstep.rollout.builtin.rows import Rows


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
        tails = self.tokenizer.batch_decode([self._tail(rows, row) for row in watched])
        return [
            row
            for row, tail in zip(watched, tails, strict=True)
            if any(stop in tail for stop in rows.requests[row].stop)
        ]

    @staticmethod
    def _tail(rows: Rows, row: int) -> list[int]:
        # A token writes at least one byte, bar special ones; some more tokens cover for those.
        reach = max(len(stop.encode()) for stop in rows.requests[row].stop) + 8
        count = int(rows.counts[row])
        return list(rows.tokens[row, max(0, count - reach) : count].tolist())


def eos_tokens(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    """Every token that ends a sequence: the tokenizer's and those of the model's generation config."""
    found: set[int] = set()
    for source in (tokenizer, generation):
        value: Any = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(int(token) for token in found)
