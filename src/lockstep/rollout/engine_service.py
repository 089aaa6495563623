"""Hosts an engine in a worker process, which decodes between the controller's calls."""

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from lockstep.base.malloc import tune_malloc
from lockstep.cluster.protocol import DeferredResult, concurrent
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import EngineConfig
from lockstep.data.images.image_store import ImageUnavailable
from lockstep.data.samples import Completion
from lockstep.rollout.engine_protocol import CompletionBatch, EngineProgress, Request, RequestGroup, RolloutEngine
from lockstep.rollout.weight_loading import open_reader
from lockstep.watch.beacon.span_ring import SpanKind
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)


class EngineService:
    """Hosts one engine; implements `lockstep.rollout.engine_protocol.EngineAPI`.

    Args:
        model: the `model` section, dumped.
        engine: the `rollout.engine` section, dumped; its `kind` selects the engine.
        device: `cpu`, `cuda:0`.
        threads: number of torch threads; the engine's choice if None.
        reader: `package.module:name` of a factory of a `WeightReader`, such as
            `lockstep.weights.shared_memory_transport:StoreReader`.
        weights: folder of a weight store with the initial weights, instead of those in `model.path`.
        version: version of the initial weights.
        sleeps: whether the engine shares its device, and will be called to sleep.
        images: folder of the prepared images of prompts (see `lockstep.data.images.image_store`); requests with images
            are refused if it is None.
        most_images: the most images of a prompt, for which vLLM keeps room; 0 if it is not known.
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
        images: str | None = None,
        most_images: int = 0,
    ) -> None:
        current_beacon().stage("load")
        self._outbox = Outbox()
        self._failure: Exception | None = None
        self._collecting: tuple[float, DeferredResult[CompletionBatch]] | None = None
        """`hold_s` of the open `collect` call, and its answer."""
        config: EngineConfig = TypeAdapter(EngineConfig).validate_python(engine)
        settings = ModelConfig.model_validate(model), config, device, threads, reader, version, sleeps
        self._engine = make_engine(*settings, images, most_images)
        if weights is not None:
            self._engine.load_weights(Path(weights), version)
        self._show_stage()

    def submit(self, groups: list[RequestGroup]) -> None:
        requests = [request for group in groups for request in group.requests]
        self._engine.submit(requests)
        self._outbox.expect(requests)
        self._show_stage()

    def collect(self, hold_s: float = 0.0) -> DeferredResult[CompletionBatch]:
        if self._failure is not None:
            raise self._failure
        self._end_collecting()
        answer: DeferredResult[CompletionBatch] = DeferredResult()
        self._collecting = hold_s, answer
        self._answer_call()
        return answer

    def abort(self, ids: list[str] | None = None) -> None:
        """Also clears a failure, so that the engine can be used again."""
        self._outbox.put(self._engine.abort(ids))
        self._failure = None
        self._answer_call()

    def pause(self) -> None:
        self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()

    def sleep(self, level: int = 1) -> None:
        self._engine.sleep(level)
        current_beacon().stage("sleep")

    def wake(self) -> None:
        self._engine.wake()
        current_beacon().stage("idle")

    def load_weights(self, source: str, version: int) -> None:
        current_beacon().stage("sync")
        began_ns = time.monotonic_ns()
        self._engine.load_weights(Path(source), version)
        current_beacon().span(SpanKind.WEIGHTS, f"load version {version}", began_ns)
        self._show_stage()

    def receive_weights(self, where: dict[str, Any], version: int) -> None:
        current_beacon().stage("sync")
        began_ns = time.monotonic_ns()
        self._engine.receive_weights(where, version)
        current_beacon().span(SpanKind.WEIGHTS, f"receive version {version}", began_ns)
        self._show_stage()

    def slower(self) -> str:
        return self._engine.slower

    @concurrent
    def progress(self) -> EngineProgress:
        return self._engine.progress()

    def background(self) -> bool:
        """Runs one decode step. Returns whether there is more to do."""
        if self._failure is not None:
            return False
        try:
            self._outbox.put(self._engine.step())
        except (ArithmeticError, RuntimeError, ValueError, ImageUnavailable) as error:
            # No call of the controller runs this step, so `collect` raises the error.
            log.exception("the engine stopped")
            self._failure = error
            if self._collecting is not None:
                (_, answer), self._collecting = self._collecting, None
                answer.fail(error)
            return False
        self._answer_call()
        now = self._engine.progress()
        beacon = current_beacon()
        beacon.progress("tokens", now.tokens)
        beacon.progress("completions", now.finished)
        self._show_stage(now)
        return not now.paused and now.running + now.waiting > 0

    def _show_stage(self, now: EngineProgress | None = None) -> None:
        """Writes what the engine does into the beacon: `generate`, `paused` or `idle`."""
        now = self._engine.progress() if now is None else now
        stage = "idle" if now.running + now.waiting == 0 else "paused" if now.paused else "generate"
        beacon = current_beacon()
        if beacon.stage_name != stage and not (stage == "idle" and beacon.stage_name == "sleep"):
            beacon.stage(stage)

    def renew(self) -> None:
        """Drops all requests and completions, for the run's next controller or after an exclusion. The model stays
        loaded. An open `collect` call is answered with no completions."""
        self._engine.abort()
        self._engine.resume()
        self._outbox, self._failure = Outbox(), None
        self._end_collecting()

    def close(self) -> None:
        self._engine.close()

    def _answer_call(self) -> None:
        """Answers the open `collect` call if completions are due."""
        if self._collecting is not None and self._outbox.due(self._collecting[0]):
            (hold_s, answer), self._collecting = self._collecting, None
            patience_s = self._outbox.patience_s(hold_s)
            answer.settle(self._outbox.take(), patience_s)

    def _end_collecting(self) -> None:
        """Answers the open `collect` call with no completions."""
        if self._collecting is not None:
            (_, answer), self._collecting = self._collecting, None
            answer.settle(CompletionBatch.of([]))


class Outbox:
    """Completions that were not sent to the controller yet."""

    def __init__(self) -> None:
        self._completions: list[Completion] = []
        self._open: dict[str, Request] = {}
        self._began_ns: dict[str, int] = {}
        """When each open request was submitted."""
        self._urgency = math.inf
        """The lowest priority value among the completions; -inf if one must be sent at once."""
        self._since = 0.0
        """When the first of them arrived, by the clock that hosts share."""

    def expect(self, requests: Sequence[Request]) -> None:
        """Registers requests whose completions will follow."""
        self._open.update((request.id, request) for request in requests)
        now = time.monotonic_ns()
        self._began_ns.update((request.id, now) for request in requests)

    def put(self, completions: Sequence[Completion]) -> None:
        if not self._completions:
            self._urgency, self._since = math.inf, time.time()
        self._completions += completions
        beacon = current_beacon()
        for each in completions:
            request, began_ns = self._open.pop(each.request, None), self._began_ns.pop(each.request, None)
            if began_ns is not None:
                beacon.span(SpanKind.REQUEST, f"{each.request} {each.finish}", began_ns, len(each.tokens))
            # A conversation continues as soon as its turn arrives, so turns are not held back.
            at_once = request is None or request.keep or each.finish == "abort"
            self._urgency = min(self._urgency, -math.inf if at_once or request is None else request.priority)

    def due(self, hold_s: float) -> bool:
        """Whether to answer a call now. Completions are held back for up to `hold_s` while the engine has other
        requests that are as urgent: until the time of day reaches a multiple of it, so that the engines of all hosts
        behind a call relay answer together."""
        if not self._completions or hold_s <= 0:
            return bool(self._completions)
        others_as_urgent = any(request.priority <= self._urgency for request in self._open.values())
        return not others_as_urgent or time.time() // hold_s != self._since // hold_s  # the clock may be set back

    def patience_s(self, hold_s: float) -> float:
        """How long completions that are due may wait for those of other engines behind the same call relay: until the
        time of day reaches a multiple of `hold_s` if this engine has no request left, else not at all. The last engine
        waits for nobody."""
        if hold_s <= 0 or self._open or self._urgency == -math.inf:
            return 0.0
        return hold_s - time.time() % hold_s

    def take(self) -> CompletionBatch:
        """Returns the completions, and keeps none: the connection to the controller keeps an answer until it has
        arrived."""
        taken, self._completions = self._completions, []
        return CompletionBatch.of(taken)


def make_engine(
    model: ModelConfig,
    config: EngineConfig,
    device: str = "cpu",
    threads: int | None = None,
    reader: str | None = None,
    version: int = 0,
    sleeps: bool = False,
    images: str | None = None,
    most_images: int = 0,
) -> RolloutEngine:
    """Makes the engine that the config selects. Other engines are not imported.

    Raises:
        ModelError, VllmUnsupported: the engine cannot be made.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if config.kind == "vllm":
        from lockstep.rollout.vllm.engine import VllmEngine

        return VllmEngine.from_config(model, config, device, reader, version, threads, sleeps, images, most_images)
    from lockstep.rollout.builtin.engine import BuiltinEngine

    if config.malloc == "tuned":
        tune_malloc()
    weights = None if reader is None else open_reader(reader)
    return BuiltinEngine.from_config(model, config, device, weights, version, images)
