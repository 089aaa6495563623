"""Ranks whose collectives return before they have run, as with NCCL: what is recorded, and which rank is named."""

import time

import pytest

from benchmarks.faults.emulated_nccl import NAME, SPIN_VARIABLE
from lockstep.watch.attach import run_observer
from lockstep.watch.diagnosis.verdict import StallThresholds, VerdictKind, VerdictLevel
from tests.faults import device_ranks, recorded_ranks
from tests.faults.live_diagnosis import LiveDiagnosis, ranks_of
from tests.faults.ranks import BACKENDS, RUN, ranks


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


def test_a_rank_that_froze_after_a_collective_in_the_background_is_absent(tmp_path):
    """Its beacon shows that collective as unfinished for ever, because it holds the lock that counting needs."""
    with ranks(tmp_path, recorded_ranks.frozen_in_background) as both:
        both.until_inside(0, "all_reduce")
        frozen = both.communicators(1)["second"]
        assert (frozen.entered, frozen.completed, both.communicators(0)["second"].completed) == (2, 1, 2)
        found = LiveDiagnosis().until(lambda verdict: verdict.level is VerdictLevel.CONFIRMED)
        assert (found.kind, ranks_of(found)) == (VerdictKind.ABSENT, [1])
        assert "has not entered all_reduce #1 on 'default_pg'" in found.explanation


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


def test_a_wait_that_uses_a_core_is_confirmed_like_one_that_sleeps(tmp_path, monkeypatch):
    """CUDA waits spin: a rank whose device is stuck looks busy, and is confirmed after the usual bound all the same."""
    monkeypatch.setattr(run_observer, "STACK_INTERVAL_S", 0.3)
    variables = {"TORCH_NCCL_ENABLE_TIMING": "1", SPIN_VARIABLE: "1"}
    with ranks(tmp_path, device_ranks.stuck_kernel, 2, NAME, variables) as both:
        both.until(1, lambda found: found["default_pg"].entered == 3)
        patience = StallThresholds(notice_s=1.0, still_s=4.0, busy_factor=100.0)
        observer, end = run_observer.RunObserver(RUN, patience), time.monotonic() + 60.0
        found = []
        while not (found and found[0].level is VerdictLevel.CONFIRMED):
            assert time.monotonic() < end, found
            found = observer.poll()
            time.sleep(0.2)
        assert (found[0].kind, ranks_of(found[0])) == (VerdictKind.DEVICE_LAG, [1])
        process = observer._monitor.tracked["policy-1"]
        assert process.active_ns > process.same_stack_ns + 1e9, "the wait used no core"
        assert any("in a wait for its device" in each.text for each in found[0].evidence)
