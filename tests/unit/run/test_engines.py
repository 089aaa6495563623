"""What the controller makes of completions as they come: durable, each once."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.cluster.calls import PendingCall
from lockstep.config.rollout import Sampling
from lockstep.data.samples import Completion, Prompt
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.api import Collected
from lockstep.rollout.protocol import EngineProgress, Request
from lockstep.run import engines as room
from lockstep.run.engines import Engines


class Engine:
    """A worker that finishes half of what it is asked after some seconds, and the rest after some more."""

    def __init__(self, half_s: float = 0.0, all_s: float = 0.0) -> None:
        self.half_s, self.all_s, self.name = half_s, all_s, "engine-0"
        self.asked: list[str] = []
        self.asked_at = 0.0

    def submit(self, method: Any, requests: list[Any]) -> PendingCall[None]:
        self.asked += [request.id for request in requests]
        self.asked_at = time.monotonic()
        call: PendingCall[None] = PendingCall(self, "submit", lambda payload: None)  # type: ignore[arg-type]
        call.settle(memoryview(b""))
        return call

    def call(self, method: Any, ack: int = 0) -> Any:
        if method.__name__ == "progress":
            return EngineProgress(0, 0, 0, 0, 0, False)
        waited = time.monotonic() - self.asked_at
        half = len(self.asked) // 2 if waited >= self.half_s else 0
        done = self.asked[: len(self.asked) if waited >= self.all_s else half]
        return Collected(len(done), [completion(id) for id in done[ack:]])


def completion(id: str) -> Completion:
    tokens = np.array([1, 2], np.int32)
    return Completion(id, tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", "ab")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"0:{row}", row, np.array([3], np.int32), "p") for row in range(count)]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "run", {"name": "x"})


def test_what_took_long_is_durable_before_it_is_scored(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "KEEP_EVERY_S", 0.2)
    engine = Engine(all_s=0.1)
    Engines([engine], ledger, Sampling(), 0).generate(0, prompts(2), n=2)  # type: ignore[list-item]
    assert ledger.kept(0) == [], "a quick step is not worth a write"

    # The second half comes so soon after the first that it is not due for a write by itself.
    slow = Engine(half_s=0.3, all_s=0.35)
    engines = Engines([slow], ledger, Sampling(), 0)  # type: ignore[list-item]
    engines.generate(1, prompts(2), n=2)
    assert {found.request for found in ledger.kept(1)} == set(slow.asked)

    again = Engine()
    engines = Engines([again], ledger, Sampling(), 0)  # type: ignore[list-item]
    rollouts = engines.generate(1, prompts(2), n=2)
    assert (again.asked, engines.generated) == ([], 0)
    assert [c.request for group in rollouts.groups for c in group.completions] == slow.asked


def request(id: str, group: str) -> Request:
    return Request(id, group, np.array([3], np.int32), seed=0)


def test_each_queue_collects_its_own_completions_once(ledger: Ledger) -> None:
    engine = Engine(all_s=0.0)
    engines = Engines([engine], ledger, Sampling(), 0)  # type: ignore[list-item]
    engines.submit([request("a/0", "a"), request("a/1", "a")], queue="step 4")
    engines.submit([request("b/0", "b")], queue="step 5")
    assert [found.request for found in engines.collect(queue="step 5")] == ["b/0"]
    assert engines.collect(queue="step 5") == [], "each comes once"
    assert {found.request for found in engines.sample(prompts(2), Sampling(), "evaluation")} == {
        "evaluation/0:0",
        "evaluation/0:1",
    }
    assert [found.request for found in engines.collect(queue="step 4")] == ["a/0", "a/1"], "kept while others asked"


def test_groups_stay_whole_and_go_to_the_engine_that_owes_least(ledger: Ledger) -> None:
    busy, idle = Engine(half_s=9, all_s=9), Engine(half_s=9, all_s=9)
    engines = Engines([busy, idle], ledger, Sampling(), 0)  # type: ignore[list-item]
    engines.submit([request(f"a/{k}", "a") for k in range(4)])
    engines.submit([request("b/0", "b"), request("b/1", "b"), request("c/0", "c")])
    assert (len(busy.asked), idle.asked) == (4, ["b/0", "b/1", "c/0"])


def test_collect_returns_at_once(ledger: Ledger) -> None:
    engines = Engines([Engine(half_s=9, all_s=9)], ledger, Sampling(), 0)  # type: ignore[list-item]
    began = time.monotonic()
    assert engines.collect() == []
    engines.submit([request("a/0", "a")])
    assert engines.collect() == []
    assert time.monotonic() - began < 1
