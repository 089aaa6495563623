"""Evaluation on an engine that also has requests of later steps is not delayed, and uses the published weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cluster.protocol import DeferredResult
from lockstep.cluster.rpc.futures import PendingCall
from lockstep.config.rollout import SamplingConfig
from lockstep.data.samples import Group, Prompt, Rollouts
from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.client import rollout_client as engines_room
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import CompletionBatch
from lockstep.rollout.engine_service import EngineService
from lockstep.run.step_metrics import rollout_metrics

torch.set_num_threads(1)


class LocalResult:
    """The deferred result of a call."""

    def __init__(self, later: DeferredResult[CompletionBatch]) -> None:
        self.outcome: list[Any] = []
        self.callbacks: list[Callable[[], None]] = []
        later.on_settled(self._over)

    def _over(self, value: Any, error: Any) -> None:
        self.outcome.append(value)
        for callback in self.callbacks:
            callback()

    def on_done(self, callback: Callable[[], None]) -> None:
        if self.outcome:
            callback()
        self.callbacks.append(callback)

    def done(self) -> bool:
        return bool(self.outcome)

    def result(self, why: str) -> CompletionBatch:
        found: CompletionBatch = self.outcome[0]
        return found


class LocalEngine:
    """A worker in this process, which decodes a little whenever its progress is read."""

    name, last_progress_at, stall_limit_s, notice_after_s = "engine-0", 0.0, 60.0, 60.0

    def __init__(self, folder: Path, rows: int) -> None:
        self.service = EngineService({"path": str(folder)}, {"max_rows": rows}, threads=1)

    @property
    def progress_count(self) -> int:
        self.service.background()
        return self.service._engine.progress().tokens

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return getattr(self.service, method.__name__)(*arguments)

    def submit(self, method: Callable[..., Any], *arguments: Any) -> Any:
        value = self.call(method, *arguments)
        if isinstance(value, DeferredResult):
            return LocalResult(value)
        call: PendingCall[Any] = PendingCall(self, method.__name__, lambda payload: value)
        call.settle(memoryview(b""))
        return call

    def describe(self) -> str:
        return "is here"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_room, "PROGRESS_INTERVAL_S", 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead") / "model"
    return make_tiny(folder, hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=96)


def prompts(count: int, first: int = 0) -> list[Prompt]:
    return [Prompt(f"0:{row}", row, np.array([5, 6 + row], np.int32), "p") for row in range(first, first + count)]


def test_evaluation_has_priority_over_requests_of_later_steps(model: Path) -> None:
    worker = LocalEngine(model, rows=4)
    engines = RolloutClient([worker], SamplingConfig(max_tokens=60, ignore_eos=True), seed=0)  # type: ignore[list-item]
    ahead = [
        engines.requests(step, prompt, {f"{step}/{prompt.uid}/{k}": k for k in range(4)})
        for step in (2, 1)
        for prompt in prompts(3, first=10 * step)
    ]
    engines.submit(ahead, queue="rollouts")
    for _ in range(5):
        worker.service.background()
        assert engines.collect(queue="rollouts") == []
    worker.service._engine.version = 7  # as when weights are taken between two decode steps
    found = engines.sample(prompts(3), SamplingConfig(max_tokens=6, ignore_eos=True), "evaluation")
    assert [completion.request for completion in found] == [f"evaluation.1/0:{row}" for row in range(3)]
    assert all(completion.versions.tolist() == [7] * 6 for completion in found), "exactly the published version"

    early = engines.collect(queue="rollouts")
    assert len(early) <= 4, "it waited for the running rows and no others"
    assert all(set(completion.versions.tolist()) == {0, 7} for completion in early), (
        "they continued with the new weights"
    )
    order = [completion.request for completion in early]
    wanted = [id for group in ahead for id in group.ids]
    while len(order) < len(wanted):
        worker.service.background()
        order += [completion.request for completion in engines.collect(queue="rollouts")]
    steps = [int(id.partition("/")[0]) for id in order]
    assert sorted(order) == sorted(wanted)
    assert steps[4:] == sorted(steps[4:]), "earlier steps first, whatever was submitted first"


def test_requests_of_equal_priority_stay_in_their_order(model: Path) -> None:
    worker = LocalEngine(model, rows=1)
    engines = RolloutClient([worker], SamplingConfig(max_tokens=2, ignore_eos=True), seed=0)  # type: ignore[list-item]
    for count in range(4):
        engines.submit([engines.requests(3, prompts(1, first=count)[0], {f"3/{count}": 0})], queue="x")
    order: list[str] = []
    while len(order) < 4:
        worker.service.background()
        order += [completion.request for completion in engines.collect(queue="x")]
    assert order == [f"3/{count}" for count in range(4)]


def test_running_completions_continue_with_new_weights_and_tokens_carry_their_version(model: Path) -> None:
    """Partial rollouts: each engine loads new weights in its own time, and its running completions continue with
    them."""
    workers = [LocalEngine(model, rows=4), LocalEngine(model, rows=4)]
    engines = RolloutClient(workers, SamplingConfig(max_tokens=20, ignore_eos=True), seed=0)  # type: ignore[arg-type]
    chosen = prompts(2)
    requests = [engines.requests(3, prompt, {f"3/{prompt.uid}/{k}": k for k in range(4)}) for prompt in chosen]
    engines.submit(requests, queue="rollouts")
    assert all(len(worker.service._engine._ids) == 4 for worker in workers), "one group per engine"
    for worker, steps in zip(workers, (5, 11), strict=True):
        for _ in range(steps):
            worker.service.background()
        worker.service._engine.version = 2  # as when weights are taken between two decode steps
    done = []
    while len(done) < 8:
        for worker in workers:
            worker.service.background()
        done += engines.collect(queue="rollouts")
    found = {completion.request: completion for completion in done}
    groups = [Group(prompt, [found[id] for id in group.ids]) for prompt, group in zip(chosen, requests, strict=True)]
    for group, old in zip(groups, (5, 11), strict=True):
        for completion in group.completions:
            assert completion.versions.tolist() == [0] * old + [2] * (20 - old)
        group.rewards = np.zeros(4, np.float32)
    metrics = rollout_metrics(Rollouts(3, 0, groups))
    assert metrics["rollout/staleness_max"] == 3.0
    assert metrics["rollout/staleness_mean"] == pytest.approx(((5 + 11) * 3 + (15 + 9) * 1) / 40)
