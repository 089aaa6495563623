"""Runs prefill and decode, and chooses at load time the fastest way to run them that is right for the model."""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.rollout.builtin.cached_attention import ATTENTION_NAME, ForwardBatch
from lockstep.rollout.builtin.cuda_graphs import Capture, CudaGraphs, capture_graph
from lockstep.rollout.builtin.forward_batch import PrefillBatch, RowSet
from lockstep.rollout.builtin.fused_forward import FusedForward, NotFusible
from lockstep.rollout.builtin.kv_cache import KVCache, PrefixCache, index_tensor
from lockstep.rollout.builtin.scheduler import CachedPrompt, DecodeRows
from lockstep.rollout.engine_protocol import Request

_PREFILL_TOKENS = 8192
"""Tokens of one packed prefill; a longer prompt is prefilled alone."""
_PREFILL_TOKENS_CPU = 1024
"""The same on a CPU: activations of so many tokens fit into its caches."""


class ModelRunner(Protocol):
    """Runs the model: prefills prompts and computes the logits of rows."""

    def prefill(self, groups: Sequence[CachedPrompt], first: int) -> None:
        """Prefills the prompts of new groups, whose slots are `first`, `first + 1`, ..."""

    def decode(self, rows: DecodeRows, groups: Sequence[CachedPrompt]) -> Tensor:
        """Returns the float32 logits `[rows, vocabulary]` of each row's next token."""

    prefixes: PrefixCache
    """Keys and values of ended sequences."""

    def keep(self, rows: DecodeRows, groups: Sequence[CachedPrompt], ended: Sequence[int]) -> None:
        """Adds the keys and values of rows that are about to end to `prefixes`."""

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copies the caches of rows to other slots."""

    def move_groups(self, sources: list[int], targets: list[int]) -> None:
        """Copies the caches of groups to other slots."""

    def free(self) -> None:
        """Frees the caches. There must be no rows."""


class ForwardFunction(Protocol):
    """A model's forward, whose attention is that of a batch."""

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch) -> Tensor:
        """Returns the logits `[tokens, vocabulary]`; int64 `positions` `[tokens]` are below `longest`."""

    def fill(self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch) -> None:
        """Computes only the keys and values."""


class ModelForward:
    """The model's own forward, with `engine_attention`."""

    def __init__(self, lm: Any) -> None:
        self.lm = lm
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(lm.forward).parameters

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch) -> Tensor:
        return self._logits(tokens, positions, batch)

    def fill(self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch) -> None:
        self._logits(tokens, positions, batch, **({"logits_to_keep": 1} if self._takes_logits_to_keep else {}))

    def _logits(self, tokens: Tensor, positions: Tensor, batch: ForwardBatch, **keep: int) -> Tensor:
        logits: Tensor = self.lm(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            forward_batch=batch,
            **keep,
        ).logits[0]
        return logits


class CachedRunner:
    """Runs a forward with the engine's KV cache: each token is computed once, each prompt once per group."""

    def __init__(
        self,
        forward: ForwardFunction,
        device: torch.device,
        dtype: torch.dtype,
        budget: int | None = None,
        capture: Capture | None = None,
        prefix_cache: float = 0.0,
    ) -> None:
        """
        Args:
            budget: limit of the KV cache in tokens; the cache grows as needed if None.
            capture: makes CUDA graphs of decode steps. There are no graphs if it is None, with a `budget`, or with
                sliding windows.
            prefix_cache: size of the prefix cache as a share of `budget`, or of what all rows can use if that is None.
        """
        self.forward, self.device, self.dtype = forward, device, dtype
        self.cache, self.prefixes, self.prefix_cache = KVCache(budget), PrefixCache(), prefix_cache
        self._capture = capture
        self._graphs = self._new_graphs()
        self.windows: dict[int, int] = {}
        """Size of the sliding window by layer, for layers that have one."""
        self._max_prefill_tokens = _PREFILL_TOKENS_CPU if device.type == "cpu" else _PREFILL_TOKENS
        self._row_set: RowSet | None = None
        self._longest_suffix = 0
        """Suffix tokens of the longest row in the cache."""

    def prefill(self, groups: Sequence[CachedPrompt], first: int) -> None:
        """Prefills all but the last token of each prompt: that token is the first input of every row."""
        longest = max((group.cached_tokens for group in groups), default=0)
        slots = max(first + len(groups), self.cache.prompt_size.slots)
        self.cache.reserve(slots, longest, self.cache.suffix_size.slots, self.cache.suffix_size.tokens)
        batch: list[_PrefillItem] = []
        for slot, group in enumerate(groups, start=first):
            start = self._copy_prefix(group, slot)
            tokens = group.prompt[start:-1]
            if not len(tokens):
                self._prefill(batch, slot - len(batch))
                batch = []
                continue
            if batch and sum(len(each.tokens) for each in batch) + len(tokens) > self._max_prefill_tokens:
                self._prefill(batch, slot - len(batch))
                batch = []
            batch.append(_PrefillItem(start, tokens))
        self._prefill(batch, first + len(groups) - len(batch))

    def _prefill(self, batch: list["_PrefillItem"], first: int) -> None:
        if batch:
            lengths = [len(each.tokens) for each in batch]
            prefill = PrefillBatch(self.cache, first, [each.start for each in batch], lengths, self.device)
            tokens = torch.from_numpy(np.concatenate([each.tokens for each in batch]).astype(np.int64))
            self.forward.fill(tokens.to(self.device), prefill.positions().to(self.device), prefill.longest, prefill)
            self.windows |= prefill.windows

    def _copy_prefix(self, group: CachedPrompt, slot: int) -> int:
        """Copies the keys and values of a cached prefix to the prompt's slot. Returns the number of tokens."""
        layers, count = self.prefixes.find(group.prompt[:-1])
        for layer, (k, v) in layers.items():
            keys, values = self.cache.prompt_table(layer).ensure_allocated(k.transpose(0, 1), v.transpose(0, 1))
            keys[slot, :, :count], values[slot, :, :count] = k[:, :count], v[:, :count]
        return count

    def keep(self, rows: DecodeRows, groups: Sequence[CachedPrompt], ended: Sequence[int]) -> None:
        """Adds the keys and values of ended rows to `prefixes`, except for the last token, which was never an input."""
        tokens_per_row = self.cache.prompt_size.tokens + self.cache.suffix_size.tokens
        limit = int(self.prefix_cache * (self.cache.budget or rows.capacity * tokens_per_row))
        for row in ended:
            slot, count = int(rows.group_slot[row]), int(rows.counts[row])
            tokens = np.concatenate([rows.requests[row].prompt, rows.tokens[row, : count - 1]])
            if len(tokens) <= limit:
                self.prefixes.keep(
                    tokens, self.cache.copy_sequence(slot, groups[slot].cached_tokens, row, count), limit
                )

    def decode(self, rows: DecodeRows, groups: Sequence[CachedPrompt]) -> Tensor:
        count = len(rows)
        if rows.changed or self._row_set is None:
            lengths = np.array([each.cached_tokens for each in groups])
            self._row_set = RowSet.of(rows.group_slot[:count].copy(), lengths, self.device, self.dtype)
            rows.changed = False
        counts = rows.counts[:count].copy()
        budgeted = self.cache.budget is not None
        suffix = int(rows.limit[:count].max()) if budgeted else int(counts.max()) + 1
        self.cache.reserve(len(groups), self._row_set.prompt, count, suffix)
        batch = self._row_set.decode(self.cache, counts)
        self._longest_suffix = batch.longest
        last_positions = batch.positions()
        longest = int(last_positions.max()) + 1
        tokens = torch.from_numpy(rows.last[:count].copy()).to(self.device)
        positions = torch.from_numpy(last_positions).to(self.device)
        if self._graphs is not None:
            return self._graphs(self._row_set, counts, tokens, positions).float()
        logits = self.forward(tokens, positions, longest, batch)
        self.windows |= batch.windows
        return logits.float()

    def free(self) -> None:
        self.prefixes.clear()
        self.cache, self._row_set, self._longest_suffix = KVCache(self.cache.budget), None, 0
        self._graphs = self._new_graphs()

    def _new_graphs(self) -> CudaGraphs | None:
        forward = self.forward
        if self._capture is None or self.cache.budget is not None or not isinstance(forward, FusedForward):
            return None
        return None if forward.windows else CudaGraphs(forward, self.cache, self.device, self.dtype, self._capture)

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            rows = index_tensor(sources, self.device), index_tensor(targets, self.device)
            self.cache.move_rows(*rows, self._longest_suffix)

    def move_groups(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            self.cache.move_groups(index_tensor(sources, self.device), index_tensor(targets, self.device))


@dataclass(frozen=True, slots=True)
class _PrefillItem:
    """The part of a prompt to prefill: its tokens from position `start` on, without the last one."""

    start: int
    tokens: np.ndarray


class PlainRunner:
    """Computes whole sequences for every token, rows of equal length together. Slow, but right for any model."""

    def __init__(self, lm: Any, device: torch.device, batch_tokens: int = 8192) -> None:
        self.lm, self.device, self.batch_tokens, self.prefixes = lm, device, batch_tokens, PrefixCache()
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(lm.forward).parameters

    def prefill(self, groups: Sequence[CachedPrompt], first: int) -> None:
        """Does nothing: there is no cache."""

    def keep(self, rows: DecodeRows, groups: Sequence[CachedPrompt], ended: Sequence[int]) -> None:
        """Does nothing: there is no cache."""

    def decode(self, rows: DecodeRows, groups: Sequence[CachedPrompt]) -> Tensor:
        by_length: dict[int, list[int]] = {}
        for row, request in enumerate(rows.requests):
            by_length.setdefault(len(request.prompt) + int(rows.counts[row]), []).append(row)
        logits: list[Tensor] = []
        order: list[int] = []
        for length, same_length in by_length.items():
            size = max(1, self.batch_tokens // length)
            for start in range(0, len(same_length), size):
                chunk = same_length[start : start + size]
                logits.append(self._last_logits([_sequence(rows, row) for row in chunk]))
                order.extend(chunk)
        position = torch.empty(len(order), dtype=torch.int64)
        position[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(logits)[position.to(self.device)]

    def _last_logits(self, sequences: list[np.ndarray]) -> Tensor:
        tokens = torch.from_numpy(np.stack(sequences)).to(self.device)
        keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        logits: Tensor = self.lm(input_ids=tokens, use_cache=False, **keep).logits
        return logits[:, -1].float()

    def move_rows(self, sources: list[int], targets: list[int]) -> None: ...

    def move_groups(self, sources: list[int], targets: list[int]) -> None: ...

    def free(self) -> None:
        """Does nothing: there is no cache."""


def _sequence(rows: DecodeRows, row: int) -> np.ndarray:
    """The prompt and the generated tokens of a row, int64."""
    generated = rows.tokens[row, : rows.counts[row]]
    sequence: np.ndarray = np.concatenate([rows.requests[row].prompt, generated]).astype(np.int64)
    return sequence


def use_cached_attention(lm: Any) -> None:
    """Makes the model use `engine_attention`. Raises ValueError if its class does not allow that."""
    lm.set_attn_implementation(ATTENTION_NAME)


def use_plain_attention(lm: Any) -> None:
    """Makes the model use transformers' own attention."""
    lm.set_attn_implementation("sdpa" if getattr(lm, "_supports_sdpa", False) else "eager")


log = logging.getLogger(__name__)

_PROBE_PROMPTS = (5, 1, 3)
"""Prompt lengths of the groups in the probe batch."""
_PROBE_ROWS = (0, 0, 1, 2, 2)
"""Group of each row in the probe batch."""
_PROBE_TOKENS = 4
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@torch.inference_mode()
def choose_runner(
    lm: Any, device: torch.device, context: int, budget: int | None, prefix_cache: float = 0.0
) -> tuple[ModelRunner, str]:
    """Returns the fastest runner that is right for the model, and why it is not a faster one ("" for the fastest).

    The candidates are the KV cache with the fused forward, the KV cache with the model's own forward, and whole
    sequences. A candidate is right if its logits for a small probe batch are those of whole sequences.
    """
    name, dtype = type(lm).__name__, next(lm.parameters()).dtype
    use_plain_attention(lm)
    rows, groups = _probe_batch(lm.config.get_text_config().vocab_size)
    expected = _probe_logits(PlainRunner(lm, device), rows, groups)
    cached, why = _try_cached_runner(lm, device, context, expected)
    if cached is None:
        use_plain_attention(lm)
        return PlainRunner(lm, device), _warn_slower(f"{name} decodes without the KV cache, slowly: {why}")
    forward, why = _try_fused_forward(lm, device, cached.windows, expected)
    if forward is None:
        slower = _warn_slower(f"{name} decodes through its own forward, not the fused one, slower: {why}")
        return CachedRunner(cached.forward, device, dtype, budget, None, prefix_cache), slower
    log.info("%s decodes through the fused forward", name)
    capture, slower = capture_graph if device.type == "cuda" else None, ""
    if capture and (why := _find_mismatch(CachedRunner(forward, device, dtype, capture=capture), expected)):
        capture, slower = None, _warn_slower(f"{name} decodes without CUDA graphs, slower: {why}")
    return CachedRunner(forward, device, dtype, budget, capture, prefix_cache), slower


def _warn_slower(slower: str) -> str:
    log.warning("%s", slower)
    return slower


def _try_cached_runner(
    lm: Any, device: torch.device, context: int, expected: Tensor
) -> tuple[CachedRunner | None, str]:
    """Returns a runner with the KV cache and the model's own forward, or None and why they do not work together."""
    config = lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        return None, f"it has layers of type {', '.join(sorted(kinds))}"
    runner = CachedRunner(ModelForward(lm), device, next(lm.parameters()).dtype)
    try:
        use_cached_attention(lm)
        got = _probe_logits(runner, *_probe_batch(config.vocab_size))
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        return None, f"its attention does not use transformers' attention interface ({error})"
    if not runner.cache.prompt_tables:
        return None, "its attention ignores transformers' attention interface"
    if why := _describe_difference(got, expected, runner.dtype):
        return None, why
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < context and not runner.windows:
        return None, f"its sliding window of {window} does not reach the attention interface"
    return runner, ""


def _try_fused_forward(
    lm: Any, device: torch.device, windows: dict[int, int], expected: Tensor
) -> tuple[FusedForward | None, str]:
    """Returns the fused forward, or None and why it does not compute what the model does.

    Args:
        windows: the sliding windows that layers pass to the attention function. The probe's sequences are too short to
            test them.
    """
    try:
        forward = FusedForward(lm)
    except (NotFusible, AttributeError) as error:
        return None, str(error)
    if forward.windows != windows:
        return None, "its layers have other sliding windows"
    why = _find_mismatch(CachedRunner(forward, device, next(lm.parameters()).dtype), expected)
    return (None, why) if why else (forward, "")


def _find_mismatch(runner: CachedRunner, expected: Tensor) -> str:
    """Describes what is wrong with the runner; "" if its logits for the probe batch are the expected ones."""
    try:
        got = _probe_logits(runner, *_probe_batch(expected.shape[-1]))
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        return str(error)
    return _describe_difference(got, expected, runner.dtype)


def _describe_difference(got: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """Describes the difference of the logits; "" if they are equal up to rounding."""
    half = dtype in (torch.bfloat16, torch.float16)
    error = float((got - expected).std() / expected.std().clamp(min=1e-12))
    return "" if error < (5e-2 if half else 1e-3) else f"its logits differ from those of whole sequences by {error:.1e}"


def _probe_batch(vocabulary: int) -> tuple[DecodeRows, list[CachedPrompt]]:
    """Makes a few groups with their rows."""
    random = np.random.default_rng(0)
    prompts = [random.integers(vocabulary, size=length).astype(np.int32) for length in _PROBE_PROMPTS]
    groups = [CachedPrompt(str(slot), prompt, version=0) for slot, prompt in enumerate(prompts)]
    rows = DecodeRows(len(_PROBE_ROWS))
    for row, slot in enumerate(_PROBE_ROWS):
        rows.add_row(Request(str(row), str(slot), prompts[slot], seed=row, max_tokens=_PROBE_TOKENS), slot)
    return rows, groups


def _probe_logits(runner: ModelRunner, rows: DecodeRows, groups: list[CachedPrompt]) -> Tensor:
    """Returns the centred logits `[tokens x rows, vocabulary]` of a few fixed continuations."""
    random = np.random.default_rng(1)
    runner.prefill(groups, 0)
    collected = []
    for _ in range(_PROBE_TOKENS):
        logits = runner.decode(rows, groups)
        collected.append(logits - logits.mean(-1, keepdim=True))
        vocabulary = logits.shape[-1]
        rows.append_tokens(random.integers(vocabulary, size=len(rows)), np.zeros(len(rows), np.float32), version=0)
    return torch.cat(collected)
