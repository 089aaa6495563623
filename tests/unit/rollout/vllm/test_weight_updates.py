"""How the vLLM engine handles the results of its workers' updates, and when it allocates released memory again. A fake
core records its calls."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.rollout.engine_protocol import Request
from lockstep.rollout.errors import NoWeights, TornEngine
from lockstep.rollout.vllm.engine import VllmEngine
from lockstep.rollout.weight_loading import publish_worker_progress, watch_worker_progress
from lockstep.watch.beacon.writer import current_beacon

DONE = SimpleNamespace(touched=True, error=None)
STORE = Path("store")


class Core:
    def __init__(self):
        model = SimpleNamespace(max_model_len=64, enable_sleep_mode=True)
        config = SimpleNamespace(
            model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=4),
            parallel_config=SimpleNamespace(world_size=1),
        )  # fmt: skip
        self.engine_core = SimpleNamespace(vllm_config=config)
        self.asked, self.answers = [], [DONE, DONE]

    def __getattr__(self, name):
        return lambda *arguments, **named: self.asked.append((name, *arguments))

    def collective_rpc(self, method, kwargs):
        self.asked.append((method,))
        return self.answers


@pytest.fixture
def engine():
    made = VllmEngine(
        Core(), None, frozenset(), SimpleNamespace(several_parts=False), 60, reader=lambda folder, version: None
    )
    made._waiting.add([Request("a", "a", np.ones(3, np.int32), 0)])
    return made


def step(engine):
    engine._admit, engine._process_outputs = lambda: None, lambda outputs: []
    return engine.step()


def test_an_update_wakes_the_weights_and_a_step_the_rest(engine):
    engine.sleep()
    engine.load_weights(STORE, 1)
    asked = engine.core.asked
    assert asked[1:4] == [("sleep", 1), ("wake_up", ["weights"]), ("take_weights",)] and engine.version == 1
    step(engine)
    assert [each for each in asked if each[0] == "wake_up"] == [("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    engine.wake()
    assert len([each for each in asked if each[0] == "wake_up"]) == 2


def test_an_engine_without_weights_serves_nothing_until_it_loads_some(engine):
    engine.sleep(level=2)
    with pytest.raises(NoWeights, match="load a version before"):
        step(engine)
    engine.load_weights(STORE, 1)
    assert step(engine) == []


def test_weights_that_a_version_may_lack_are_kept(engine):
    engine._expected.several_parts = True
    engine.sleep(level=2)
    assert ("sleep", 1) in engine.core.asked and step(engine) == []


def test_a_failure_before_any_change_leaves_the_engine_intact(engine):
    refused = KeyError("another version")
    engine.core.answers = [SimpleNamespace(touched=False, error=refused)] * 2
    with pytest.raises(KeyError, match="another version"):
        engine.load_weights(STORE, 1)
    assert step(engine) == [] and engine.version == 0


def test_workers_with_different_versions_are_a_torn_engine(engine):
    engine.core.answers = [DONE, SimpleNamespace(touched=False, error=KeyError("another version"))]
    with pytest.raises(TornEngine, match="version 1"):
        engine.load_weights(STORE, 1)
    engine.core.answers = [DONE, DONE]
    for call in (lambda: step(engine), lambda: engine.load_weights(STORE, 2)):
        with pytest.raises(TornEngine, match="version 1"):
            call()


def test_progress_of_worker_processes_counts_for_the_engine():
    code = "import sys; from lockstep.rollout.weight_loading import publish_worker_progress\n"
    code += "from lockstep.watch.beacon.writer import current_beacon\n"
    code += "with publish_worker_progress(sys.argv[1], int(sys.argv[2])): current_beacon().add('tensors', 1)"
    before = current_beacon().progress_count
    with watch_worker_progress(2) as path:
        for worker in "01":
            subprocess.run([sys.executable, "-c", code, path, worker], check=True, timeout=60)
        deadline = time.monotonic() + 30
        while current_beacon().progress_count == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with watch_worker_progress(1) as path, publish_worker_progress(path, 0):
        assert path == ""
