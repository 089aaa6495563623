"""Decode steps as CUDA graphs: hundreds of small kernels with one launch.

A graph has fixed shapes and addresses, so rows, groups, prompts and suffixes are rounded up and everything that
differs from step to step (tokens, positions, places, masks) is copied into buffers that the graph reads. Padding rows
write into free slots, and their results are ignored. There is one graph per rounded shape; all are dropped when the
cache is reallocated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.rollout.builtin.cached_attention import mask_bias
from lockstep.rollout.builtin.forward_batch import DecodeBatch, Masks, RowFold, RowSet
from lockstep.rollout.builtin.fused_forward import FusedForward
from lockstep.rollout.builtin.kv_cache import KVCache

Step = Callable[[], Tensor]
Capture = Callable[[Step], Step]
_MAX_GRAPHS = 64  # graphs that are kept


def capture_graph(step: Step) -> Step:
    """The step as a CUDA graph, whose every replay fills the same logits."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The rounded shape of a graph."""

    rows: int
    suffix: int
    groups: int
    width: int
    prompt: int

    @classmethod
    def of(cls, among: RowSet, counts: np.ndarray) -> "GraphShape":
        return cls(
            rows=_next_power(len(counts), 8),
            suffix=-(-(int(counts.max()) + 1) // 128) * 128,
            groups=_next_power(among.fold.groups, 1),
            width=_next_power(among.fold.width, 1),
            prompt=-(-among.prompt // 128) * 128,
        )


class CudaGraphs:
    """The decode steps of a fused forward over `cache`.

    Args:
        capture: makes a step that can be repeated out of one that can be run; tests on the CPU pass it through.
    """

    def __init__(
        self,
        forward: FusedForward,
        cache: KVCache,
        device: torch.device,
        dtype: torch.dtype,
        capture: Capture = capture_graph,
    ) -> None:
        self.forward, self.cache, self.device, self.dtype, self.capture = forward, cache, device, dtype, capture
        self._steps: dict[GraphShape, _StaticDecode] = {}
        self._sizes = (0, 0, 0, 0)

    def __call__(self, among: RowSet, counts: np.ndarray, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]` of int64 `tokens`, `positions` `[rows]`, whose rows have `counts` tokens."""
        shape = GraphShape.of(among, counts)
        self.cache.reserve(shape.groups, shape.prompt, shape.rows, shape.suffix)
        prompt, suffix = self.cache.prompt_size, self.cache.suffix_size
        sizes = (prompt.slots, prompt.tokens, suffix.slots, suffix.tokens)
        if sizes != self._sizes or len(self._steps) > _MAX_GRAPHS:
            self._steps.clear()
            self._sizes = sizes
        if shape not in self._steps:
            self._steps[shape] = _StaticDecode(shape, self)
        return self._steps[shape](among, counts, tokens, positions)


class _StaticDecode:
    """Buffers of one graph, and the graph."""

    def __init__(self, shape: GraphShape, graphs: CudaGraphs) -> None:
        device, dtype = graphs.device, graphs.dtype

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.shape, self.forward, self.capture = shape, graphs.forward, graphs.capture
        self.tokens, self.positions, self.at = zeros(shape.rows), zeros(shape.rows), zeros(shape.rows)
        self.into, self.out = zeros(shape.groups * shape.width), zeros(shape.rows)
        self.column = torch.arange(shape.suffix, device=device)
        self.suffix = mask_bias(torch.ones(shape.rows, 1, 1, shape.suffix, dtype=torch.bool, device=device), dtype)
        self.prompt = mask_bias(torch.ones(shape.groups, 1, 1, shape.prompt, dtype=torch.bool, device=device), dtype)
        self.hidden = torch.finfo(dtype).min / 2
        fold = RowFold(shape.groups, shape.width, self.into, self.out)
        rows = torch.arange(shape.rows, device=device)
        none = np.zeros(0, np.int64)
        among = RowSet(none, none, device, dtype, shape.prompt, none, fold, rows, self.prompt)
        masks: dict[int | None, Masks] = {None: (self.prompt, self.suffix)}
        self.turn = DecodeBatch(graphs.cache, among, none, self.at, shape.suffix, _masks=masks)
        self._among: RowSet | None = None
        self._replay: Step | None = None

    def __call__(self, among: RowSet, counts: np.ndarray, tokens: Tensor, positions: Tensor) -> Tensor:
        rows = len(counts)
        if among is not self._among:
            self._use_rows(among)
        for buffer, now in ((self.tokens, tokens), (self.positions, positions), (self.at, torch.from_numpy(counts))):
            buffer[:rows].copy_(now)
            buffer[rows:].zero_()
        if self._replay is None:
            self._replay = self.capture(self._step)
        return self._replay()[:rows]

    def _step(self) -> Tensor:
        unseen = (self.column > self.at.unsqueeze(1))[:, None, None, :]
        self.suffix.zero_().masked_fill_(unseen, self.hidden)
        longest = self.shape.prompt + self.shape.suffix
        return self.forward(self.tokens, self.positions, longest, self.turn)

    def _use_rows(self, among: RowSet) -> None:
        """Adopts the slots of other rows."""
        fold = RowFold.spread(among.group, among.fold.groups, self.shape.width, self.into.device)
        assert fold.into is not None and fold.out is not None
        self.into.zero_()[: len(fold.into)].copy_(fold.into)
        self.out.zero_()[: len(fold.out)].copy_(fold.out)
        lengths = np.zeros(self.shape.groups, np.int64)
        lengths[: among.fold.groups] = among.lengths
        unseen = torch.arange(self.shape.prompt) >= torch.from_numpy(lengths).unsqueeze(1)
        self.prompt.zero_().masked_fill_(unseen[:, None, None, :].to(self.prompt.device), self.hidden)
        self._among = among


def _next_power(count: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())
