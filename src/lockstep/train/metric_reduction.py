"""Sums an objective's metrics over micro-batches, and reduces them over ranks with one exchange per step, which also
tells all ranks how much each of them had to do."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lockstep.train.errors import NonFinite
from lockstep.train.objective import LossOutput, Reduction
from lockstep.train.trainer_protocol import UNKNOWN_S, RankLoad
from lockstep.watch.beacon.beacon_records import CALLS_PER_RING
from lockstep.watch.beacon.writer import current_beacon

_HEAD = 5
"""The square norm of gradients, the first bad micro-batch, and the values of a `RankLoad`."""


class WorkMeter:
    """Measures how long a rank works in a step, and how long it is in blocking calls of collectives, where it waits for
    other ranks or moves data. Both are unknown if no communicator is recorded, or if `update` was not called once per
    256 calls on each."""

    def __init__(self) -> None:
        self._began, self._blocked_ns = time.monotonic(), 0
        self._read: dict[int, int] = {}
        """The number of the last call that was added, by the slot of its communicator."""
        self._overwritten = False
        self._add(count=False)

    def update(self) -> None:
        """Adds the calls since the last update."""
        self._add(count=True)

    def load(self, device: torch.device) -> RankLoad:
        """The load since the beginning. With collectives that run on the device, no call shows how long it waits."""
        self.update()
        blocked_s = self._blocked_ns / 1e9
        work_s = max(0.0, time.monotonic() - self._began - blocked_s)
        if device.type == "cpu" and self._read and not self._overwritten:
            return RankLoad(work_s, blocked_s, _resident_bytes())
        if device.type == "cpu":
            return RankLoad(UNKNOWN_S, UNKNOWN_S, _resident_bytes())
        return RankLoad(UNKNOWN_S, UNKNOWN_S, float(torch.cuda.max_memory_allocated(device)))

    def _add(self, count: bool) -> None:
        rings = current_beacon().call_rings()
        for slot in [] if rings is None else [each for each in rings.slots if each is not None and not each.closed_ns]:
            if count:
                before = self._read.get(slot.index, 0)
                self._overwritten |= slot.calls - before > CALLS_PER_RING
                self._blocked_ns += slot.blocked_ns(before)
            self._read[slot.index] = slot.calls


def _resident_bytes() -> float:
    """Memory of this process, in bytes."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MetricAccumulator:
    """Sums the metrics of one rank's micro-batches on the device, without a copy to the host per micro-batch.

    Args:
        metrics: `Objective.metrics`.
    """

    def __init__(self, metrics: Mapping[str, Reduction], device: torch.device) -> None:
        self._names = list(metrics)
        self._values = torch.zeros(len(metrics), dtype=torch.float64, device=device)
        self._is_max = torch.tensor([reduction == "max" for reduction in metrics.values()], device=device)
        self._first_bad = torch.zeros((), dtype=torch.float64, device=device)
        """Number of the first micro-batch whose loss is not finite, counted from 1; 0 for none."""
        self._count = 0
        self._work = WorkMeter()

    @torch.no_grad()
    def add(self, outcome: LossOutput) -> None:
        """Adds the metrics of a micro-batch."""
        self._count += 1
        self._work.update()
        zero = torch.zeros((), dtype=torch.float64, device=self._values.device)
        values = torch.stack([outcome.metrics.get(name, zero).detach().double() for name in self._names])
        self._values = torch.where(self._is_max, torch.maximum(self._values, values), self._values + values)
        bad = ~torch.isfinite(outcome.loss.detach())
        self._first_bad = torch.where(bad & (self._first_bad == 0), float(self._count), self._first_bad)

    def vector(self, square_norm: Tensor) -> Tensor:
        """Returns the float64 `[metric_vector_size(metrics)]` that the ranks exchange once per step."""
        device = self._values.device
        head = torch.stack([square_norm.to(device, torch.float64), self._first_bad])
        load = torch.tensor(self._work.load(device), dtype=torch.float64, device=device)
        return torch.cat([head, load, self._values])


def metric_vector_size(metrics: Mapping[str, Reduction]) -> int:
    """Returns the number of float64 that the ranks exchange once per step: two about gradients and losses that are not
    finite, the rank's load, and the metrics."""
    return _HEAD + len(metrics)


class ReducedMetrics:
    """The metrics of a step, reduced from the vectors of all ranks. All ranks get the same result.

    Args:
        vectors: float64 `[ranks, metric_vector_size(metrics)]`.
    """

    def __init__(self, metrics: Mapping[str, Reduction], vectors: Tensor) -> None:
        norms, first_bad, values = vectors[:, 0], vectors[:, 1], vectors[:, _HEAD:]
        self.loads = [RankLoad(*load) for load in vectors[:, 2:_HEAD].tolist()]
        self.square_norm = float(norms.sum())
        self.bad_microbatches = [(rank, int(bad) - 1) for rank, bad in enumerate(first_bad.tolist()) if bad > 0]
        """(rank, micro-batch) of each rank's first loss that is not finite."""
        self.bad_gradients = [rank for rank, norm in enumerate(norms.tolist()) if not norm < float("inf")]
        """Ranks with gradients that are not finite."""
        totals = dict(zip(metrics, values.sum(0).tolist(), strict=True))
        largest = dict(zip(metrics, values.amax(0).tolist(), strict=True))
        by_reduction = {"sum": totals}
        if tokens := totals["tokens"]:
            by_reduction |= {"mean": {name: total / tokens for name, total in totals.items()}, "max": largest}
        self.values: dict[str, float] = {
            name: by_reduction[how][name] for name, how in metrics.items() if how in by_reduction
        }
        """The reduced metrics, by name. Without a target there are only sums: there is nothing to measure."""

    def check_finite(self, step: int) -> None:
        """Raises NonFinite if a loss or a gradient of optimizer step `step` is not finite."""
        if self.bad_microbatches:
            raise NonFinite(step, "loss", list(self.bad_microbatches))
        if self.bad_gradients:
            raise NonFinite(step, "gradient", [(rank, None) for rank in self.bad_gradients])
