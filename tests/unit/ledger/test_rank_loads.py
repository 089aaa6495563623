"""Loads of ranks in the ledger, the speeds that follow from them, and the remark about a slow rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.arrangement.rank_arrangement import normalised_speeds
from lockstep.ledger import Ledger
from lockstep.ledger.rank_loads import RankLoadRow, RankLoads, measured_speeds, slow_ranks


def rows(work: np.ndarray, cost: np.ndarray | None = None) -> list[RankLoadRow]:
    """Args:
    work, cost: `[steps, ranks]`.
    """
    cost = np.full_like(work, 1000.0) if cost is None else cost
    return [
        RankLoadRow(
            step, "policy", None,
            RankLoads(own.tolist(), [0.0] * own.size, [1.0] * own.size, [1000] * own.size, of.tolist()),
        )
        for step, (own, of) in enumerate(zip(work, cost, strict=True))
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(2, 40), st.integers(1, 100), st.floats(0, 1.5),
    st.sampled_from(["lognormal", "spikes", "steps"]),
)  # fmt: skip
def test_balanced_noise_gives_no_remark(seed: int, ranks: int, steps: int, sigma: float, kind: str) -> None:
    random = np.random.default_rng(seed)
    work = np.exp(sigma * random.normal(size=(steps, ranks)))
    if kind == "spikes":
        work = np.where(random.random((steps, ranks)) < 0.05, 100.0, 1.0) * work
    if kind == "steps":  # all ranks alike, steps very different
        work *= np.exp(3 * random.normal(size=(steps, 1)))
    assert slow_ranks(rows(work)) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.floats(1.5, 5), st.floats(0, 0.1))
def test_a_slow_rank_is_named(seed: int, ranks: int, times: float, sigma: float) -> None:
    random = np.random.default_rng(seed)
    work = np.exp(sigma * random.normal(size=(64, ranks)))
    rank = int(random.integers(ranks))
    work[:, rank] *= times
    (found,) = slow_ranks(rows(work))
    assert (found.role, found.rank, found.steps) == ("policy", rank, 64)
    assert found.times == pytest.approx(times, rel=0.2)
    assert f"policy rank {rank} takes {found.times:.2f} times as long" in str(found)


def test_a_rank_that_was_slow_only_for_a_while_is_not_named() -> None:
    work = np.ones((64, 4))
    work[:40, 2] = 3.0
    assert slow_ranks(rows(work)) == []


def test_a_small_difference_is_not_worth_a_remark() -> None:
    work = np.ones((64, 4))
    work[:, 2] = 1.05
    assert slow_ranks(rows(work)) == []


def test_speeds_are_costs_per_second() -> None:
    cost = np.array([[1000.0, 500.0]] * 8)
    assert measured_speeds(rows(np.ones((8, 2)), cost), 2) == [1.0, 0.5]
    assert measured_speeds(rows(np.array([[1.0, 0.5]] * 8), cost), 2) == [1.0, 1.0]


def test_speeds_need_measurements() -> None:
    two = np.array([[1.0, 2.0]] * 2)
    assert measured_speeds(rows(two), 2) == [1.0, 1.0], "too few steps"
    assert measured_speeds(rows(np.array([[1.0, 2.0]] * 8)), 3) == [1.0, 1.0, 1.0], "of another number of ranks"
    assert measured_speeds(rows(np.full((8, 2), -1.0)), 2) == [1.0, 1.0], "unknown"
    outlier = np.array([[1.0, 2.0]] * 7 + [[50.0, 2.0]])
    assert measured_speeds(rows(outlier), 2) == [1.0, 0.5], "one bad step changes nothing"


def test_the_ledger_keeps_speeds_and_loads(ledger: Ledger) -> None:
    loads = rows(np.array([[0.123456, 2.0]]))[0].loads
    assert loads is not None
    assert ledger.rank_speeds(0, "policy") is None
    ledger.record_rank_speeds(0, "policy", [1.0, 0.5])
    assert ledger.rank_loads() == [], "a step that was not trained has no loads"
    ledger.record_rank_loads(0, {"policy": loads, "critic": loads})
    ledger.record_rank_loads(1, {"policy": loads})
    assert ledger.rank_speeds(0, "policy") == [1.0, 0.5]
    assert [(each.step, each.role, each.speeds) for each in ledger.rank_loads()] == [
        (0, "critic", None), (0, "policy", [1.0, 0.5]), (1, "policy", None),
    ]  # fmt: skip
    assert [each.step for each in ledger.rank_loads("policy", before=1)] == [0]
    (newest,) = ledger.rank_loads("policy", last=1)
    assert newest.step == 1 and newest.loads is not None and newest.loads.work_s == [0.1235, 2.0]
    ledger.rewind(1)
    assert [each.step for each in ledger.rank_loads("policy")] == [0]


def test_even_a_rank_that_hardly_moves_has_a_positive_speed() -> None:
    work = np.ones((5, 2))
    work[:, 1] = 5000.0
    speeds = measured_speeds(rows(work), 2)
    assert speeds[0] == 1.0 and speeds[1] > 0
    assert normalised_speeds(speeds, 2) is not None
