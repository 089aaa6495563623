"""Engines that share devices: none of them is on the devices while they sleep, whatever happens to them."""

import threading
import time
from collections.abc import Callable

from engine_stub import FakeLauncher, FakeWeights, FakeWorker, make_client, requests, until

from lockstep.cluster.protocol import WorkerDied
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.rollout_client import RolloutClient


def later(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def calls(worker: FakeWorker) -> list[str]:
    return [name for name, _ in worker.calls]


def test_engines_complete_their_requests_before_they_sleep(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    engines.submit([requests("a", "a/0", "a/1")], queue="q")
    sleeping = later(engines.sleep)
    one.tell("a/0")
    sleeping.join(0.3)
    assert sleeping.is_alive() and "sleep" not in calls(one) + calls(other), "a request is open"
    one.tell("a/1")
    sleeping.join(10)
    assert calls(one)[-1] == calls(other)[-1] == "sleep"
    assert sorted(each.request for each in engines.collect("q")) == ["a/0", "a/1"], "they are kept for their queue"
    engines.sleep()
    assert calls(other).count("sleep") == 1, "they sleep already"


def test_an_engine_that_dies_in_the_turn_of_others_is_replaced_in_its_own(
    ledger: Ledger, launcher: FakeLauncher
) -> None:
    engines, (one,), _ = make_client(ledger, launcher, 1)
    engines.load_weights(FakeWeights(), 3)
    engines.sleep()
    one.die()
    engines.sleep()
    later(lambda: None).join(0.2)
    assert not launcher.launched and engines.workers == [], "its memory may be in use"
    engines.wake()
    successor = launcher.wait(engines)
    assert calls(successor) == ["load_weights"]
    engines.sleep()
    assert calls(successor)[-1] == "sleep"


def test_an_engine_that_is_starting_serves_before_others_begin(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one,), _ = make_client(ledger, launcher, 1)
    launcher.allowed.clear()
    one.die()
    until(lambda: launcher.starting == 1)
    sleeping = later(engines.sleep)
    sleeping.join(0.3)
    assert sleeping.is_alive(), "it allocates memory"
    launcher.allowed.set()
    sleeping.join(10)
    assert calls(launcher.launched[0]) == ["sleep"]


def test_an_engine_that_cannot_start_is_killed_and_waits_for_its_next_turn(
    ledger: Ledger, launcher: FakeLauncher
) -> None:
    engines, (one,), _ = make_client(ledger, launcher, 1)
    launcher.allowed.clear()
    launcher.errors = [WorkerDied("engine-0.1", 0, 1, "no memory")]
    one.die()
    until(lambda: launcher.starting == 1)
    sleeping = later(engines.sleep)
    launcher.allowed.set()
    sleeping.join(10)
    assert not sleeping.is_alive() and not launcher.launched
    engines.wake()
    launcher.wait(engines)


def test_a_lost_engine_has_ended_before_others_begin(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    launcher.kill_allowed.clear()
    one.die()
    sleeping = later(engines.sleep)
    sleeping.join(0.3)
    assert sleeping.is_alive() and calls(other) == [], "its process may still have memory"
    launcher.kill_allowed.set()
    sleeping.join(10)
    assert launcher.killed == ["engine-0"] and calls(other) == ["sleep"]


def test_an_engine_that_waits_for_a_node_delays_no_other_role_and_starts_in_its_own_turn(
    ledger: Ledger, launcher: FakeLauncher
) -> None:
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    launcher.place_allowed.clear()
    one.die()
    began = time.monotonic()
    for _ in range(2):  # steps
        engines.sleep()
        engines.wake()
    engines.sleep()
    assert time.monotonic() - began < engines.stall_s / 2 and calls(other) == ["sleep"] * 3
    launcher.place_allowed.set()
    until(lambda: len(engines._pool.failover._deferred) == 1)
    assert not launcher.launched, "another role uses the devices"
    engines.wake()
    assert launcher.wait(engines, 2).spec.rank == 0


def test_an_engine_that_makes_no_progress_is_killed_for_the_next_role(ledger: Ledger, launcher: FakeLauncher) -> None:
    """It has no weights yet, as its node gets none."""
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    engines = RolloutClient([one, other], engines.sampling, 0, 0.3, launcher, engines._pool.failover._recovery)  # type: ignore[list-item]
    weights = FakeWeights("engine-0")
    engines.load_weights(weights, 1)
    assert engines.workers == [other]
    sleeping = later(engines.sleep)
    until(lambda: "engine-0" in launcher.killed)
    assert calls(other)[-1] != "sleep", "the engine is not yet known to have ended"
    weights.fetch_allowed.set()
    sleeping.join(10)
    assert not sleeping.is_alive() and calls(other)[-1] == "sleep"


def test_an_engine_that_fails_to_sleep_is_killed_at_once(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    one.death = WorkerDied("engine-0", 0, -9, "")
    engines.sleep()
    assert set(launcher.killed) == {"engine-0"} and engines.workers == [other] and not launcher.launched
    engines.wake()
    launcher.wait(engines, 2)
