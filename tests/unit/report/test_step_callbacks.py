"""Callbacks after every step."""

from collections.abc import Mapping

from lockstep.report.step_callbacks import STOP, StepCallbacks


def test_all_are_called_once_per_step_with_metrics_of_their_own() -> None:
    seen: list[tuple[str, int, dict[str, float]]] = []

    def first(step: int, metrics: Mapping[str, float]) -> None:
        seen.append(("first", step, dict(metrics)))
        assert isinstance(metrics, dict)
        metrics["mine"] = 1.0

    def second(step: int, metrics: Mapping[str, float]) -> str:
        seen.append(("second", step, dict(metrics)))
        return "ignored"

    callbacks, row = StepCallbacks([first, second]), {"loss": 0.5}
    for step in (1, 2, 2, 1, 3):
        callbacks.call(step, row)
    assert [(name, step) for name, step, _ in seen] == [
        (name, step) for step in (1, 2, 3) for name in ("first", "second")
    ]
    assert all(metrics == {"loss": 0.5} for _, _, metrics in seen) and row == {"loss": 0.5}
    assert not callbacks.stop_reason and callbacks.failure is None


def test_one_that_returns_stop_ends_the_run() -> None:
    def enough(step: int, metrics: Mapping[str, float]) -> object:
        return STOP if metrics["reward/mean"] > 0.5 else None

    callbacks = StepCallbacks([enough])
    callbacks.call(1, {"reward/mean": 0.5})
    assert not callbacks.stop_reason
    callbacks.call(2, {"reward/mean": 0.75})
    callbacks.call(2, {"reward/mean": 0.0})
    assert "enough returned STOP" in callbacks.stop_reason


def test_one_that_raises_is_named_and_ends_the_calls() -> None:
    later: list[int] = []

    class Dashboard:
        def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
            raise ConnectionError("no dashboard")

    callbacks = StepCallbacks([Dashboard(), lambda step, metrics: later.append(step)])
    callbacks.call(7, {})
    assert later == [] and callbacks.failure is not None and callbacks.failure.step == 7
    assert str(callbacks.failure).endswith("Dashboard raised ConnectionError after step 7: no dashboard")
    assert isinstance(callbacks.failure.__cause__, ConnectionError)
