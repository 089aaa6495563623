"""The rows that are being decoded: one per running request, dense, state in arrays."""

import numpy as np
import torch

from lockstep.data.samples import Completion, FinishReason
from lockstep.rollout.builtin.sampler import SamplingRows
from lockstep.rollout.protocol import Request

_INT, _FLOAT = np.int64, np.float32


class Rows:
    """State of the running rows; row `i` of every array belongs to `requests[i]`.

    What a forward needs of a row is its last token; the prompt's last token stands for it before the first one
    is generated (the prompt's other tokens are prefilled).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.requests: list[Request] = []
        self.group = np.zeros(capacity, _INT)
        """Slot of the row's group."""
        self.counts = np.zeros(capacity, _INT)
        """Tokens generated."""
        self.last = np.zeros(capacity, _INT)
        self.limit = np.zeros(capacity, _INT)
        self.ignore_eos = np.zeros(capacity, bool)
        self.watched = np.zeros(capacity, bool)
        """Whether the row has stop strings."""
        self.seed = np.zeros(capacity, _INT)
        self.temperature = np.ones(capacity, _FLOAT)
        self.top_p = np.ones(capacity, _FLOAT)
        self.top_k = np.zeros(capacity, _INT)
        self.min_p = np.zeros(capacity, _FLOAT)
        self.tokens = np.zeros((capacity, 64), np.int32)
        self.logprobs = np.zeros((capacity, 64), np.float32)
        self.versions = np.zeros((capacity, 64), np.int32)
        self.changed = True
        """Set when rows entered, left or moved; cleared by whoever derives something from the set of rows."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def free(self) -> int:
        return self.capacity - len(self.requests)

    def enter(self, request: Request, group: int) -> None:
        """Adds a row for the request, whose prompt is in slot `group`."""
        row = len(self.requests)
        self.requests.append(request)
        self.group[row], self.counts[row], self.last[row] = group, 0, request.prompt[-1]
        self.limit[row], self.ignore_eos[row], self.seed[row] = request.max_tokens, request.ignore_eos, request.seed
        self.temperature[row], self.top_p[row] = request.temperature, request.top_p
        self.top_k[row], self.min_p[row] = request.top_k, request.min_p
        self.watched[row] = bool(request.stop)
        self.changed = True

    def sampling(self, device: torch.device) -> SamplingRows:
        """The rows' parameters on the device."""
        n = len(self.requests)
        return SamplingRows.of(
            self.seed[:n], self.temperature[:n], self.top_p[:n], self.top_k[:n], self.min_p[:n], device
        )

    def append(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Takes the next token of every row."""
        rows = len(self.requests)
        at = self.counts[:rows]
        longest = int(at.max())
        if longest >= self.tokens.shape[1]:
            self.tokens, self.logprobs, self.versions = (
                np.concatenate([x, np.zeros_like(x)], axis=1) for x in (self.tokens, self.logprobs, self.versions)
            )
        place: tuple[slice | np.ndarray, int | np.ndarray] = slice(rows), longest
        if int(at.min()) < longest:
            place = np.arange(rows), at
        self.tokens[place], self.logprobs[place], self.versions[place] = tokens, logprobs, version
        self.last[:rows] = tokens
        self.counts[:rows] += 1

    def completion(self, row: int, finish: FinishReason, text: str) -> Completion:
        count = int(self.counts[row])
        return Completion(
            request=self.requests[row].id,
            tokens=self.tokens[row, :count].copy(),
            logprobs=self.logprobs[row, :count].copy(),
            versions=self.versions[row, :count].copy(),
            finish=finish,
            text=text,
        )

    def leave(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Drops rows and fills their places from the end; returns (sources, targets) of the moves."""
        sources, targets = moves(len(self.requests), rows)
        for target, source in zip(targets, sources, strict=True):
            self.requests[target] = self.requests[source]
        del self.requests[len(self.requests) - len(rows) :]
        if sources:
            for array in vars(self).values():
                if isinstance(array, np.ndarray):
                    array[targets] = array[sources]
        self.changed = True
        return sources, targets


def moves(count: int, leaving: list[int]) -> tuple[list[int], list[int]]:
    """How `count` dense slots close up after some leave: (sources, targets)."""
    gone = set(leaving)
    left = count - len(gone)
    targets = sorted(slot for slot in gone if slot < left)
    sources = [slot for slot in range(left, count) if slot not in gone]
    return sources, targets
