"""The scores of a step's pairs: the loss and its derivative by each score, and what is kept of them in an export."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lockstep.config.algorithm import BradleyTerry, TrainerOutput
from lockstep.data.mini_batches import TrainingBatch
from lockstep.ledger.ledger import Ledger
from lockstep.train.errors import NonFinite
from lockstep.train.objective import bradley_terry_loss


@dataclass(frozen=True, slots=True)
class ScoreUpdate:
    """What pairs teach a reward model."""

    coefficients: np.ndarray
    """float32 `[completions]`: the derivative of the loss by each score."""
    metrics: dict[str, float]
    """`loss`, `accuracy` (the share of pairs whose better completion has the higher score), `margin` (the mean
    difference), `chosen_reward`, `rejected_reward`, `mean_reward`, `std_reward`."""


class TargetEvaluator(Protocol):
    """A model that is evaluated, on any number of ranks."""

    def evaluate_targets(self, batch: TrainingBatch, output: TrainerOutput) -> np.ndarray:
        """Returns an output for all targets of a batch, float32 `[targets]`, in the batch's order."""


def score_sequences(model: TargetEvaluator, batch: TrainingBatch) -> np.ndarray:
    """Returns the score of each sequence of a batch in which it has one target, float64 `[sequences]`: of
    `forest_of_scored_pairs` those of pair i at 2i (the better completion) and 2i + 1."""
    scores = np.empty(batch.targets)
    scores[batch.sequences] = model.evaluate_targets(batch, "scores")
    return scores


def check_scores(batch: TrainingBatch, scores: np.ndarray, step: int) -> None:
    """Checks the scores from which a step's loss is computed, as the ranks check the loss that they compute themselves.

    Args:
        scores: as `score_sequences` returns them.
        step: the step, from 0.

    Raises:
        NonFinite: a score is infinite or NaN. Names each affected rank and its first affected micro-batch.
    """
    finite = np.isfinite(scores)
    if finite.all():
        return
    rows = batch.everything()
    bad = np.flatnonzero((rows.columns.index >= 0) & ~finite[rows.columns.sequences])
    places: dict[int, int | None] = {}
    for row in (np.searchsorted(rows.target_bounds, bad, "right") - 1).tolist():
        rank, microbatch = divmod(row, rows.microbatches)
        places.setdefault(rank, microbatch)
    raise NonFinite(step + 1, "loss", list(places.items()))


def score_update(scores: np.ndarray, margins: np.ndarray, config: BradleyTerry) -> ScoreUpdate:
    """Computes the loss of pairs from their scores.

    Args:
        scores: as `score_sequences` returns them.
        margins: float `[pairs]`.
    """
    both = torch.from_numpy(scores).double().requires_grad_()
    chosen, rejected = both[0::2], both[1::2]
    gaps = chosen - rejected
    loss = bradley_terry_loss(gaps, chosen + rejected, torch.from_numpy(margins).double(), config).mean()
    (gradient,) = torch.autograd.grad(loss, both)
    with torch.no_grad():
        metrics = {
            "loss": loss.item(), "accuracy": (gaps > 0).double().mean().item(), "margin": gaps.mean().item(),
            "chosen_reward": chosen.mean().item(), "rejected_reward": rejected.mean().item(),
            "mean_reward": both.mean().item(), "std_reward": both.std(correction=0).item(),
        }  # fmt: skip
    return ScoreUpdate(gradient.numpy().astype(np.float32), metrics)


def score_metrics(stats: Mapping[str, float], update: ScoreUpdate | None) -> dict[str, float]:
    """Returns the metrics of an optimizer step, with the standard deviation of the scores.

    Args:
        stats: those of the objective.
        update: what the loss was computed from, if not from the step's own scores.
    """
    found = dict(stats)
    square = found.pop("mean_square_reward", None)
    if update is not None:
        loss = update.metrics["loss"] + found.get("router_aux_loss", 0.0)
        return found | update.metrics | {"loss": loss}
    if square is not None:
        found["std_reward"] = max(square - found["mean_reward"] ** 2, 0.0) ** 0.5
    return found


def score_statistics(ledger: Ledger, steps: int) -> dict[str, float]:
    """Returns what the config of a reward model's export says about its scores: their mean and standard deviation, as
    `mean` and `std`, with which OpenRLHF normalises rewards. They are those of the newest evaluation or step after at
    most `steps` steps; empty if nothing was measured."""
    deviation = "std_reward"
    # With the same number of steps, an evaluation counts more than the training data.
    measured = [(row.step, 1, row.metrics, "eval") for row in ledger.evaluation_metrics()]
    newest = ledger.newest_metrics(f"policy/{deviation}", steps)
    measured += [] if newest is None else [(newest.step, 0, newest.values, "policy")]
    known = [each for each in measured if each[0] < steps and f"{each[3]}/{deviation}" in each[2]]
    if not known:
        return {}
    _, _, metrics, prefix = max(known, key=lambda each: each[:2])
    return {"mean": metrics[f"{prefix}/mean_reward"], "std": metrics[f"{prefix}/{deviation}"]}
