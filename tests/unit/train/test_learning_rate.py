import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.trainer import LRScheduleConfig
from lockstep.train.optimizer import learning_rate


def rates(schedule: LRScheduleConfig, total: int, steps: int) -> list[float]:
    return [learning_rate(step, 2.0, schedule, total) for step in range(steps)]


def test_warmup_rises_in_equal_steps_to_the_peak_and_wastes_no_step() -> None:
    assert rates(LRScheduleConfig(warmup_steps=3), 10, 5) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_linear_decay_ends_at_the_final_fraction_and_stays() -> None:
    found = rates(LRScheduleConfig(kind="linear", warmup_steps=1, final=0.1), 5, 8)
    assert found == pytest.approx([1.0, 2.0, 2 - 1.8 / 4, 2 - 3.6 / 4, 2 - 5.4 / 4, 0.2, 0.2, 0.2])


def test_cosine_is_half_a_cosine() -> None:
    found = rates(LRScheduleConfig(kind="cosine", final=0.5), 4, 5)
    assert found == pytest.approx([2 * (0.5 + 0.5 * (1 + math.cos(math.pi * k / 4)) / 2) for k in range(5)])
    assert found[2] == pytest.approx(1.5)


def test_total_steps_of_the_schedule_override_the_runs() -> None:
    assert learning_rate(4, 1.0, LRScheduleConfig(kind="linear", total_steps=8), 100) == pytest.approx(0.5)


def test_warmup_as_long_as_the_run_never_divides_by_zero() -> None:
    assert learning_rate(5, 1.0, LRScheduleConfig(kind="cosine", warmup_steps=5), 5) == pytest.approx(1.0)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    total=st.integers(1, 60),
    final=st.floats(0, 1),
)
def test_rises_then_never_rises_again_and_keeps_its_bounds(kind: str, warmup: int, total: int, final: float) -> None:
    schedule = LRScheduleConfig.model_validate({"kind": kind, "warmup_steps": warmup, "final": final})
    found = rates(schedule, total, total + warmup + 5)
    assert all(0 <= rate <= 2.0 + 1e-12 for rate in found)
    assert all(a < b for a, b in pairwise(found[: warmup + 1]))
    after = found[warmup:]
    assert all(a >= b - 1e-12 for a, b in pairwise(after))
    assert after[0] == pytest.approx(2.0)
