"""The engine in a worker process: decodes in the background, between the controller's calls."""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from lockstep.cluster.protocol import DeferredResult, concurrent
from lockstep.cluster.rpc.worker_main import tune_malloc
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import EngineConfig
from lockstep.data.samples import Completion
from lockstep.rollout.engine_protocol import CompletionBatch, EngineProgress, Request, RolloutEngine
from lockstep.rollout.weight_loading import open_reader
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)


class EngineService:
    """Hosts one engine; implements `lockstep.rollout.engine_protocol.EngineAPI`.

    Args:
        model: the `model` section, dumped.
        engine: the `rollout.engine` section, dumped: its `archive_kind` says which engine.
        device: `cpu`, `cuda:0`.
        threads: torch threads; the engine's choice when None.
        reader: `package.module:name` of what makes a `WeightReader`, such as
        `lockstep.weights.shared_memory:StoreReader`.
        weights: folder of a weight store to begin with, instead of the weights in `model.path`.
        version: of those weights.
        sleeps: whether it shares its device, and is told to sleep.
    """

    def __init__(
        self,
        model: dict[str, Any],
        engine: dict[str, Any],
        device: str = "cpu",
        threads: int | None = None,
        reader: str | None = None,
        weights: str | None = None,
        version: int = 0,
        sleeps: bool = False,
    ) -> None:
        self._outbox = Outbox()
        self._failure: Exception | None = None
        self._asked: list[tuple[int, float, DeferredResult[CompletionBatch]]] = []
        config: EngineConfig = TypeAdapter(EngineConfig).validate_python(engine)
        self._engine = make_engine(ModelConfig.model_validate(model), config, device, threads, reader, version, sleeps)
        if weights is not None:
            self._engine.load_weights(Path(weights), version)

    def submit(self, requests: list[Request]) -> None:
        self._engine.submit(requests)
        self._outbox.expect(requests)

    def collect(self, ack: int = 0, hold_s: float = 0.0) -> DeferredResult[CompletionBatch]:
        if self._failure is not None:
            raise self._failure
        self._outbox.acknowledge(ack)
        later: DeferredResult[CompletionBatch] = DeferredResult()
        self._asked.append((ack, hold_s, later))
        self._tell()
        return later

    def abort(self, ids: list[str] | None = None) -> None:
        """Also clears a failure: whoever aborts what failed may go on."""
        self._outbox.put(self._engine.abort(ids))
        self._failure = None
        self._tell()

    def pause(self) -> None:
        self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()

    def sleep(self, level: int = 1) -> None:
        self._engine.sleep(level)

    def wake(self) -> None:
        self._engine.wake()

    def load_weights(self, source: str, version: int) -> None:
        self._engine.load_weights(Path(source), version)

    def receive_weights(self, where: dict[str, Any], version: int) -> None:
        self._engine.receive_weights(where, version)

    def slower(self) -> str:
        return self._engine.slower

    @concurrent
    def progress(self) -> EngineProgress:
        return self._engine.progress()

    def background(self) -> bool:
        """One decode step; whether there is more to do."""
        if self._failure is not None:
            return False
        try:
            self._outbox.put(self._engine.step())
        except (ArithmeticError, RuntimeError, ValueError) as error:
            # Raised to the controller by `collect`: nobody awaits this call.
            log.exception("the engine stopped")
            self._failure = error
            for _, _, later in self._asked:
                later.fail(error)
            self._asked.clear()
            return False
        self._tell()
        now = self._engine.progress()
        here = current_beacon()
        here.progress("tokens", now.tokens)
        here.progress("completions", now.finished)
        return not now.paused and now.running + now.waiting > 0

    def renew(self) -> None:
        """Forgets all requests, finished ones included, for the run's next controller or for another beginning with
        this one; the model stays loaded. Whoever has asked for completions hears that there are none."""
        self._engine.abort()
        self._engine.resume()
        self._outbox, self._failure = Outbox(), None
        asked, self._asked = self._asked, []
        for _, _, later in asked:
            later.settle(CompletionBatch.of(0, []))

    def close(self) -> None:
        self._engine.close()

    def _tell(self) -> None:
        """Answers who asked for completions, when there are some to be told."""
        if self._asked and any(self._outbox.due(ack, hold_s) for ack, hold_s, _ in self._asked):
            for ack, _, later in self._asked:
                later.settle(self._outbox.collect(ack))
            self._asked.clear()


class Outbox:
    """Completions on their way to the controller, numbered from 1, kept until they are acknowledged."""

    def __init__(self) -> None:
        self._sequence = self._told = 0
        """Numbers of the last that is there, and of the last that was told."""
        self._kept: deque[Completion] = deque()
        self._owed: dict[str, Request] = {}
        self._urgency = math.inf
        """The least priority among those that were not told."""
        self._since = 0.0
        """When the first of them came."""

    def expect(self, requests: Sequence[Request]) -> None:
        """Completions of these come."""
        self._owed.update((request.id, request) for request in requests)

    def put(self, completions: Sequence[Completion]) -> None:
        if completions and self._told == self._sequence:
            self._urgency, self._since = math.inf, time.monotonic()
        self._kept.extend(completions)
        self._sequence += len(completions)
        for each in completions:
            request = self._owed.pop(each.request, None)
            alone = request is None or request.keep or each.finish == "abort"  # somebody goes on with it at once
            self._urgency = min(self._urgency, -math.inf if alone or request is None else request.priority)

    def due(self, ack: int, hold_s: float) -> bool:
        """Whether somebody who has everything up to `ack` is told something now: while the engine has other requests
        that are as urgent, whoever waits for what is there waits for them as well."""
        if not self._kept or self._told > ack or hold_s <= 0:
            return bool(self._kept)
        waits = any(request.priority <= self._urgency for request in self._owed.values())
        return not waits or time.monotonic() - self._since >= hold_s

    def acknowledge(self, ack: int) -> None:
        """Drops what has arrived. ValueError for a number that was never given out."""
        if not 0 <= ack <= self._sequence:
            raise ValueError(f"ack: {ack} was never collected, the newest completion is number {self._sequence}")
        while self._kept and self._sequence - len(self._kept) < ack:
            self._kept.popleft()

    def collect(self, ack: int) -> CompletionBatch:
        """Drops what is acknowledged, returns the rest."""
        self.acknowledge(ack)
        self._told = self._sequence
        return CompletionBatch.of(self._sequence, list(self._kept))


def make_engine(
    model: ModelConfig,
    config: EngineConfig,
    device: str = "cpu",
    threads: int | None = None,
    reader: str | None = None,
    version: int = 0,
    sleeps: bool = False,
) -> RolloutEngine:
    """The engine that the config names; the other one is not imported.

    Raises:
        ModelError, VllmUnsupported: it cannot be had.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if config.kind == "vllm":
        from lockstep.rollout.vllm.engine import VllmEngine

        return VllmEngine.from_config(model, config, device, reader, version, threads, sleeps)
    from lockstep.rollout.builtin.engine import BuiltinEngine

    if config.malloc == "tuned":
        tune_malloc()
    return BuiltinEngine.from_config(model, config, device, None if reader is None else open_reader(reader), version)
