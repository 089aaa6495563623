"""Decode steps as CUDA graphs: hundreds of small kernels with one launch.

A graph has fixed shapes and addresses. So the numbers of rows and groups and the lengths of prompts and suffixes are
rounded up, and everything that differs from step to step (tokens, positions, slots, masks) is copied into buffers that
the graph reads. Padding rows write into free slots, and their results are ignored. There is one graph per rounded
shape; all are dropped when the cache is reallocated.
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
_MAX_GRAPHS = 64


def capture_graph(step: Step) -> Step:
    """Captures a step as a CUDA graph. Each replay writes to the same logits."""
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
    def of(cls, row_set: RowSet, counts: np.ndarray) -> "GraphShape":
        """Rounds up the shape of a decode step."""
        return cls(
            rows=_next_power(len(counts), 8),
            suffix=-(-(int(counts.max()) + 1) // 128) * 128,
            groups=_next_power(row_set.fold.groups, 1),
            width=_next_power(row_set.fold.width, 1),
            prompt=-(-row_set.prompt // 128) * 128,
        )


class CudaGraphs:
    """Runs the decode steps of a fused forward over `cache` as graphs.

    Args:
        capture: makes a graph of a step; tests on the CPU return the step itself.
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

    def __call__(self, row_set: RowSet, counts: np.ndarray, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the logits `[rows, vocabulary]` of int64 `tokens`, `positions` `[rows]`. `counts` is the number of
        suffix tokens of each row in the cache."""
        shape = GraphShape.of(row_set, counts)
        self.cache.reserve(shape.groups, shape.prompt, shape.rows, shape.suffix)
        prompt, suffix = self.cache.prompt_size, self.cache.suffix_size
        sizes = (prompt.slots, prompt.tokens, suffix.slots, suffix.tokens)
        if sizes != self._sizes or len(self._steps) > _MAX_GRAPHS:
            self._steps.clear()
            self._sizes = sizes
        if shape not in self._steps:
            self._steps[shape] = _StaticDecode(shape, self)
        return self._steps[shape](row_set, counts, tokens, positions)


class _StaticDecode:
    """One graph and its buffers."""

    def __init__(self, shape: GraphShape, graphs: CudaGraphs) -> None:
        device, dtype = graphs.device, graphs.dtype

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.shape, self.forward, self.capture = shape, graphs.forward, graphs.capture
        self.tokens, self.positions, self.write_at = zeros(shape.rows), zeros(shape.rows), zeros(shape.rows)
        self.row_of_cell, self.cell_of_row = zeros(shape.groups * shape.width), zeros(shape.rows)
        self.column = torch.arange(shape.suffix, device=device)
        self.suffix = mask_bias(torch.ones(shape.rows, 1, 1, shape.suffix, dtype=torch.bool, device=device), dtype)
        self.prompt = mask_bias(torch.ones(shape.groups, 1, 1, shape.prompt, dtype=torch.bool, device=device), dtype)
        self.mask_value = torch.finfo(dtype).min / 2
        fold = RowFold(shape.groups, shape.width, self.row_of_cell, self.cell_of_row)
        rows = torch.arange(shape.rows, device=device)
        none = np.zeros(0, np.int64)
        row_set = RowSet(none, none, device, dtype, shape.prompt, none, none, fold, rows, self.prompt)
        masks: dict[int | None, Masks] = {None: (self.prompt, self.suffix)}
        self.batch = DecodeBatch(graphs.cache, row_set, none, self.write_at, shape.suffix, _masks=masks)
        self._row_set: RowSet | None = None
        """The rows whose slots are in the buffers."""
        self._replay: Step | None = None

    def __call__(self, row_set: RowSet, counts: np.ndarray, tokens: Tensor, positions: Tensor) -> Tensor:
        rows = len(counts)
        if row_set is not self._row_set:
            self._set_rows(row_set)
        inputs = (self.tokens, tokens), (self.positions, positions), (self.write_at, torch.from_numpy(counts))
        for buffer, values in inputs:
            buffer[:rows].copy_(values)
            buffer[rows:].zero_()
        if self._replay is None:
            self._replay = self.capture(self._step)
        return self._replay()[:rows]

    def _step(self) -> Tensor:
        hidden = (self.column > self.write_at.unsqueeze(1))[:, None, None, :]
        self.suffix.zero_().masked_fill_(hidden, self.mask_value)
        longest = self.shape.prompt + self.shape.suffix
        return self.forward(self.tokens, self.positions, longest, self.batch)

    def _set_rows(self, row_set: RowSet) -> None:
        """Copies groups and prompt lengths of a set of rows into the buffers."""
        fold = RowFold.spread(row_set.group, row_set.fold.groups, self.shape.width, self.row_of_cell.device)
        assert fold.row_of_cell is not None and fold.cell_of_row is not None
        self.row_of_cell.zero_()[: len(fold.row_of_cell)].copy_(fold.row_of_cell)
        self.cell_of_row.zero_()[: len(fold.cell_of_row)].copy_(fold.cell_of_row)
        lengths = np.zeros(self.shape.groups, np.int64)
        lengths[: row_set.fold.groups] = row_set.lengths
        hidden = torch.arange(self.shape.prompt) >= torch.from_numpy(lengths).unsqueeze(1)
        self.prompt.zero_().masked_fill_(hidden[:, None, None, :].to(self.prompt.device), self.mask_value)
        self._row_set = row_set


def _next_power(count: int, least: int) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (count - 1).bit_length())
