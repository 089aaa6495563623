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
from engine_stub import completion, request

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


def watched(speeds: dict[int, tuple[float, int]], seconds: int) -> StragglerDetector:
    """Engines by rank: tokens per second and sequence, and sequences; looked at every second."""
    found = StragglerDetector(CONFIG)
    for rank in speeds:
        found.mark_busy(rank, 0.0)
    for now in range(seconds + 1):
        for rank, (speed, rows) in speeds.items():
            found.observe(rank, float(now), counters(int(speed * rows * now), rows))
    return found


def test_a_long_completion_on_an_engine_as_fast_as_the_others_is_waited_for() -> None:
    found = watched({0: (100, 32), 1: (100, 32), 2: (120, 1)}, 60)
    assert found.find({2}, 60.0) == {}, "one sequence, and as fast as theirs"


def test_an_engine_below_its_share_for_long_enough_is_a_straggler() -> None:
    speeds: dict[int, tuple[float, int]] = {0: (100, 8), 1: (90, 32), 2: (20, 8)}
    assert watched(speeds, 5).find({2}, 5.0) == {}
    found = watched(speeds, 12).find({2}, 12.0)
    assert found[2].why == "makes 20.0 tokens/s a sequence, the others 95.0" and not found[2].silent
    assert watched(speeds, 12).find({1, 2}, 12.0) == {}, "one that is not behind is waited for as well"
    assert watched({**speeds, 2: (30, 8)}, 60).find({2}, 60.0) == {}, "a third is no quarter"


def test_an_equal_engine_with_many_sequences_left_is_not_slow() -> None:
    """1,000 tokens/s in all, however many sequences: one has 256 left when the other is done with its last 20."""
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
    """One of n sequences makes 1000 / n: the peers went through 64, 32, 16, 8, and one has 64 all the time."""
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
    assert why == "makes 3.1 tokens/s a sequence, the others 15.6", "and not the 125 of their last 8"


def test_silent_engines_are_stragglers_and_idle_ones_are_not() -> None:
    found = watched({0: (100, 8), 1: (100, 8)}, 3)
    found.observe(0, 20.0, counters(9999, 8))
    assert found.find({1}, 12.0) == {}
    assert found.find({1}, 14.0)[1].why == "made no token for 11 s" and found.find({1}, 14.0)[1].silent
    found.begin_wait(500.0)
    assert found.find({1}, 505.0) == {}, "nobody looked between two waits"
    assert found.find({1}, 511.0)[1].silent
    found.mark_idle(1, 520.0)
    assert found.find({1}, 525.0) == {}


def test_penalties_of_slow_and_silent_engines() -> None:
    found = watched({0: (100, 8), 1: (10, 8)}, 12)
    (behind,) = found.find({1}, 12.0).values()
    found.penalize(1, behind, 12.0)
    assert not found.penalty_over(1, 12.0 + SLOW_PENALTY * 10 - 1) and found.penalty_over(1, 12.0 + SLOW_PENALTY * 10)
    silent = watched({0: (100, 8), 1: (100, 8)}, 3)
    silent.penalize(1, silent.find({1}, 30.0)[1], 30.0)
    assert silent.penalty_over(1, 30.0)


class Slow:
    """An engine that says what the test says, and answers for its counters only where the test lets it."""

    moves, moved_at, stall_limit_s, notice_after_s, pid = 0, 0.0, 60.0, 60.0, 1

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
                self.asked += [each.id for each in arguments[0]]
            case "abort":
                self.aborted += arguments[0]
            case "progress":
                answer[0] = counters(self.tokens, self.running)
        if self.answers or method.__name__ == "submit":
            call.settle(memoryview(b""))
        else:
            self.held.append((call, answer))
        return call

    def wakes(self) -> None:
        self.answers = True
        held, self.held = self.held, []
        for call, _ in held:
            call.settle(memoryview(b""))

    def tell(self, *ids: str) -> None:
        assert self.question is not None
        call, answer = self.question
        self.told += len(ids)
        answer[0] = CompletionBatch.of(self.told, [completion(id, 0) for id in ids])
        call.settle(memoryview(b""))

    def on_death(self, callback: Callable[[Any], None]) -> None: ...

    def describe(self) -> str:
        return "is slow"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "COUNTERS_INTERVAL_S", 0.01)


def made(count: int, after_s: float = 0.2) -> tuple[RolloutClient, list[Slow]]:
    workers = [Slow(rank) for rank in range(count)]
    engines = RolloutClient(workers, SamplingConfig(), 0, 30.0, reissue=ReissueConfig(after_s=after_s))  # type: ignore[arg-type]
    for number, name in enumerate("abcdef"[:count]):
        engines.submit([request(f"{name}/{k}", name) for k in range(2)], queue="q")
        assert workers[number].asked == [f"{name}/0", f"{name}/1"]
    return engines, workers


def wait(engines: RolloutClient, count: int, each: Callable[[], None]) -> list[str]:
    """Waits for so many completions; `each` happens at every look."""
    found: list[str] = []

    def look() -> list[str] | None:
        each()
        found.extend(done.request for done in engines.collect("q"))
        return found if len(found) >= count else None

    engines.poll_interval_s = 0.01
    return engines.wait_until(look, "the test", step=0)


@pytest.mark.usefixtures("quick")
def test_requests_of_a_silent_engine_are_reissued_and_its_late_completions_ignored() -> None:
    engines, (one, other) = made(2)
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
    assert engines.collect("q") == [], "they counted already"
    engines.submit([request("c/0", "c")], queue="q")
    engines.submit([request("d/0", "d")], queue="q")
    assert other.asked[-2:] == ["c/0", "d/0"], "it gets nothing until it answers"


@pytest.mark.usefixtures("quick")
def test_a_silent_engine_does_not_delay_new_weights() -> None:
    engines, (one, other) = made(2)
    one.answers = False
    other.tell("b/0", "b/1")
    wait(engines, 4, lambda: other.tell("a/0", "a/1") if "a/0" in other.asked and other.told == 2 else None)
    engines.load_weights(Shelf(), 1)
    assert other.calls[-1] == "load_weights" and one.calls[-1] == "renew"
    assert len(engines.workers) == 1 and len(engines.counters()) == 1
    one.wakes()
    for _ in range(1000):
        if len(engines.workers) == 2:
            break
        threading.Event().wait(0.01)
    assert one.calls[-1] == "load_weights"
    engines.submit([request("e/0", "e")], queue="q")
    assert one.asked[-1] == "e/0"


def test_a_slow_load_of_all_engines_excludes_none() -> None:
    """It moves no counter: who needs twice as long as another is no laggard, who needs more than four times is."""
    engines, (one, other) = made(2, after_s=1.0)
    for worker, seconds in ((one, 1.7), (other, 0.8)):
        worker.answers = False
        threading.Timer(seconds, worker.wakes).start()
    engines.load_weights(Shelf(), 1)
    assert engines.workers == [one, other] and "renew" not in one.calls


class Shelf:
    """Weights that are everywhere."""

    def store_folder(self, worker: Any, version: int) -> str:
        return "/w"

    def fetch(self, worker: Any, version: int) -> None: ...

    def progress(self) -> object:
        return 0


@pytest.mark.usefixtures("quick")
def test_the_first_completion_counts_even_from_the_slow_engine() -> None:
    engines, (one, other) = made(2)
    one.answers = False
    other.tell("b/0", "b/1")

    def look() -> None:
        if "a/0" in other.asked and not one.told:
            one.tell("a/0", "a/1")

    assert sorted(wait(engines, 4, look)) == ["a/0", "a/1", "b/0", "b/1"]
    assert other.aborted == ["a/0", "a/1"]


@pytest.mark.usefixtures("quick")
def test_nothing_is_reissued_if_all_are_silent_or_it_is_off() -> None:
    engines, (one, other) = made(2)
    one.answers = other.answers = False
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 60:
            one.tell("a/0", "a/1")
            other.tell("b/0", "b/1")

    assert len(wait(engines, 4, look)) == 4
    assert len(one.asked) == len(other.asked) == 2, "a long prefill on both, say"
    off = RolloutClient([Slow(0), Slow(1)], SamplingConfig(), 0, reissue=ReissueConfig(enable=False))  # type: ignore[list-item]
    off.submit([request("a/0", "a")])
    off._pool.reissue_stragglers(0)
    assert "progress" not in [name for worker in off.workers for name in worker.calls]  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_completion_counts_once_whatever_happens(data: st.DataObject) -> None:
    """Engines answer, fall behind, die and come back in any order."""
    router = RequestRouter(range(3), lambda group, load: load.least_loaded())
    wanted = [f"{group}/{k}" for group in range(4) for k in range(2)]
    live, sent, counted = {0, 1, 2}, {rank: [] for rank in range(3)}, []

    def assign() -> None:
        for rank, requests in router.assign().items():
            assert rank in live
            sent[rank] += [each.id for each in requests]

    def answer(rank: int, ids: list[str]) -> None:
        fresh, duplicates = router.complete(rank, [completion(id, 0) for id in ids])
        counted.extend(each.request for each in fresh)
        assert rank not in duplicates

    router.add([request(id, id[0]) for id in wanted])
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
    assert not router.any_open() and router.assign() == {} and router._copies == {}
