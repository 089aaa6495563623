"""Loads of ranks in the ledger, the speeds that follow from them, and the remark about a slow rank."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.arrangement.rank_arrangement import normalised_speeds
from lockstep.ledger import Ledger
from lockstep.ledger.rank_loads import REMARK_STEPS, RankLoadRow, RankLoads, measured_speeds, slow_ranks


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


RANKS = 4


def long_run(ledger: Ledger, steps: int, ranks: int = RANKS) -> list[RankLoads]:
    """Steps with loads of random sizes, and checkpoints at the end and two steps before."""
    random = np.random.default_rng(7)
    stored = []
    for step in range(len(ledger.rank_loads()), steps):
        work, blocked, memory = (np.round(random.uniform(1, 9, ranks), 3).tolist() for _ in range(3))
        tokens = random.integers(1000, 9999, ranks).tolist()
        loads = RankLoads(work, blocked, memory, tokens, [float(each) for each in tokens])
        ledger.record_rank_speeds(step, "policy", [1.0] * ranks)
        ledger.record_rank_loads(step, {"policy": loads})
        stored.append(loads)
    ledger.record_checkpoint(steps - 3, Path("/checkpoints/a"))
    ledger.record_checkpoint(steps - 1, Path("/checkpoints/b"))
    return stored


def test_a_long_run_keeps_every_tenth_step_and_all_sums(ledger: Ledger) -> None:
    stored = long_run(ledger, 467)
    before, rows = ledger.rank_load_sums()["policy"], ledger.rank_loads()
    assert ledger.thinned_load_steps() == 0 and len(rows) == 467
    ledger.compact()
    # The second newest checkpoint is after 465 steps; 64 steps before it stay.
    assert ledger.thinned_load_steps() == 400
    kept = ledger.rank_loads()
    assert [each.step for each in kept] == [*range(0, 400, 10), *range(400, 467)]
    assert kept == [each for each in rows if each.step in {row.step for row in kept}], "they are as they were"
    sums = ledger.rank_load_sums()["policy"]
    assert sums.steps == before.steps == 467 and sums.known == [True] * RANKS
    for name in ("work_s", "blocked_s", "tokens"):
        expected = np.sum([getattr(each, name) for each in stored], axis=0)
        assert getattr(sums, name) == pytest.approx(expected.tolist(), rel=1e-3), name
        assert getattr(sums, name) == pytest.approx(getattr(before, name), rel=1e-12), name
    assert sums.memory == before.memory
    with Ledger.reader(ledger.folder) as reader:
        assert reader.rank_loads() == kept and reader.rank_load_sums()["policy"] == sums


def test_what_remarks_and_speeds_need_is_never_thinned(ledger: Ledger) -> None:
    long_run(ledger, 467)
    known = {step: ledger.rank_loads("policy", REMARK_STEPS, before=step) for step in (465, 466, 467)}
    ledger.compact()
    assert {step: ledger.rank_loads("policy", REMARK_STEPS, before=step) for step in known} == known
    assert ledger.rank_speeds(465, "policy") == [1.0] * RANKS
    assert [each.step for each in ledger.rank_loads("policy", 5, before=402)] == [370, 380, 390, 400, 401]
    assert ledger.rank_loads("critic") == []


def test_some_steps_are_chosen_at_even_distances(ledger: Ledger) -> None:
    long_run(ledger, 467)
    assert [each.step for each in ledger.rank_loads(most=5)] == [0, 117, 234, 351, 466]
    ledger.compact()
    assert [each.step for each in ledger.rank_loads(most=5)] == [0, 120, 240, 360, 466], "what is kept decides"
    assert [each.step for each in ledger.rank_loads(most=40)] == [*range(0, 467, 20), 466]
    assert len(ledger.rank_loads(most=1000)) == 48, "as far apart as the steps that are kept"


def test_rewinding_into_thinned_steps_keeps_sums_in_proportion(ledger: Ledger) -> None:
    long_run(ledger, 467)
    ledger.compact()
    whole = ledger.rank_load_sums()["policy"]
    ledger.rewind(250)
    assert ledger.thinned_load_steps() == 250
    assert [each.step for each in ledger.rank_loads()] == list(range(0, 250, 10))
    sums = ledger.rank_load_sums()["policy"]
    assert sums.steps == 250 and sums.work_s == pytest.approx([each * 250 / 467 for each in whole.work_s], rel=0.1)
    for step in range(250, 467):
        loads = RankLoads([1.0] * RANKS, [1.0] * RANKS, [1.0] * RANKS, [1] * RANKS, [1.0] * RANKS)
        ledger.record_rank_loads(step, {"policy": loads})
    ledger.record_checkpoint(464, Path("/checkpoints/a"))
    ledger.record_checkpoint(466, Path("/checkpoints/b"))
    ledger.compact()
    again = ledger.rank_load_sums()["policy"]
    assert again.steps == 467 and again.work_s == pytest.approx([each + 217 for each in sums.work_s])
    assert [each.step for each in ledger.rank_loads()] == [*range(0, 400, 10), *range(400, 467)]


def test_a_thinned_step_that_is_trained_again_is_counted_once(ledger: Ledger) -> None:
    stored = long_run(ledger, 467)
    ledger.compact()
    for step in range(330, 467):
        ledger.record_rank_loads(step, {"policy": stored[step]})
    assert ledger.rank_load_sums()["policy"].steps == 467
    assert [each.step for each in ledger.rank_loads()] == [*range(0, 330, 10), *range(330, 467)]


def test_sums_are_those_of_the_newest_number_of_ranks(ledger: Ledger) -> None:
    long_run(ledger, 150, ranks=2)
    long_run(ledger, 467, ranks=3)
    ledger.compact()
    sums = ledger.rank_load_sums()["policy"]
    assert sums.steps == 317 and len(sums.work_s) == 3


def test_a_run_of_an_earlier_version_has_no_thinned_steps(ledger: Ledger) -> None:
    long_run(ledger, 120)
    with ledger._index.transaction() as transaction:
        transaction.execute("DROP TABLE load_blocks")
    with Ledger.reader(ledger.folder) as reader:
        assert len(reader.rank_loads()) == 120 and reader.rank_load_sums()["policy"].steps == 120
        assert reader.thinned_load_steps() == 0


def test_unknown_seconds_stay_unknown(ledger: Ledger) -> None:
    stored = long_run(ledger, 467)
    unknown = RankLoads([-1.0, *stored[5].work_s[1:]], [-1.0, *stored[5].blocked_s[1:]], *map(list, [
        stored[5].memory, stored[5].tokens, stored[5].cost]))  # fmt: skip
    ledger.record_rank_loads(5, {"policy": unknown})
    ledger.compact()
    assert ledger.rank_load_sums()["policy"].known == [False, True, True, True]


def test_the_folder_of_a_long_run_of_many_ranks_stays_small(ledger: Ledger) -> None:
    """2,000 steps of 64 ranks: 9 MB unless they are thinned. The file does not shrink, but its free pages are used."""
    random = np.random.default_rng(1)
    for step in range(2000):
        work, blocked = (random.uniform(0.1, 3, 64).tolist() for _ in range(2))
        tokens = random.integers(20_000, 30_000, 64).tolist()
        with ledger._index.transaction() as transaction:
            row = RankLoads(work, blocked, (random.uniform(60, 70, 64) * 1e9).tolist(), tokens, tokens)
            load = json.dumps({name: [float(f"{value:.4g}") for value in of] for name, of in asdict(row).items()})
            transaction.put("loads", step=step, role="policy", speeds="null", load=load)
        if step % 100 == 99:
            ledger.record_checkpoint(step, Path("/checkpoints/c"))
            ledger.compact()
    raw = ledger._index.rows("SELECT sum(length(load)) FROM loads")[0][0]
    blocks = ledger._index.rows("SELECT sum(length(sums) + length(rows)), count(*) FROM load_blocks")[0]
    assert blocks[1] == 18 and blocks[0] < 700_000 and raw < 1_000_000
    assert ledger.rank_load_sums()["policy"].steps == 2000
