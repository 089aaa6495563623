"""Engines that are far behind their peers, and their requests. Each completion counts once."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from engine_stub import completion, requests

from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.rpc.futures import PendingCall
from lockstep.config.rollout import ReissueConfig, SamplingConfig
from lockstep.rollout.client import engine_pool
from lockstep.rollout.client.request_router import RequestRouter
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.client.stragglers import SLOW_PENALTY, StragglerDetector
from lockstep.rollout.engine_protocol import CompletionBatch, EngineProgress

CONFIG = ReissueConfig(slower_than=0.25, after_s=10.0)


def counters(tokens: int, running: int) -> EngineProgress:
    return EngineProgress(tokens, 0, running, 0, 0, False)


def observe_engines(speeds: dict[int, tuple[float, int]], seconds: int) -> StragglerDetector:
    """A detector that observed these engines every second. `speeds`: (tokens per second and sequence, sequences) by
    rank."""
    found = StragglerDetector(CONFIG)
    for rank in speeds:
        found.mark_busy(rank, 0.0)
    for now in range(seconds + 1):
        for rank, (speed, rows) in speeds.items():
            found.observe(rank, float(now), counters(int(speed * rows * now), rows))
    return found


def test_an_engine_with_a_long_completion_is_no_straggler() -> None:
    found = observe_engines({0: (100, 32), 1: (100, 32), 2: (120, 1)}, 60)
    assert found.find({2}, 60.0) == {}, "its one sequence is as fast as those of the others"


def test_an_engine_below_its_share_for_long_enough_is_a_straggler() -> None:
    speeds: dict[int, tuple[float, int]] = {0: (100, 8), 1: (90, 32), 2: (20, 8)}
    assert observe_engines(speeds, 5).find({2}, 5.0) == {}
    found = observe_engines(speeds, 12).find({2}, 12.0)
    assert found[2].why == "generates 20.0 tokens/s per sequence, the others 95.0" and not found[2].silent
    assert observe_engines(speeds, 12).find({1, 2}, 12.0) == {}, "the step waits for engine 1 anyway"
    assert observe_engines({**speeds, 2: (30, 8)}, 60).find({2}, 60.0) == {}, "a third is more than a quarter"


def test_an_equal_engine_with_many_sequences_left_is_not_slow() -> None:
    """Each engine generates 1,000 tokens/s. One still has 256 sequences when the other has finished its last 20."""
    found = StragglerDetector(CONFIG)
    for rank in (0, 1):
        found.mark_busy(rank, 0.0)
    for now in range(61):
        found.observe(0, float(now), counters(1000 * now, 256))
        if now <= 5:
            found.observe(1, float(now), counters(1000 * now, 20))
        else:
            found.mark_idle(1, float(now))
        assert found.find({0}, float(now)) == {}


def test_engines_are_compared_at_about_as_many_sequences() -> None:
    """Two engines generate 1,000 tokens/s with 64, 32, 16 and 8 sequences; the third generates 200 with 64."""
    found = StragglerDetector(CONFIG)
    tokens = dict.fromkeys(range(3), 0.0)
    for now in range(61):
        for rank in range(2):
            rows = 64 >> min(now // 3, 3)
            found.observe(rank, float(now), counters(int(tokens[rank]), rows))
            tokens[rank] += 1000
        found.observe(2, float(now), counters(int(tokens[2]), 64))
        tokens[2] += 200
    why = found.find({2}, 60.0)[2].why
    assert why == "generates 3.1 tokens/s per sequence, the others 15.6", "not compared with the 125 of their last 8"


def test_silent_engines_are_stragglers_and_idle_ones_are_not() -> None:
    found = observe_engines({0: (100, 8), 1: (100, 8)}, 3)
    found.observe(0, 20.0, counters(9999, 8))
    assert found.find({1}, 12.0) == {}
    assert found.find({1}, 14.0)[1].why == "has generated no token for 11 s" and found.find({1}, 14.0)[1].silent
    found.begin_wait(500.0)
    assert found.find({1}, 505.0) == {}, "engines are not observed between two waits"
    assert found.find({1}, 511.0)[1].silent
    found.mark_idle(1, 520.0)
    assert found.find({1}, 525.0) == {}


def test_penalties_of_slow_and_silent_engines() -> None:
    found = observe_engines({0: (100, 8), 1: (10, 8)}, 12)
    (behind,) = found.find({1}, 12.0).values()
    found.penalize(1, behind, 12.0)
    assert not found.penalty_over(1, 12.0 + SLOW_PENALTY * 10 - 1) and found.penalty_over(1, 12.0 + SLOW_PENALTY * 10)
    silent = observe_engines({0: (100, 8), 1: (100, 8)}, 3)
    silent.penalize(1, silent.find({1}, 30.0)[1], 30.0)
    assert silent.penalty_over(1, 30.0)


class Slow:
    """An engine worker whose completions and counters the test controls, and which may be silent."""

    progress_count, last_progress_at, stall_limit_s, notice_after_s, pid = 0, 0.0, 60.0, 60.0, 1

    def __init__(self, rank: int) -> None:
        self.name, self.spec = f"engine-{rank}", WorkerSpec(f"engine-{rank}", "rollout", rank, "none:None")
        self.tokens, self.running, self.answers = 0, 1, True
        self.held: list[tuple[PendingCall[Any], list[Any]]] = []
        self.question: tuple[PendingCall[Any], list[Any]] | None = None
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.told = 0

    def submit(self, method: Any, *arguments: Any) -> PendingCall[Any]:
        answer: list[Any] = [None]
        call: PendingCall[Any] = PendingCall(self, method.__name__, lambda payload: answer[0])
        self.calls.append(method.__name__)
        match method.__name__:
            case "collect":
                self.question = call, answer
                return call
            case "submit":
                self.asked += [id for group in arguments[0] for id in group.ids]
            case "abort":
                self.aborted += arguments[0]
            case "progress":
                answer[0] = counters(self.tokens, self.running)
        if self.answers or method.__name__ == "submit":
            call.settle(memoryview(b""))
        else:
            self.held.append((call, answer))
        return call

    def answer_held_calls(self) -> None:
        self.answers = True
        held, self.held = self.held, []
        for call, _ in held:
            call.settle(memoryview(b""))

    def tell(self, *ids: str) -> None:
        assert self.question is not None
        call, answer = self.question
        self.told += len(ids)
        answer[0] = CompletionBatch.of([completion(id, 0) for id in ids])
        call.settle(memoryview(b""))

    def on_death(self, callback: Callable[[Any], None]) -> None: ...

    def describe(self) -> str:
        return "is slow"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "COUNTERS_INTERVAL_S", 0.01)


def make_engines(count: int, after_s: float = 0.2) -> tuple[RolloutClient, list[Slow]]:
    workers = [Slow(rank) for rank in range(count)]
    reissue = ReissueConfig(after_s=after_s)
    engines = RolloutClient(workers, SamplingConfig(), 0, 30.0, reissue=reissue)  # type: ignore[arg-type]
    for number, name in enumerate("abcdef"[:count]):
        engines.submit([requests(name, f"{name}/0", f"{name}/1")], queue="q")
        assert workers[number].asked == [f"{name}/0", f"{name}/1"]
    return engines, workers


def wait(engines: RolloutClient, count: int, each: Callable[[], None]) -> list[str]:
    """Waits for so many completions. Calls `each` in every poll."""
    found: list[str] = []

    def look() -> list[str] | None:
        each()
        found.extend(done.request for done in engines.collect("q"))
        return found if len(found) >= count else None

    engines.poll_interval_s = 0.01
    return engines.wait_until(look, "the test", step=0)


@pytest.mark.usefixtures("quick")
def test_requests_of_a_silent_engine_are_reissued_and_its_late_completions_ignored() -> None:
    engines, (one, other) = make_engines(2)
    one.answers = False
    other.tell("b/0", "b/1")

    def look() -> None:
        other.tokens += 1
        if "a/0" in other.asked and other.told == 2:
            other.tell("a/0", "a/1")

    assert sorted(wait(engines, 4, look)) == ["a/0", "a/1", "b/0", "b/1"]
    assert one.aborted == ["a/0", "a/1"] and engines.metrics() == {"rollout/reissued": 2.0}
    assert engines.metrics() == {"rollout/reissued": 0.0}
    one.tell("a/0", "a/1")
    assert engines.collect("q") == [], "the other engine has completed them"
    engines.submit([requests("c", "c/0")], queue="q")
    engines.submit([requests("d", "d/0")], queue="q")
    assert other.asked[-2:] == ["c/0", "d/0"], "it gets nothing until it answers"


@pytest.mark.usefixtures("quick")
def test_a_silent_engine_does_not_delay_new_weights() -> None:
    engines, (one, other) = make_engines(2)
    one.answers = False
    other.tell("b/0", "b/1")
    wait(engines, 4, lambda: other.tell("a/0", "a/1") if "a/0" in other.asked and other.told == 2 else None)
    engines.load_weights(WeightsEverywhere(), 1)
    assert other.calls[-1] == "load_weights" and one.calls[-1] == "renew"
    assert len(engines.workers) == 1 and len(engines.counters()) == 1
    one.answer_held_calls()
    for _ in range(1000):
        if len(engines.workers) == 2:
            break
        threading.Event().wait(0.01)
    assert one.calls[-1] == "load_weights"
    engines.submit([requests("e", "e/0")], queue="q")
    assert one.asked[-1] == "e/0"


def test_a_slow_load_of_all_engines_excludes_none() -> None:
    """Loading changes no counter. An engine that takes twice as long as another is not excluded."""
    engines, (one, other) = make_engines(2, after_s=1.0)
    for worker, seconds in ((one, 1.7), (other, 0.8)):
        worker.answers = False
        threading.Timer(seconds, worker.answer_held_calls).start()
    engines.load_weights(WeightsEverywhere(), 1)
    assert engines.workers == [one, other] and "renew" not in one.calls


class WeightsEverywhere:
    """A weight source with every version on every node."""

    def store_folder(self, worker: Any, version: int) -> str:
        return "/w"

    def fetch(self, worker: Any, version: int) -> None: ...

    def progress(self) -> object:
        return 0


@pytest.mark.usefixtures("quick")
def test_the_first_completion_counts_even_from_the_slow_engine() -> None:
    engines, (one, other) = make_engines(2)
    one.answers = False
    other.tell("b/0", "b/1")

    def look() -> None:
        if "a/0" in other.asked and not one.told:
            one.tell("a/0", "a/1")

    assert sorted(wait(engines, 4, look)) == ["a/0", "a/1", "b/0", "b/1"]
    assert other.aborted == ["a/0", "a/1"]


@pytest.mark.usefixtures("quick")
def test_nothing_is_reissued_if_all_engines_are_silent_or_reissuing_is_off() -> None:
    engines, (one, other) = make_engines(2)
    one.answers = other.answers = False
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 60:
            one.tell("a/0", "a/1")
            other.tell("b/0", "b/1")

    assert len(wait(engines, 4, look)) == 4
    assert len(one.asked) == len(other.asked) == 2, "both may have a long prefill"
    off = RolloutClient([Slow(0), Slow(1)], SamplingConfig(), 0, reissue=ReissueConfig(enable=False))  # type: ignore
    off.submit([requests("a", "a/0")])
    off._pool.reissue_stragglers(0)
    assert "progress" not in [name for worker in off.workers for name in worker.calls]  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_completion_counts_once_whatever_happens(data: st.DataObject) -> None:
    """Engines answer, fall behind, die and are replaced in any order."""
    router = RequestRouter(range(3), lambda group, load: load.least_loaded())
    wanted = [f"{group}/{k}" for group in range(4) for k in range(2)]
    live, sent, counted = {0, 1, 2}, {rank: [] for rank in range(3)}, []

    def assign() -> None:
        for rank, groups in router.assign().items():
            assert rank in live
            sent[rank] += [id for group in groups for id in group.ids]

    def answer(rank: int, ids: list[str]) -> None:
        fresh, duplicates = router.complete(rank, [completion(id, 0) for id in ids])
        counted.extend(each.request for each in fresh)
        assert rank not in duplicates

    router.add([requests(f"{group}", f"{group}/0", f"{group}/1") for group in range(4)])
    assign()
    for _ in range(data.draw(st.integers(0, 25))):
        rank = data.draw(st.integers(0, 2))
        match data.draw(st.sampled_from(["answer", "behind", "release", "die", "return"])):
            case "answer" if rank in live:
                # also completions of aborted requests, and ones that arrived before
                answer(rank, data.draw(st.lists(st.sampled_from(sent[rank]), max_size=3)) if sent[rank] else [])
            case "behind" if rank in live and router.load.live - router.load.held_back - {rank}:
                router.reissue(rank, 0)
                assign()
            case "release":
                router.release(rank)
            case "die" if rank in live:
                live.discard(rank)
                sent[rank] = []
                router.remove_engine(rank)
                assign()
            case "return" if rank not in live:
                live.add(rank)
                router.add_engine(rank)
                assign()
    for rank in {0, 1, 2} - live:
        live.add(rank)
        router.add_engine(rank)
    assign()
    for rank in range(3):
        answer(rank, list(router.open_requests(rank)))
    assert sorted(counted) == wanted
    assert not router.busy_engines() and router.assign() == {} and router._copies == {}
