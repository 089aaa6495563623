"""Lost engines: their completions are kept, their requests go to others, and they are replaced."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from engine_stub import FakeLauncher, FakeWeights, make_client, requests, until

from lockstep.base.wait_state import Stalled, WaitTimeout
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.rpc.futures import PendingCall
from lockstep.config.fault_tolerance import RecoveryConfig as Config
from lockstep.config.rollout import SamplingConfig
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.errors import BadLogits
from lockstep.run.errors import GaveUp
from lockstep.run.recovery.recovery_manager import RecoveryManager


def names(found: Sequence[Any]) -> list[str]:
    return [each.request for each in found]


def test_other_engines_get_the_unfinished_requests(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one, other), recovery = make_client(ledger, launcher, 2)
    launcher.allowed.clear()
    engines.load_weights(FakeWeights(), 3)
    engines.submit([requests("a", *(f"a/{k}" for k in range(3)))])
    engines.submit([requests("b", "b/0")])
    assert engines.collect() == []
    one.tell("a/1")
    one.die()
    assert other.asked() == ["b/0", "a/0", "a/2"], "reissued at once, without another call"
    assert names(engines.collect()) == ["a/1"], "its last completions are kept"
    other.tell("b/0", "a/2", "a/0")
    assert sorted(names(engines.collect())) == ["a/0", "a/2", "b/0"]
    launcher.allowed.set()
    successor = launcher.wait(engines, 2)
    assert successor.calls == [("load_weights", ("/w", 3))]
    engines.submit([requests("c", "c/0")])
    assert successor.asked() == ["c/0"] or other.asked()[-1] == "c/0"
    recovery.flush()
    events = [event.fields for event in ledger.events() if event.kind == "recovery"]
    assert [event["action"] for event in events] == ["failed", "restarted"]
    assert (events[1]["worker"], events[1]["what"], events[1]["requests"]) == ("engine-0", "died (SIGKILL)", 2)


def test_the_only_engine_is_replaced_with_the_newest_weights(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one,), _ = make_client(ledger, launcher, 1)
    launcher.allowed.clear()
    engines.load_weights(FakeWeights(), 3)
    engines.submit([requests("a", "a/0")], queue="q")
    one.die()
    engines.submit([requests("b", "b/0")], queue="q")
    engines.load_weights(FakeWeights(), 4)
    assert engines.collect("q") == []
    launcher.allowed.set()
    successor = launcher.wait(engines)
    assert successor.calls[:2] == [("load_weights", ("/w", 4)), ("submit", successor.calls[1][1])]
    assert successor.asked() == ["a/0", "b/0"]
    assert engines.collect("q") == []
    successor.tell("a/0", "b/0")
    assert names(engines.collect("q")) == ["a/0", "b/0"]
    assert launcher.killed == ["engine-0"]


def test_an_engine_without_weights_on_its_node_rejoins_with_them(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    engines.load_weights(FakeWeights(), 3)
    engines.submit([requests("a", "a/0")])
    engines.submit([requests("b", "b/0")])
    weights = FakeWeights("engine-0")
    engines.load_weights(weights, 4)
    assert engines.workers == [other]
    assert other.asked() == ["b/0", "a/0"], "its unfinished requests go to others"
    assert ("load_weights", ("/w", 4)) in other.calls
    engines.submit([requests("c", "c/0")])
    assert other.asked()[-1] == "c/0"
    weights.fetch_allowed.set()
    until(lambda: len(engines.workers) == 2)
    assert [name for name, _ in one.calls][-2:] == ["renew", "load_weights"]
    assert one.calls[-1][1] == ("/w", 4)
    assert launcher.launched == [], "the process is the same"
    engines.submit([requests("d", "d/0")])
    assert one.asked()[-1] == "d/0"


def test_engines_that_have_a_version_do_not_load_it(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    engines.load_weights(FakeWeights("engine-0"), 3, having=[one])
    assert engines.workers == [one, other], "whether its node has the version does not matter"
    assert (one.calls, other.calls) == ([], [("load_weights", ("/w", 3))])


def test_an_engine_whose_node_cannot_get_the_weights_is_replaced(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, _, _ = make_client(ledger, launcher, 1)

    class Lost(FakeWeights):
        def fetch(self, worker: Any, version: int) -> None:
            if worker.name in self.behind:
                raise Stalled("transfer", "courier", "weights", 1.0, 1.0)

    weights = Lost("engine-0")
    engines.load_weights(weights, 4)
    successor = launcher.wait(engines)
    assert successor.calls[0] == ("load_weights", ("/w", 4))
    assert launcher.killed == ["engine-0"]


def test_killed_engines_are_replaced_whether_serving_or_excluded(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    assert not engines.kill_engines(lambda worker: worker.pid == 7, "pid 7 reads")
    one.pid, hung = 7, list[Any]()

    def submit(method: Any, *arguments: Any) -> PendingCall[Any]:
        one.calls.append((method.__name__, arguments))
        hung.append(PendingCall(one, method.__name__, lambda payload: None))
        return hung[-1]

    one.submit = submit  # type: ignore[method-assign]
    engines.load_weights(FakeWeights("engine-0"), 3)
    assert engines.workers == [other] and [name for name, _ in one.calls] == ["renew"], "it is excluded, and hangs"
    assert engines.kill_engines(lambda worker: worker.pid == 7, "pid 7 reads")
    assert launcher.killed == ["engine-0"]
    hung[0].fail(WorkerDied("engine-0", 0, -9, ""))
    successor = launcher.wait(engines, 2)
    assert not engines.kill_engines(lambda worker: worker.pid == 7, "pid 7 reads")
    successor.pid = 8
    assert engines.kill_engines(lambda worker: worker.pid == 8, "pid 8 reads")
    assert launcher.killed.count(successor.name) >= 1
    until(lambda: len(engines.workers) == 2)
    assert launcher.launched[-1] is not successor and successor not in engines.workers


@pytest.mark.parametrize("where", ["launch", "weights"])
def test_an_unexpected_error_of_the_failover_is_raised(ledger: Ledger, launcher: FakeLauncher, where: str) -> None:
    engines, (one,), _ = make_client(ledger, launcher, 1)
    surprise, weights = KeyError("node-b"), FakeWeights("engine-0")

    def fetch(worker: Any, version: int) -> None:
        raise surprise

    def loses() -> None:
        if where == "launch":
            launcher.errors = [surprise]
            one.die()
        else:
            engines.load_weights(weights, 4)
        until(lambda: engines._pool._error is not None)
        engines.collect()

    weights.fetch = fetch  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="node-b"):
        loses()


def test_the_run_continues_while_an_engine_waits_for_a_node(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    timeout = WaitTimeout("placement", "nodes", "a place for engine-0.1", 5.0)
    launcher.place_errors, launcher.errors = [timeout, timeout], [timeout]  # the last: its place is lost again
    engines.submit([requests("a", "a/0")])
    one.die()
    assert other.asked() == ["a/0"]
    assert launcher.wait(engines, 2).spec.rank == 0 and launcher.errors == launcher.place_errors == []
    launcher.place_allowed.clear()
    launcher.place_errors = [WaitTimeout("placement", "nodes", "a place for engine-1.1", 5.0)]
    for each in engines.workers:
        each.die()  # type: ignore[attr-defined]
    launcher.place_allowed.set()
    until(lambda: engines._pool._error is not None)
    with pytest.raises(WaitTimeout, match="a place for engine-1"):
        engines.collect()


def test_a_stalled_engine_is_replaced(ledger: Ledger, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, _, recovery = make_client(ledger, launcher, 1)
    engines.stall_s = 0.5
    engines.submit([requests("a", "a/0")], queue="q")

    def look() -> list[Any] | None:
        if launcher.launched and launcher.launched[0].open:
            launcher.launched[0].tell("a/0")
        return engines.collect("q") or None

    assert names(engines.wait_until(look, "the test")) == ["a/0"]
    recovery.flush()
    (failed, *_) = [event.fields for event in ledger.events() if event.kind == "recovery"]
    assert failed["what"] == "made no progress for 0.5 s"


def test_a_used_up_budget_ends_the_run(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one,), _ = make_client(ledger, launcher, 1, restarts=2)
    launcher.errors = [WorkerDied("engine-0.1", 0, 3, "")]
    one.die()
    launcher.wait(engines).die()
    with pytest.raises(
        GaveUp, match=r"not restarted: the limit of 2 restarts within 3600 s is reached .*rollout.max_restarts 2"
    ):
        engines.collect()
    assert len(launcher.launched) == 1


def test_an_error_that_needs_no_explanation_is_raised_unchanged(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one,), _ = make_client(ledger, launcher, 1)
    engines.submit([requests("a", "a/0")])
    engines.collect()
    error = RemoteError("engine-0", 0, "lockstep.rollout.errors.BadLogits", "not finite", "", BadLogits.error_code)
    one.open.pop()[0].fail(error)
    with pytest.raises(RemoteError) as raised:
        engines.collect()
    assert raised.value is error and launcher.launched == []


def test_no_engine_is_replaced_after_close_or_without_recovery(ledger: Ledger, launcher: FakeLauncher) -> None:
    engines, (one, other), _ = make_client(ledger, launcher, 2)
    engines.close()
    one.die()
    disabled = RecoveryManager(Config(enable=False), ledger)
    off = RolloutClient([other], SamplingConfig(), 0, 30.0, launcher, disabled)  # type: ignore[list-item]
    off.submit([requests("a", "a/0")])
    other.die()
    with pytest.raises(WorkerDied):
        off.collect()
    assert launcher.launched == []


def test_nothing_is_lost_whenever_engines_die(ledger: Ledger, launcher: FakeLauncher) -> None:
    """Many requests, engines that die again and again while their answers are read: each completion comes once."""
    engines, workers, _ = make_client(ledger, launcher, 3, restarts=1000)
    wanted = [f"{group}/{k}" for group in range(40) for k in range(3)]
    engines.submit([requests(id.partition("/")[0], id) for id in wanted], queue="q")
    stop, found, dead = threading.Event(), [], set()

    def work() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            for each in [*workers, *launcher.launched]:
                if each.death is None and each.open:
                    left = [id for id in each.asked() if id not in dead]
                    dead.update(left[:2])
                    each.tell(*left[:2])
            if turn % 5 == 0:
                living = [each for each in [*workers, *launcher.launched] if each.death is None]
                if living:
                    lost = living[turn % len(living)]
                    dead.difference_update(id for id in lost.asked() if id not in found)
                    lost.die()
            time.sleep(0.001)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def look() -> bool | None:
        for each in engines.collect("q"):
            found.append(each.request)
        return True if len(found) >= len(wanted) else None

    engines.wait_until(look, "the test")
    stop.set()
    thread.join(5)
    assert sorted(found) == sorted(wanted)


def test_a_stall_without_open_requests_blames_no_engine(ledger: Ledger, launcher: FakeLauncher) -> None:
    error = Stalled("queue", "rollout engines", "x", 1.0, 1.0)
    engines, _, _ = make_client(ledger, launcher, 1)
    assert not engines._pool.replace_stalled(error), "nobody owes anything: nobody is to blame"
