"""Sums an objective's metrics over micro-batches, and reduces them over ranks with one exchange per step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.train.errors import NonFinite
from lockstep.train.objective import LossOutput, Reduction


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

    @torch.no_grad()
    def add(self, outcome: LossOutput) -> None:
        """Adds the metrics of a micro-batch."""
        self._count += 1
        zero = torch.zeros((), dtype=torch.float64, device=self._values.device)
        values = torch.stack([outcome.metrics.get(name, zero).detach().double() for name in self._names])
        self._values = torch.where(self._is_max, torch.maximum(self._values, values), self._values + values)
        bad = ~torch.isfinite(outcome.loss.detach())
        self._first_bad = torch.where(bad & (self._first_bad == 0), float(self._count), self._first_bad)

    def vector(self, square_norm: Tensor) -> Tensor:
        """Returns the float64 `[metric_vector_size(metrics)]` that the ranks exchange once per step."""
        head = torch.stack([square_norm.to(self._values.device, torch.float64), self._first_bad])
        return torch.cat([head, self._values])


def metric_vector_size(metrics: Mapping[str, Reduction]) -> int:
    """Returns the number of float64 that the ranks exchange once per step: two about gradients and losses that are not
    finite, and the metrics."""
    return 2 + len(metrics)


class ReducedMetrics:
    """The metrics of a step, reduced from the vectors of all ranks. All ranks get the same result.

    Args:
        vectors: float64 `[ranks, metric_vector_size(metrics)]`.
    """

    def __init__(self, metrics: Mapping[str, Reduction], vectors: Tensor) -> None:
        norms, first_bad, values = vectors[:, 0], vectors[:, 1], vectors[:, 2:]
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
