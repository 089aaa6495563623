"""Ranks whose collectives return before they have run, as with NCCL: what is recorded, and which rank is named."""

import pytest

from benchmarks.faults.emulated_nccl import NAME
from lockstep.watch.diagnosis.verdict import VerdictKind, VerdictLevel
from tests.faults import device_ranks
from tests.faults.live_diagnosis import LiveDiagnosis, ranks_of
from tests.faults.ranks import ranks

BACKENDS = ("gloo", NAME)


@pytest.fixture(autouse=True)
def beacons(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "beacons"))


def test_a_call_that_has_returned_is_not_completed(tmp_path):
    """Stamping it as completed makes a hung job look idle, and its ranks innocent."""
    with ranks(tmp_path, device_ranks.left_alone, world=3, backend=NAME) as three:
        late = three.until(2, lambda found: found["default_pg"].completed == 2)["default_pg"]
        assert (late.entered, late.inside) == (2, None)
        for rank in (0, 1):
            ahead = three.until(rank, lambda found: found["default_pg"].entered == 4)["default_pg"]
            assert ahead.completed < 3
            ahead = three.until(rank, lambda found: found["default_pg"].completed == 2)["default_pg"]
            assert (ahead.inside.seq, ahead.inside.asynchronous) == (3, True)
        live = LiveDiagnosis()
        found = live.until(lambda verdict: verdict.level is VerdictLevel.CONFIRMED)
        assert (found.kind, ranks_of(found)) == (VerdictKind.ABSENT, [2])
        assert found.collective.seq == 3
        three.go()


def test_a_kernel_that_hangs_before_a_collective_is_named(tmp_path):
    """All ranks have issued the collective, and the network is innocent: one device has not started it."""
    timing = {"TORCH_NCCL_ENABLE_TIMING": "1"}
    with ranks(tmp_path, device_ranks.stuck_kernel, 3, NAME, timing) as three:
        for rank, started in enumerate((3, 2, 3)):
            three.until(
                rank, lambda found, n=started: (found["default_pg"].entered, found["default_pg"].started) == (3, n)
            )
        found = LiveDiagnosis().until(lambda verdict: verdict.level is VerdictLevel.CONFIRMED)
        assert (found.kind, ranks_of(found)) == (VerdictKind.DEVICE_LAG, [1])
        assert "has not started" in found.explanation


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_receive_that_nobody_sends_to_names_the_sender(tmp_path, backend):
    with ranks(tmp_path, device_ranks.unsent, backend=backend) as both:
        found = LiveDiagnosis().until(lambda verdict: verdict.level is VerdictLevel.CONFIRMED)
        assert (found.kind, ranks_of(found)) == (VerdictKind.ABSENT, [0])
        assert "'pipeline 0->1'" in found.explanation
        both.go()


@pytest.mark.parametrize("backend", BACKENDS)
def test_opposite_orders_are_a_deadlock_despite_messages(tmp_path, backend):
    with ranks(tmp_path, device_ranks.opposite_order, backend=backend):
        found = LiveDiagnosis().until(lambda verdict: verdict.level is VerdictLevel.CONFIRMED)
        assert (found.kind, ranks_of(found)) == (VerdictKind.CYCLE, [0, 1])
        assert found.confidence < 0.8
