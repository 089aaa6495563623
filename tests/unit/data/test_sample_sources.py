import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.sample_order import EpochOrder, make_uid, parse_uid, permutation


@given(st.integers(1, 200), st.integers(0, 2**63), st.integers(0, 5))
def test_each_row_once_per_epoch(size, seed, epoch) -> None:
    taken = EpochOrder(np.arange(size) * 3, seed, True).take(epoch * size, size)
    assert {e for e, _ in taken} == {epoch}
    assert sorted(row for _, row in taken) == [3 * i for i in range(size)]


@given(st.integers(1, 40), st.integers(0, 100), st.integers(0, 50), st.integers(0, 50))
def test_taking_in_parts_equals_taking_at_once(size, start, first, second) -> None:
    order = EpochOrder(np.arange(size), 7, True)
    again = EpochOrder(np.arange(size), 7, True)
    assert order.take(start, first) + order.take(start + first, second) == again.take(start, first + second)


def test_order_depends_on_seed_and_epoch_and_never_changes() -> None:
    orders = {tuple(permutation(20, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    # Fixed for ever: a resumed run continues at a position of this order.
    assert permutation(10, 42, 0).tolist() == EXPECTED


EXPECTED = [6, 2, 5, 7, 0, 9, 4, 3, 8, 1]


def test_orders_are_uniform() -> None:
    counts = np.zeros((6, 6))
    for epoch in range(6000):
        counts[np.arange(6), permutation(6, 1, epoch)] += 1
    assert np.abs(counts / 1000 - 1).max() < 0.15  # five standard deviations


def test_without_shuffle_the_order_is_the_files() -> None:
    assert EpochOrder(np.arange(3), 0, False).take(2, 3) == [(0, 2), (1, 0), (1, 1)]


def test_uid_round_trips() -> None:
    assert parse_uid(make_uid(3, 14)) == (3, 14)
    for bad in ("3", "a:1", "1:-2", ""):
        with pytest.raises(ValueError, match="is not a uid"):
            parse_uid(bad)


def test_impossible_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="at position -1"):
        EpochOrder(np.arange(3), 0, True).take(-1, 2)
    with pytest.raises(ValueError, match="at least one row"):
        EpochOrder(np.arange(0), 0, True)
