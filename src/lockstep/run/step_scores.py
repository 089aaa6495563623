"""The scores of a step's pairs: the loss and its derivative by each score, and what is kept of them in an export."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lockstep.base.folders import write_atomically
from lockstep.base.json_text import read_json
from lockstep.config.algorithm import BradleyTerry
from lockstep.data.mini_batches import TrainingBatch
from lockstep.ledger.ledger import Ledger
from lockstep.run.trainer_group import TrainerGroup
from lockstep.train.objective import bradley_terry_loss


@dataclass(frozen=True, slots=True)
class ScoreUpdate:
    """What pairs teach a reward model."""

    coefficients: np.ndarray
    """float32 `[completions]`: the derivative of the loss by each score."""
    metrics: dict[str, float]
    """`loss`, `accuracy` (the share of pairs whose better completion has the higher score), `margin` (the mean
    difference), `chosen_reward`, `rejected_reward`, `mean_reward`, `std_reward`."""


def score_pairs(trainer: TrainerGroup, batch: TrainingBatch) -> np.ndarray:
    """Returns the scores of the completions of a batch of `forest_of_scored_pairs`, float64 `[completions]`: those of
    pair i at 2i (the better one) and 2i + 1."""
    everything = batch.everything()
    values = trainer.evaluate(everything, ["scores"])
    batch.set_field("score", everything, [[row["scores"] for row in rank] for rank in values])
    scores = np.empty(batch.targets)
    scores[batch.sequences] = batch.fields.pop("score")
    return scores


def score_update(scores: np.ndarray, margins: np.ndarray, config: BradleyTerry) -> ScoreUpdate:
    """Computes the loss of pairs from their scores.

    Args:
        scores: as `score_pairs` returns them.
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


def with_deviation(stats: dict[str, float]) -> dict[str, float]:
    """Replaces the mean square of the scores in the metrics of an optimizer step by their standard deviation."""
    found = dict(stats)
    if (square := found.pop("mean_square_reward", None)) is not None:
        found["std_reward"] = max(square - found["mean_reward"] ** 2, 0.0) ** 0.5
    return found


def write_score_statistics(folder: Path, ledger: Ledger, steps: int) -> None:
    """Writes mean and standard deviation of the scores into the config of an exported reward model, as `mean` and
    `std`, with which OpenRLHF normalises rewards: those of the newest evaluation after at most `steps` steps; without
    one, those of the last step's pairs."""
    deviation = "std_reward"
    measured = [(row.step, row.metrics, "eval") for row in ledger.evaluations() if f"eval/{deviation}" in row.metrics]
    if not measured:
        rows = ((row.step, row.values, "policy") for row in ledger.metrics_rows())
        measured = [row for row in rows if f"policy/{deviation}" in row[1]]
    newest = max((each for each in measured if each[0] < steps), key=lambda each: each[0], default=None)
    if newest is None:
        return
    _, metrics, prefix = newest
    path = folder / "config.json"
    config = {**read_json(path), "mean": metrics[f"{prefix}/mean_reward"], "std": metrics[f"{prefix}/{deviation}"]}
    write_atomically(path, (json.dumps(config, indent=2) + "\n").encode())
