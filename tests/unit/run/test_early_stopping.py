"""When a run stops because it does not improve any more."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.config.run_config import EarlyStoppingConfig
from lockstep.run.evaluation.early_stopping import MetricNotMeasured, stop_reason


def stops(values: list[float], **settings: Any) -> int | None:
    """The first of these evaluations (at 0, 10, 20 ... steps) after which the run ends; None if it does not."""
    config = EarlyStoppingConfig(**settings)
    history = {10 * at: {config.metric: value} for at, value in enumerate(values)}
    return next((at for at in range(len(values)) if stop_reason(config, history, 10 * at)), None)


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([3, 2, 1, 0.5], {"patience": 1}, None),
        ([3, 2, 2.5, 2.1, 2.0], {"patience": 3}, 4),
        ([3, 2, 2.5, 2.1, 1.9], {"patience": 3}, None),
        ([3, 2, 2.5, 1.9, 2.0, 2.0], {"patience": 2}, 5),
        ([3, 2.95, 2.9, 2.85], {"patience": 2, "min_delta": 0.2}, 2),
        ([3, 2.95, 2.7, 2.65], {"patience": 2, "min_delta": 0.2}, None),
        ([0.1, 0.3, 0.2, 0.3], {"metric": "eval/reward_mean", "patience": 2}, 3),
        ([0.3, 0.2, 0.1], {"metric": "eval/reward_mean", "patience": 2, "mode": "min"}, None),
        ([3, 2, 1], {"patience": 2, "mode": "max"}, 2),
    ],
)
def test_patience_delta_and_mode(values: list[float], settings: dict[str, Any], expected: int | None) -> None:
    assert stops(values, **settings) == expected


@given(st.lists(st.floats(0, 5), min_size=1, max_size=12), st.integers(1, 4))
def test_later_evaluations_do_not_change_an_earlier_decision(values: list[float], patience: int) -> None:
    """A resumed run, whose ledger may hold them, ends where the first attempt would have ended."""
    config = EarlyStoppingConfig(patience=patience)
    history = {10 * at: {"eval/loss": value} for at, value in enumerate(values)}
    for at in range(len(values)):
        until = {version: metrics for version, metrics in history.items() if version <= 10 * at}
        assert stop_reason(config, history, 10 * at) == stop_reason(config, until, 10 * at)


def test_the_reason_names_the_best_value_and_its_step() -> None:
    history = {0: {"eval/loss": 3.0}, 10: {"eval/loss": 1.5}, 20: {"eval/loss": 1.75}, 25: {"eval/length_mean": 4.0}}
    reason = stop_reason(EarlyStoppingConfig(patience=1), history, 20)
    assert reason == "eval/loss has not improved in 1 evaluation (best 1.5 after step 10, now 1.75)"
    assert stop_reason(EarlyStoppingConfig(patience=1), history, 25) == "", "the metric was not measured then"
    assert stop_reason(EarlyStoppingConfig(patience=1), history, 21) == "" == stop_reason(None, history, 20)


def test_a_metric_that_is_not_measured_is_an_error_before_the_first_step() -> None:
    with pytest.raises(MetricNotMeasured, match="eval/reward_maen is not measured; there are eval/reward_mean"):
        stop_reason(EarlyStoppingConfig(metric="eval/reward_maen"), {0: {"eval/reward_mean": 1.0}}, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"early_stopping": {}}, "early_stopping.metric eval/loss is measured by validation: set validation.every"),
        ({"early_stopping": {}, "validation": {"fraction": 0.1}}, "set validation.every"),
        ({"early_stopping": {"metric": "eval/exact_match"}}, "measured by evaluation: set evaluation.every"),
        ({"validation": {}}, "either validation.data or validation.fraction"),
        ({"validation": {"fraction": 0.1, "data": {"path": "x"}}}, "either validation.data or validation.fraction"),
    ],
)
def test_settings_that_measure_nothing_are_refused(changes: dict[str, Any], words: str) -> None:
    values = {"recipe": "sft", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d"}, **changes}
    with pytest.raises(ConfigError, match=words):
        check_config(values, "test")
