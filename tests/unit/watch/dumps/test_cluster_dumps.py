"""The analysis of dumps of simulated clusters: it names the faulty ranks and no others."""

import pytest
from cluster_dumps import Recorder, draw_recorder
from cluster_scores import WRITES_A_DUMP, incomplete, judge, several, single, summary
from cluster_simulator import make_cluster, run


@pytest.mark.parametrize("seed", range(5))
def test_a_program_without_faults_ends_and_nobody_is_named(seed: int) -> None:
    cluster = run(make_cluster(seed))
    assert not cluster.stalled
    assert judge(cluster, draw_recorder(seed)).silent


def test_a_stopped_host_is_named() -> None:
    scores = summary(single(seed, ("host",)) for seed in range(5010, 5020))
    assert scores["exact"] >= 9 and not scores["innocent"], scores


@pytest.mark.parametrize("seed", [*range(1000, 1003), 50396])
def test_no_innocent_is_named_with_all_dumps(seed: int) -> None:
    assert not several(seed).innocents


@pytest.mark.parametrize("seed", [*range(1000, 1002), 20470, pytest.param(20402, marks=pytest.mark.slow)])
def test_no_innocent_is_named_without_some_dumps(seed: int) -> None:
    assert not incomplete(seed).innocents


def test_a_healthy_cluster_is_benign_with_active_entries_only() -> None:
    score = judge(run(make_cluster(3)), Recorder(only_active=True))
    assert score.verdicts[0].cause == "benign"


def test_what_a_full_ring_of_unfinished_operations_has_lost_has_not_ended() -> None:
    """Dumps of active entries, whose oldest ones have been overwritten: what is missing may be what ranks wait in."""
    score = single(30243, WRITES_A_DUMP[1:])
    assert not score.innocents


@pytest.mark.parametrize("seed", [40222, 40005])
def test_operations_that_may_have_been_lost_prove_nothing(seed: int) -> None:
    """40222: a send that may have ended makes no cycle; 40005: a start that may have been lost stops no device."""
    score = single(seed, ("host",) if seed == 40005 else WRITES_A_DUMP[1:])
    assert not score.innocents and score.covered


@pytest.mark.parametrize("seed", [40250, 40288, 40214])
def test_a_device_that_has_not_started_its_oldest_operation_is_named(seed: int) -> None:
    assert single(seed, WRITES_A_DUMP[1:]).exact


def test_ranks_whose_oldest_operation_is_lost_prove_no_stalled_link() -> None:
    """All members may be in the collective, and none certainly is; a late rank is known."""
    score = single(30146, ("host",))
    assert score.exact


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_figures_of_the_documentation() -> None:
    healthy = [judge(run(make_cluster(seed)), draw_recorder(seed)).silent for seed in range(100)]
    assert all(healthy), healthy
    hosts = summary(single(seed, ("host",)) for seed in range(60000, 60200))
    others = summary(single(seed, WRITES_A_DUMP[1:]) for seed in range(60200, 60300))
    many = summary(several(seed) for seed in range(60300, 60400))
    missing = summary(incomplete(seed) for seed in range(60400, 60500))
    print(f"one host: {hosts}", f"one device: {others}", f"several: {many}", f"dumps missing: {missing}", sep="\n")
    assert hosts["exact"] >= 0.98 * hosts["cases"]
    assert hosts["innocent"] == others["innocent"] == many["innocent"] == missing["innocent"] == 0
    assert others["exact"] >= 0.7 * others["cases"] and others["covered"] == others["cases"]
    assert many["exact"] >= 0.7 * many["cases"] and many["covered"] >= 0.95 * many["cases"]
    assert missing["covered"] >= 0.9 * missing["cases"]
