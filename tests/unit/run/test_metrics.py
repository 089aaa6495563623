"""Metrics of a step from those of its parts."""

from lockstep.run.metrics import update_metrics


def test_updates_are_averaged_but_counts_added_and_maxima_kept() -> None:
    stats = [
        {"loss": 1.0, "tokens": 10.0, "engine_gap_max": 0.1, "lr": 1e-3},
        {"loss": 3.0, "tokens": 30.0, "engine_gap_max": 0.5, "lr": 2e-3},
    ]
    assert update_metrics(stats) == {"loss": 2.0, "tokens": 40.0, "engine_gap_max": 0.5, "lr": 1.5e-3}
