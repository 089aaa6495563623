"""Admits waiting requests by priority, keeps the state of the running rows, and finds finished ones."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lockstep.data.samples import Completion, FinishReason, PlacedImage
from lockstep.rollout.builtin.sampler import SamplingRows
from lockstep.rollout.engine_protocol import Request, contains_stop, stop_window

_INT, _FLOAT = np.int64, np.float32


class DecodeRows:
    """State of the running rows. Row `i` of every array belongs to `requests[i]`; `remove` moves rows in all arrays.

    A decode step reads the last token of each row. In the first step, that is the last token of the prompt, whose other
    tokens were prefilled.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.requests: list[Request] = []
        self.group_slot = np.zeros(capacity, _INT)
        """Index of the row's group in `Scheduler.groups`."""
        self.counts = np.zeros(capacity, _INT)
        """Number of tokens generated."""
        self.last = np.zeros(capacity, _INT)
        """The last token."""
        self.limit = np.zeros(capacity, _INT)
        """Largest number of tokens to generate."""
        self.ignore_eos = np.zeros(capacity, bool)
        self.has_stop_strings = np.zeros(capacity, bool)
        self.seed = np.zeros(capacity, _INT)
        self.temperature = np.ones(capacity, _FLOAT)
        self.top_p = np.ones(capacity, _FLOAT)
        self.top_k = np.zeros(capacity, _INT)
        self.min_p = np.zeros(capacity, _FLOAT)
        self.tokens = np.zeros((capacity, 64), np.int32)
        self.logprobs = np.zeros((capacity, 64), np.float32)
        self.versions = np.zeros((capacity, 64), np.int32)
        self.changed = True
        """Set when the set of rows or its order changes; cleared by the runner, which caches data about it."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def free(self) -> int:
        return self.capacity - len(self.requests)

    def add_row(self, request: Request, group_slot: int) -> None:
        """Adds a row for the request, whose group has slot `group_slot`."""
        row = len(self.requests)
        self.requests.append(request)
        self.group_slot[row], self.counts[row], self.last[row] = group_slot, 0, request.prompt[-1]
        self.limit[row], self.ignore_eos[row], self.seed[row] = request.max_tokens, request.ignore_eos, request.seed
        self.temperature[row], self.top_p[row] = request.temperature, request.top_p
        self.top_k[row], self.min_p[row] = request.top_k, request.min_p
        self.has_stop_strings[row] = bool(request.stop)
        self.changed = True

    def sampling(self, device: torch.device) -> SamplingRows:
        """Returns the rows' sampling parameters on the device."""
        n = len(self.requests)
        return SamplingRows.of(
            self.seed[:n], self.temperature[:n], self.top_p[:n], self.top_k[:n], self.min_p[:n], device
        )

    def append_tokens(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Appends the next token of every row."""
        rows = len(self.requests)
        counts = self.counts[:rows]
        longest = int(counts.max())
        if longest >= self.tokens.shape[1]:
            self.tokens, self.logprobs, self.versions = (
                np.concatenate([x, np.zeros_like(x)], axis=1) for x in (self.tokens, self.logprobs, self.versions)
            )
        # Rows of equal length are one column, which a slice writes faster than an array of indices.
        cells: tuple[slice | np.ndarray, int | np.ndarray] = slice(rows), longest
        if int(counts.min()) < longest:
            cells = np.arange(rows), counts
        self.tokens[cells], self.logprobs[cells], self.versions[cells] = tokens, logprobs, version
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

    def remove(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Removes rows and moves the last ones into the gaps. Returns (sources, targets) of the moves."""
        sources, targets = compaction_moves(len(self.requests), rows)
        for target, source in zip(targets, sources, strict=True):
            self.requests[target] = self.requests[source]
        del self.requests[len(self.requests) - len(rows) :]
        if sources:
            for array in vars(self).values():
                if isinstance(array, np.ndarray):
                    array[targets] = array[sources]
        self.changed = True
        return sources, targets


def compaction_moves(count: int, removed: list[int]) -> tuple[list[int], list[int]]:
    """Returns the (sources, targets) of the moves that close the gaps when some of `count` dense slots are removed."""
    gaps = set(removed)
    remaining = count - len(gaps)
    targets = sorted(slot for slot in gaps if slot < remaining)
    sources = [slot for slot in range(remaining, count) if slot not in gaps]
    return sources, targets


@dataclass(slots=True)
class CachedPrompt:
    """The prompt of a group in the cache. A group is the requests with the same prompt."""

    name: str
    """Name of the group."""
    prompt: np.ndarray
    version: int
    """Version of the weights that its keys and values were computed with."""
    images: tuple[PlacedImage, ...] = ()
    position_offset: int = 0
    """By how much the positions of the tokens after the prompt differ from their number in the sequence. The runner
    sets it when it prefills a prompt with images."""
    running: int = 0
    """Number of running rows of the group."""

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the cache: all but the last one, which is the first input of each row."""
        return len(self.prompt) - 1


class Scheduler:
    """The queue of waiting requests, and the groups whose prompts are in the cache.

    Args:
        budget: limit of the KV cache in tokens, if there is one.
    """

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.waiting: deque[Request] = deque()
        self.groups: list[CachedPrompt] = []
        self._waiting_in_group: Counter[str] = Counter()
        """Number of waiting requests by the name of their group."""

    def add(self, requests: Iterable[Request]) -> None:
        new = list(requests)
        self._waiting_in_group.update(request.group for request in new)
        self.waiting = deque(sorted([*self.waiting, *new], key=lambda request: request.priority))

    def admit(self, rows: DecodeRows, version: int) -> list[CachedPrompt]:
        """Moves waiting requests into free rows. Returns the new groups, which are the last ones of `groups`.

        If the prompt of a request's group was prefilled with older weights, a second group is made for the request.
        """
        if not self._should_admit(rows):
            return []
        slots = {group.name: slot for slot, group in enumerate(self.groups) if group.version == version}
        first_new = len(self.groups)
        longest_completion = int(rows.limit[: len(rows)].max(initial=0))
        longest_prompt = max((group.cached_tokens for group in self.groups), default=0)
        while self.waiting and rows.free:
            request = self.waiting[0]
            longest_completion = max(longest_completion, request.max_tokens)
            longest_prompt = max(longest_prompt, len(request.prompt) - 1)
            group_count = len(self.groups) + (request.group not in slots)
            # The tables of `KVCache` are rectangular: every slot takes the space of the longest one.
            needed = (len(rows) + 1) * longest_completion + group_count * longest_prompt
            if self.budget is not None and needed > self.budget:
                if len(rows) or not self.groups:
                    break  # wait for rows to end; the engine has refused requests that exceed the budget on their own
                # No row is running. Prompts that are kept for later requests would block the first request forever.
                self.groups.clear()
                slots.clear()
                first_new = longest_prompt = 0
                continue
            self._admit(self.waiting.popleft(), rows, slots, version)
        return self.groups[first_new:]

    def _admit(self, request: Request, rows: DecodeRows, slots: dict[str, int], version: int) -> None:
        self._count_not_waiting(request)
        if request.group not in slots:
            slots[request.group] = len(self.groups)
            self.groups.append(CachedPrompt(request.group, request.prompt, version, request.images))
        slot = slots[request.group]
        self.groups[slot].running += 1
        rows.add_row(request, slot)

    def _count_not_waiting(self, request: Request) -> None:
        self._waiting_in_group[request.group] -= 1
        if not self._waiting_in_group[request.group]:
            del self._waiting_in_group[request.group]

    def _should_admit(self, rows: DecodeRows) -> bool:
        """Whether to admit now. Each prefill costs a forward, so several free rows are filled together."""
        return bool(self.waiting) and rows.free >= min(len(self.waiting), max(1, rows.capacity // 16))

    def remove_groups(self, ended: Iterable[int], rows: DecodeRows, version: int) -> tuple[list[int], list[int]]:
        """Removes groups without running or waiting requests, and those of older weights without running requests.
        Renumbers the rows' groups. Returns (sources, targets) of the slots to move.

        Args:
            ended: for each row that has ended, the slot of its group.
            version: version of the current weights.
        """
        for slot in ended:
            self.groups[slot].running -= 1
        removed = [
            slot
            for slot, group in enumerate(self.groups)
            if not group.running and (group.version != version or not self._waiting_in_group[group.name])
        ]
        if not removed:
            return [], []
        rows.changed = True
        sources, targets = compaction_moves(len(self.groups), removed)
        for source, target in zip(sources, targets, strict=True):
            self.groups[target] = self.groups[source]
            row_slots = rows.group_slot[: len(rows)]
            row_slots[row_slots == source] = target
        del self.groups[len(self.groups) - len(removed) :]
        return sources, targets

    def remove_waiting(self, ids: set[str] | None) -> list[Request]:
        """Removes requests (all if None) from the queue, and returns them."""
        removed = [request for request in self.waiting if ids is None or request.id in ids]
        self.waiting = deque(request for request in self.waiting if ids is not None and request.id not in ids)
        for request in removed:
            self._count_not_waiting(request)
        return removed


class StopChecker:
    """Finds finished rows after each token. A stop string stays in the completion."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.eos = eos

    def finished(self, rows: DecodeRows) -> dict[int, FinishReason]:
        """Returns the finish reason of each row that ends with its last token."""
        count = len(rows)
        last = rows.last[:count]
        stopped = np.zeros(count, bool)
        for token in self.eos:
            stopped |= last == token
        stopped &= ~rows.ignore_eos[:count]
        full = rows.counts[:count] >= rows.limit[:count]
        ended: dict[int, FinishReason] = {int(row): "length" for row in np.flatnonzero(full)}
        ended.update(dict.fromkeys(self._rows_with_stop_string(rows), "stop"))
        ended.update({int(row): "stop" for row in np.flatnonzero(stopped)})
        return ended

    def _rows_with_stop_string(self, rows: DecodeRows) -> list[int]:
        """Rows whose last tokens contain one of their stop strings."""
        candidates = [int(row) for row in np.flatnonzero(rows.has_stop_strings[: len(rows)])]
        if not candidates:
            return []
        stops = [rows.requests[row].stop for row in candidates]
        tails = [self._tail(rows, row) for row in candidates]
        hits = contains_stop(self.tokenizer, tails, stops)
        return [row for row, hit in zip(candidates, hits, strict=True) if hit]

    @staticmethod
    def _tail(rows: DecodeRows, row: int) -> list[int]:
        """The last tokens of a row, as many as its longest stop string can span."""
        count = int(rows.counts[row])
        return list(rows.tokens[row, max(0, count - stop_window(rows.requests[row].stop)) : count].tolist())
