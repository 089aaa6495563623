"""Pipelines whose stages pass messages: a healthy one is silent, and of a stage that hangs no neighbour is named."""

from pathlib import Path

import pytest

from benchmarks.faults.emulated_nccl import NAME
from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind, VerdictLevel
from tests.faults import pipeline_ranks
from tests.faults.live_diagnosis import LiveDiagnosis, ranks_of
from tests.faults.pipeline_ranks import CULPRIT
from tests.faults.ranks import BACKENDS, BOUND_S, Ranks, ranks

SCHEDULES = [
    pytest.param(pipeline_ranks.one_forward_one_backward, marks=pytest.mark.slow),
    pytest.param(pipeline_ranks.interleaved, marks=pytest.mark.slow),
    pipeline_ranks.exchange,
]


@pytest.fixture(autouse=True)
def beacons(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "beacons"))


def pipeline(folder: Path, schedule, backend: str, fault: str):
    return ranks(folder, schedule, 3, backend, {"TORCH_NCCL_ENABLE_TIMING": "1", "FAULT": fault})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_healthy_pipeline_is_silent(tmp_path, backend, schedule):
    with pipeline(tmp_path, schedule, backend, "none") as three:
        live = LiveDiagnosis()
        while not all((tmp_path / f"result-{rank}.json").exists() for rank in range(3)):
            assert live.verdicts() == []
        assert [each.error for each in three.end()] == [""] * 3


@pytest.mark.parametrize("fault", ["stopped", "sleeps"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_stage_that_hangs_is_named_and_no_neighbour(tmp_path, backend, schedule, fault):
    with pipeline(tmp_path, schedule, backend, fault) as three:
        found, named = first_confirmed(three)
        assert (found.kind, ranks_of(found)) == (VerdictKind.ABSENT, [CULPRIT]), found.explanation
        assert named == {CULPRIT}
        three.go()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_stage_whose_kernel_hangs_is_named_and_no_neighbour(tmp_path, schedule):
    """All hosts have issued their messages, and the links are innocent: one device has not started them."""
    with pipeline(tmp_path, schedule, NAME, "kernel") as three:
        found, named = first_confirmed(three)
        assert (found.kind, ranks_of(found)) == (VerdictKind.DEVICE_LAG, [CULPRIT]), found.explanation
        assert named == {CULPRIT}


def first_confirmed(three: Ranks) -> tuple[Verdict, set[int | None]]:
    """The first confirmed verdict, and all ranks that were named until then."""
    named: set[int | None] = set()
    three.until(CULPRIT, bool)

    def confirmed(verdict: Verdict) -> bool:
        named.update(ranks_of(verdict))
        return verdict.level is VerdictLevel.CONFIRMED

    return LiveDiagnosis().until(confirmed, BOUND_S), named
