"""A worker that stands for an engine, for the tests of the controller's side."""

import threading
import time
from typing import Any

import numpy as np

from lockstep.cluster.rpc.futures import PendingCall
from lockstep.data.samples import Completion, Prompt
from lockstep.rollout.engine_protocol import CompletionBatch, EngineProgress, Request


class Engine:
    """A worker that finishes half of what it is asked after some seconds, and the rest after some more."""

    moves = 0

    def __init__(self, half_s: float = 0.0, all_s: float = 0.0) -> None:
        self.half_s, self.all_s, self.name = half_s, all_s, "engine-0"
        self.asked: list[str] = []
        self.asked_at = 0.0
        self.version = 0

    def submit(self, method: Any, *arguments: Any) -> Any:
        if method.__name__ == "collect":
            return Answer(self, *arguments)
        if method.__name__ == "progress":
            return self.answer(method, EngineProgress(0, 0, 0, 0, 0, False))
        self.asked += [request.id for request in arguments[0]]
        self.asked_at = time.monotonic()
        return self.answer(method, None)

    def answer(self, method: Any, value: Any) -> PendingCall[Any]:
        call: PendingCall[Any] = PendingCall(self, method.__name__, lambda payload: value)  # type: ignore[arg-type]
        call.settle(memoryview(b""))
        return call

    def finished(self) -> list[str]:
        waited = time.monotonic() - self.asked_at
        half = len(self.asked) // 2 if waited >= self.half_s else 0
        return self.asked[: len(self.asked) if waited >= self.all_s else half]


class Answer:
    """The answer to `collect`, which comes when there is something new."""

    def __init__(self, engine: Engine, ack: int, hold_s: float = 0.0) -> None:
        self.engine, self.ack = engine, ack

    def done(self) -> bool:
        return len(self.engine.finished()) > self.ack

    def on_done(self, callback: Any) -> None:
        if self.done():
            callback()
            return
        for due in (self.engine.half_s, self.engine.all_s):
            timer = threading.Timer(max(0.0, self.engine.asked_at + due - time.monotonic()) + 0.001, callback)
            timer.daemon = True
            timer.start()

    def result(self, why: str) -> CompletionBatch:
        done = self.engine.finished()
        return CompletionBatch.of(len(done), [completion(id, self.engine.version) for id in done[self.ack :]])


def completion(id: str, version: int) -> Completion:
    tokens = np.array([1, 2], np.int32)
    return Completion(id, tokens, np.zeros(2, np.float32), np.full(2, version, np.int32), "stop", "ab")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"0:{row}", row, np.array([3], np.int32), "p") for row in range(count)]


def request(id: str, group: str) -> Request:
    return Request(id, group, np.array([3], np.int32), seed=0)
