"""What an engine's beacon shows, and when its completions leave."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.base.folders import new_run_id
from lockstep.data.samples import Completion, FinishReason
from lockstep.models.tiny_model import make_tiny
from lockstep.rollout import engine_service
from lockstep.rollout.engine_protocol import Request, RequestGroup
from lockstep.rollout.engine_service import EngineService, Outbox
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[EngineService]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    open_beacon(new_run_id("engine"), "engine-0", "rollout", 0).stage("start")
    model = make_tiny(tmp_path / "model", hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, max_length=32)
    yield EngineService({"path": str(model)}, {"max_rows": 4}, threads=1)
    close_beacon(remove=True)


def test_the_stage_says_what_the_engine_does(service: EngineService) -> None:
    assert current_beacon().stage_name == "idle"
    request = Request("a", "g", np.arange(1, 6, dtype=np.int32), seed=3, max_tokens=4, ignore_eos=True)
    service.submit(RequestGroup.all_of([request]))
    assert current_beacon().stage_name == "generate"
    service.pause()
    service.background()
    assert current_beacon().stage_name == "paused"
    service.resume()
    while service.background():
        assert current_beacon().stage_name == "generate"
    assert current_beacon().stage_name == "idle"
    service.sleep()
    service.background()
    assert current_beacon().stage_name == "sleep"
    service.wake()
    assert current_beacon().stage_name == "idle"


def test_only_the_last_completions_of_an_engine_wait_for_those_of_other_engines() -> None:
    outbox, hold_s = Outbox(), 1000.0

    def put(request: Request, finish: FinishReason = "stop") -> None:
        token = np.zeros(1, np.int32)
        outbox.put([Completion(request.id, token, np.zeros(1, np.float32), token, finish, "")])

    first, second, kept, aborted = (Request(name, "g", np.ones(1, np.int32), 0, keep=name == "c") for name in "abcd")
    outbox.expect([first, second])
    put(first)
    assert outbox.patience_s(hold_s) == 0, "the engine has another request"
    put(second)
    assert outbox.due(hold_s) and 0 < outbox.patience_s(hold_s) <= hold_s, "until the time of day reaches a multiple"
    assert outbox.patience_s(0.0) == 0
    outbox.take()
    for request, finish in ((kept, "stop"), (aborted, "abort")):
        outbox.expect([request])
        put(request, finish)  # type: ignore[arg-type]
        assert outbox.patience_s(hold_s) == 0, "what follows waits for it"
        assert outbox.take().requests == [request.id] and not outbox.due(0.0)


def test_completions_are_returned_once_and_a_further_call_ends_the_one_before(service: EngineService) -> None:
    answers: list[list[str]] = []

    def collect() -> None:
        service.collect().on_settled(lambda value, error: answers.append(value.requests))

    collect()
    collect()
    assert answers == [[]], "the first call"
    request = Request("a", "g", np.arange(1, 6, dtype=np.int32), seed=3, max_tokens=1, ignore_eos=True)
    service.submit(RequestGroup.all_of([request]))
    while service.background():
        pass
    collect()
    assert answers == [[], ["a"]]
    service.renew()
    assert answers == [[], ["a"], []]


def test_completions_are_held_back_until_the_time_of_day_reaches_a_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all hosts at the same moment; and not for longer if the clock is set back."""
    clock = [1003.7]
    monkeypatch.setattr(engine_service.time, "time", lambda: clock[0])
    outbox, token = Outbox(), np.zeros(1, np.int32)
    outbox.expect([Request(name, "g", np.ones(1, np.int32), 0) for name in "ab"])
    outbox.put([Completion("a", token, np.zeros(1, np.float32), token, "stop", "")])
    seen = []
    for clock[0] in (1003.99, 1004.0, 1004.5, 1003.75, 990.0):
        seen.append(outbox.due(1.0))
    assert seen == [False, True, True, False, True]
    outbox.put([Completion("b", token, np.zeros(1, np.float32), token, "stop", "")])
    clock[0] = 1003.75
    assert outbox.patience_s(1.0) == 0.25
