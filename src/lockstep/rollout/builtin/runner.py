"""The forwards of an engine: prefill new prompts, decode one token of every row."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.rollout.builtin.attention import NAME, Turn
from lockstep.rollout.builtin.cache import Cache, index
from lockstep.rollout.builtin.fused import FusedForward
from lockstep.rollout.builtin.graphs import Capture, Graphs
from lockstep.rollout.builtin.prefixes import Prefixes
from lockstep.rollout.builtin.rows import Rows
from lockstep.rollout.builtin.scheduler import Group
from lockstep.rollout.builtin.turns import Prefill, RowSet

_PREFILL_TOKENS = 8192  # of one packed forward; a longer prompt goes alone
_PREFILL_TOKENS_CPU = 1024  # whose activations stay in the caches


class Runner(Protocol):
    """How rows become logits."""

    def prefill(self, groups: Sequence[Group], first: int) -> None:
        """Takes in the prompts of new groups, whose slots are `first`, `first + 1`, ..."""

    def decode(self, rows: Rows, groups: Sequence[Group]) -> Tensor:
        """float32 logits `[rows, vocabulary]` of each row's next token."""

    prefixes: Prefixes
    """What is kept of sequences that ended."""

    def keep(self, rows: Rows, groups: Sequence[Group], ended: Sequence[int]) -> None:
        """Keeps the keys and values of the sequences of rows that are about to leave."""

    def move_rows(self, sources: list[int], targets: list[int]) -> None: ...

    def move_groups(self, sources: list[int], targets: list[int]) -> None: ...

    def free(self) -> None:
        """Gives back the memory of everything that is cached; there are no rows."""


class Forward(Protocol):
    """A model's computation, with the turn's attention in it."""

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, turn: Turn) -> Tensor:
        """Logits `[tokens, vocabulary]`; int64 `positions` `[tokens]` are below `longest`."""

    def fill(self, tokens: Tensor, positions: Tensor, longest: int, turn: Turn) -> None:
        """The same for the keys and values alone."""


class ModelForward:
    """The model's own forward, its attention sent through the interface."""

    def __init__(self, lm: Any) -> None:
        self.lm = lm
        self._keeps = "logits_to_keep" in inspect.signature(lm.forward).parameters

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, turn: Turn) -> Tensor:
        return self._logits(tokens, positions, turn)

    def fill(self, tokens: Tensor, positions: Tensor, longest: int, turn: Turn) -> None:
        self._logits(tokens, positions, turn, **({"logits_to_keep": 1} if self._keeps else {}))

    def _logits(self, tokens: Tensor, positions: Tensor, turn: Turn, **keep: int) -> Tensor:
        logits: Tensor = self.lm(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, turn=turn, **keep
        ).logits[0]
        return logits


class CachedRunner:
    """Through our own cache and attention: each token is computed once, each prompt once per group."""

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        dtype: torch.dtype,
        budget: int | None = None,
        capture: Capture | None = None,
        prefix_cache: float = 0.0,
    ) -> None:
        """`capture`: how decode steps become graphs; they do not when None, or under a `budget` or windows.
        `prefix_cache`: how much is kept, as a share of the `budget`, or of what all rows take when None."""
        self.forward, self.device, self.dtype = forward, device, dtype
        self.cache, self.prefixes, self.prefix_cache = Cache(budget), Prefixes(), prefix_cache
        self._capture = capture
        self._graphs = self._new_graphs()
        self.windows: dict[int, int] = {}
        """Layers that asked for a sliding window, and its size."""
        self._chunk = _PREFILL_TOKENS_CPU if device.type == "cpu" else _PREFILL_TOKENS
        self._among: RowSet | None = None
        self._filled = 0  # tokens in the cache of the longest row

    def prefill(self, groups: Sequence[Group], first: int) -> None:
        """All but the last token of each prompt: that one is every row's first input."""
        longest = max((group.cached for group in groups), default=0)
        slots = max(first + len(groups), self.cache.prompt_size.slots)
        self.cache.reserve(slots, longest, self.cache.suffix_size.slots, self.cache.suffix_size.tokens)
        batch: list[_Fill] = []
        for slot, group in enumerate(groups, start=first):
            start = self._found(group, slot)
            tokens = group.prompt[start:-1]
            if not len(tokens):
                self._prefill(batch, slot - len(batch))
                batch = []
                continue
            if batch and sum(len(each.tokens) for each in batch) + len(tokens) > self._chunk:
                self._prefill(batch, slot - len(batch))
                batch = []
            batch.append(_Fill(start, tokens))
        self._prefill(batch, first + len(groups) - len(batch))

    def _prefill(self, batch: list["_Fill"], first: int) -> None:
        if batch:
            lengths = [len(each.tokens) for each in batch]
            turn = Prefill(self.cache, first, [each.start for each in batch], lengths, self.device)
            tokens = torch.from_numpy(np.concatenate([each.tokens for each in batch]).astype(np.int64))
            self.forward.fill(tokens.to(self.device), turn.positions().to(self.device), turn.longest, turn)
            self.windows |= turn.windows

    def _found(self, group: Group, slot: int) -> int:
        """How many tokens of a prompt were kept; their keys and values are copied to its slot."""
        layers, count = self.prefixes.find(group.prompt[:-1])
        for layer, (k, v) in layers.items():
            keys, values = self.cache.prompt(layer).open(k.transpose(0, 1), v.transpose(0, 1))
            keys[slot, :, :count], values[slot, :, :count] = k[:, :count], v[:, :count]
        return count

    def keep(self, rows: Rows, groups: Sequence[Group], ended: Sequence[int]) -> None:
        """All but the last token of each: that one was never an input."""
        each = self.cache.prompt_size.tokens + self.cache.suffix_size.tokens
        limit = int(self.prefix_cache * (self.cache.budget or rows.capacity * each))
        for row in ended:
            slot, count = int(rows.group[row]), int(rows.counts[row])
            tokens = np.concatenate([rows.requests[row].prompt, rows.tokens[row, : count - 1]])
            if len(tokens) <= limit:
                self.prefixes.keep(tokens, self.cache.sequence(slot, groups[slot].cached, row, count), limit)

    def decode(self, rows: Rows, groups: Sequence[Group]) -> Tensor:
        count = len(rows)
        if rows.changed or self._among is None:
            lengths = np.array([each.cached for each in groups])
            self._among = RowSet.of(rows.group[:count].copy(), lengths, self.device, self.dtype)
            rows.changed = False
        counts = rows.counts[:count].copy()
        budgeted = self.cache.budget is not None
        suffix = int(rows.limit[:count].max()) if budgeted else int(counts.max()) + 1
        self.cache.reserve(len(groups), self._among.prompt, count, suffix)
        turn = self._among.decode(self.cache, counts)
        self._filled = turn.longest
        made = turn.positions()
        longest = int(made.max()) + 1
        tokens = torch.from_numpy(rows.last[:count].copy()).to(self.device)
        positions = torch.from_numpy(made).to(self.device)
        if self._graphs is not None:
            return self._graphs(self._among, counts, tokens, positions).float()
        logits = self.forward(tokens, positions, longest, turn)
        self.windows |= turn.windows
        return logits.float()

    def free(self) -> None:
        self.prefixes.clear()
        self.cache, self._among, self._filled = Cache(self.cache.budget), None, 0
        self._graphs = self._new_graphs()

    def _new_graphs(self) -> Graphs | None:
        forward = self.forward
        if self._capture is None or self.cache.budget is not None or not isinstance(forward, FusedForward):
            return None
        return None if forward.windows else Graphs(forward, self.cache, self.device, self.dtype, self._capture)

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            self.cache.move_rows(index(sources, self.device), index(targets, self.device), self._filled)

    def move_groups(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            self.cache.move_groups(index(sources, self.device), index(targets, self.device))


@dataclass(frozen=True, slots=True)
class _Fill:
    """What is computed of a prompt."""

    start: int
    tokens: np.ndarray


class PlainRunner:
    """Whole sequences again for every token, rows of equal length together: slow, and right for any model."""

    def __init__(self, lm: Any, device: torch.device, batch_tokens: int = 8192) -> None:
        self.lm, self.device, self.batch_tokens, self.prefixes = lm, device, batch_tokens, Prefixes()
        self._keeps = "logits_to_keep" in inspect.signature(lm.forward).parameters

    def prefill(self, groups: Sequence[Group], first: int) -> None:
        """Nothing is kept."""

    def keep(self, rows: Rows, groups: Sequence[Group], ended: Sequence[int]) -> None:
        """Nothing is kept."""

    def decode(self, rows: Rows, groups: Sequence[Group]) -> Tensor:
        by_length: dict[int, list[int]] = {}
        for row, request in enumerate(rows.requests):
            by_length.setdefault(len(request.prompt) + int(rows.counts[row]), []).append(row)
        logits: list[Tensor] = []
        order: list[int] = []
        for length, alike in by_length.items():
            size = max(1, self.batch_tokens // length)
            for start in range(0, len(alike), size):
                chunk = alike[start : start + size]
                logits.append(self._last_logits([_sequence(rows, row) for row in chunk]))
                order.extend(chunk)
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(logits)[back.to(self.device)]

    def _last_logits(self, sequences: list[np.ndarray]) -> Tensor:
        tokens = torch.from_numpy(np.stack(sequences)).to(self.device)
        keep = {"logits_to_keep": 1} if self._keeps else {}
        logits: Tensor = self.lm(input_ids=tokens, use_cache=False, **keep).logits
        return logits[:, -1].float()

    def move_rows(self, sources: list[int], targets: list[int]) -> None: ...

    def move_groups(self, sources: list[int], targets: list[int]) -> None: ...

    def free(self) -> None:
        """Nothing is kept."""


def _sequence(rows: Rows, row: int) -> np.ndarray:
    """int64 `[prompt and generated tokens]`."""
    generated = rows.tokens[row, : rows.counts[row]]
    sequence: np.ndarray = np.concatenate([rows.requests[row].prompt, generated]).astype(np.int64)
    return sequence


def use_cached(lm: Any) -> None:
    """Sends the model's attention through ours. ValueError where its class does not allow that."""
    lm.set_attn_implementation(NAME)


def use_plain(lm: Any) -> None:
    """Gives the model transformers' own attention."""
    lm.set_attn_implementation("sdpa" if getattr(lm, "_supports_sdpa", False) else "eager")
