"""The loss of reward models: against its formula, whole and from coefficients, and its metrics."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.algorithm import BradleyTerry
from lockstep.run.step_scores import score_metrics, score_update
from lockstep.train.objective import BradleyTerryObjective

CONFIG = BradleyTerry(use_margin=True, center_rewards_coefficient=0.01, label_smoothing=0.1)
numbers = st.floats(-20, 20, width=32)
pairs = st.lists(st.tuples(numbers, numbers, st.floats(0, 3, width=32)), min_size=1, max_size=6)


def formula(chosen: float, rejected: float, margin: float) -> float:
    """Written with probabilities instead of their logarithms."""
    wins = 1 / (1 + np.exp(-(chosen - rejected - margin)))
    return float(-0.9 * np.log(wins) - 0.1 * np.log1p(-wins) + 0.01 * (chosen + rejected) ** 2)


def compute(values: list[tuple[float, float, float]]) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Scores with their gradient, the loss, and the metrics as a step reduces them."""
    scores = torch.tensor([each for better, worse, _ in values for each in (better, worse)], requires_grad=True)
    count = len(scores)
    fields = {
        "weight": torch.full((count,), 1 / count),
        "margin": torch.tensor([margin for *_, margin in values]).repeat_interleave(2),
    }
    outcome = BradleyTerryObjective(CONFIG).compute(fields, {"scores": scores}, torch.arange(count))
    outcome.loss.backward()
    sums = {name: float(value) for name, value in outcome.metrics.items()}
    means = {name: sums[name] / count for name, how in BradleyTerryObjective.metrics.items() if how == "mean"}
    return scores, outcome.loss, sums | means


@given(pairs)
def test_the_objective_is_the_formula(values: list[tuple[float, float, float]]) -> None:
    scores, loss, metrics = compute(values)
    with np.errstate(all="ignore"):
        expected = np.mean([formula(*each) for each in values])
    if np.isfinite(expected):
        assert loss.item() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    plain, margins = scores.detach().numpy().astype(np.float64), np.array([margin for *_, margin in values])
    update = score_update(plain, margins, CONFIG)
    assert loss.item() == pytest.approx(update.metrics["loss"], rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(scores.grad, update.coefficients, rtol=1e-4, atol=1e-6)
    found = score_metrics(metrics, None)
    for name in ("accuracy", "margin", "chosen_reward", "rejected_reward", "mean_reward"):
        assert found[name] == pytest.approx(update.metrics[name], rel=1e-5, abs=1e-5), name
    assert found["std_reward"] == pytest.approx(update.metrics["std_reward"], rel=1e-3, abs=2e-2)


def test_coefficients_give_the_same_gradient_wherever_the_sides_of_a_pair_are() -> None:
    values = [(1.0, 0.5, 0.2), (-2.0, 1.0, 0.0)]
    scores, _, _ = compute(values)
    update = score_update(scores.detach().double().numpy(), np.array([0.2, 0.0]), CONFIG)
    for part in ([0, 3], [1, 2]):
        own = scores.detach()[part].requires_grad_()
        fields = {
            "weight": torch.ones(2),
            "margin": torch.zeros(2),
            "coefficient": torch.tensor(update.coefficients[part]),
        }
        BradleyTerryObjective(CONFIG).compute(fields, {"scores": own}, torch.arange(2)).loss.backward()
        torch.testing.assert_close(own.grad, scores.grad[part])


def test_an_empty_row_has_no_loss() -> None:
    fields = {"weight": torch.zeros(1), "margin": torch.zeros(1)}
    outcome = BradleyTerryObjective(CONFIG).compute(
        fields, {"scores": torch.ones(1)}, torch.zeros(1, dtype=torch.int64)
    )
    assert outcome.loss.item() == 0 and outcome.metrics["tokens"] == 0 and outcome.metrics["accuracy"] == 0
