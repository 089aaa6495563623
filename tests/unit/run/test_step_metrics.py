"""Metrics of a step from those of its parts."""

import numpy as np
import pytest

from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.run.step_metrics import rollout_metrics, update_metrics


def test_update_metrics_are_means_sums_of_counts_and_maxima() -> None:
    stats = [
        {"loss": 1.0, "tokens": 10.0, "engine_gap_max": 0.1, "lr": 1e-3},
        {"loss": 3.0, "tokens": 30.0, "engine_gap_max": 0.5, "lr": 2e-3},
    ]
    assert update_metrics(stats) == {"loss": 2.0, "tokens": 40.0, "engine_gap_max": 0.5, "lr": 1.5e-3}


def test_an_optimizer_step_without_targets_has_no_part_in_means() -> None:
    empty = {"loss": 0.0, "tokens": 0.0, "grad_norm": 0.0}
    full = {"loss": 3.0, "tokens": 30.0, "grad_norm": 2.0, "entropy": 0.5, "engine_gap_max": 0.1}
    for stats in ([empty, full], [full, empty]):
        found = update_metrics(stats)
        assert (found["entropy"], found["engine_gap_max"], found["tokens"]) == (0.5, 0.1, 30.0)
    assert update_metrics([empty]) == empty


def test_tokens_of_an_environment_are_not_counted() -> None:
    mask = np.array([True, True, False, False, True])
    logprobs = np.where(mask, -0.5, 0).astype(np.float32)
    versions = np.where(mask, 2, -1).astype(np.int32)
    each = Completion("r", np.arange(5, dtype=np.int32), logprobs, versions, "stop", "", mask)
    prompt = Prompt("0:0", 0, np.arange(3, dtype=np.int32), "")
    found = rollout_metrics(Rollouts(3, 3, [Group(prompt, [each, each], np.zeros(2, np.float32))]))
    assert found["rollout/tokens"] == 6 and found["rollout/length_max"] == 3
    assert found["rollout/staleness_mean"] == 1
    assert found["rollout/logprob_mean"] == pytest.approx(-0.5)


@pytest.mark.filterwarnings("error")
def test_a_step_in_which_no_model_wrote_has_finite_metrics() -> None:
    """No environment could be started, say."""
    nothing = np.zeros(0, np.float32)
    each = Completion("r", nothing.astype(np.int32), nothing, nothing.astype(np.int32), "abort", "", nothing > 0)
    prompt = Prompt("0:0", 0, np.arange(3, dtype=np.int32), "")
    found = rollout_metrics(Rollouts(3, 3, [Group(prompt, [each, each], np.zeros(2, np.float32))]))
    assert np.isfinite(list(found.values())).all() and found["rollout/tokens"] == 0
