"""The forwards of an engine: prefill new prompts, decode one token of every row."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.rollout.builtin.attention import NAME, Decode, Fold, Prefill, Turn
from lockstep.rollout.builtin.cache import Cache, index
from lockstep.rollout.builtin.rows import Rows
from lockstep.rollout.builtin.scheduler import Group

_PREFILL_TOKENS = 8192  # of one packed forward; a longer prompt goes alone


class Runner(Protocol):
    """How rows become logits."""

    def prefill(self, groups: Sequence[Group], first: int) -> None:
        """Takes in the prompts of new groups, whose slots are `first`, `first + 1`, ..."""

    def decode(self, rows: Rows, groups: Sequence[Group]) -> Tensor:
        """float32 logits `[rows, vocabulary]` of each row's next token."""

    def move_rows(self, sources: list[int], targets: list[int]) -> None: ...

    def move_groups(self, sources: list[int], targets: list[int]) -> None: ...


class CachedRunner:
    """Through our own cache and attention: each token is computed once, each prompt once per group."""

    def __init__(self, lm: Any, device: torch.device, budget: int | None = None) -> None:
        self.lm, self.device = lm, device
        self.cache = Cache(budget)
        self.windows: set[int] = set()
        """Sliding windows that the model's layers asked for."""
        self._keeps = "logits_to_keep" in inspect.signature(lm.forward).parameters
        self._fold: Fold | None = None

    def prefill(self, groups: Sequence[Group], first: int) -> None:
        """All but the last token of each prompt: that one is every row's first input."""
        longest = max((group.cached for group in groups), default=0)
        slots = max(first + len(groups), self.cache.prompt_size.slots)
        self.cache.reserve(slots, longest, self.cache.suffix_size.slots, self.cache.suffix_size.tokens)
        batch: list[Group] = []
        for slot, group in enumerate(groups, start=first):
            if not group.cached:
                self._prefill(batch, slot - len(batch))
                batch = []
                continue
            if batch and sum(each.cached for each in batch) + group.cached > _PREFILL_TOKENS:
                self._prefill(batch, slot - len(batch))
                batch = []
            batch.append(group)
        self._prefill(batch, first + len(groups) - len(batch))

    def _prefill(self, batch: list[Group], first: int) -> None:
        if batch:
            turn = Prefill(self.cache, first, [group.cached for group in batch], self.device)
            tokens = np.concatenate([group.prompt[:-1] for group in batch]).astype(np.int64)
            self._forward(torch.from_numpy(tokens), turn.positions(), turn, last=True)

    def decode(self, rows: Rows, groups: Sequence[Group]) -> Tensor:
        count = len(rows)
        group = torch.from_numpy(rows.group[:count].copy())
        counts = torch.from_numpy(rows.counts[:count].copy())
        lengths = torch.tensor([each.cached for each in groups])
        if rows.changed or self._fold is None:
            self._fold = Fold(group, len(groups)).to(self.device)
            rows.changed = False
        budgeted = self.cache.budget is not None
        suffix = int(rows.limit[:count].max()) if budgeted else int(counts.max()) + 1
        self.cache.reserve(len(groups), int(lengths.max()), count, suffix)
        turn = Decode(self.cache, self._fold, group, lengths, counts, self.device)
        return self._forward(torch.from_numpy(rows.last[:count].copy()), turn.positions(), turn).float()

    def _forward(self, tokens: Tensor, positions: Tensor, turn: Turn, last: bool = False) -> Tensor:
        """Logits `[tokens, vocabulary]`, of the last token alone where asked."""
        keep = {"logits_to_keep": 1} if last and self._keeps else {}
        logits: Tensor = self.lm(
            input_ids=tokens.to(self.device).unsqueeze(0),
            position_ids=positions.to(self.device).unsqueeze(0),
            use_cache=False,
            turn=turn,
            **keep,
        ).logits[0]
        self.windows |= turn.windows
        return logits

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            self.cache.move_rows(index(sources, self.device), index(targets, self.device))

    def move_groups(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            self.cache.move_groups(index(sources, self.device), index(targets, self.device))


class PlainRunner:
    """Whole sequences again for every token, rows of equal length together: slow, and right for any model."""

    def __init__(self, lm: Any, device: torch.device, batch_tokens: int = 8192) -> None:
        self.lm, self.device, self.batch_tokens = lm, device, batch_tokens
        self._keeps = "logits_to_keep" in inspect.signature(lm.forward).parameters

    def prefill(self, groups: Sequence[Group], first: int) -> None:
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
