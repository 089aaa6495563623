"""What an engine's beacon shows."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.base.folders import new_run_id
from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.engine_protocol import Request, RequestBatch
from lockstep.rollout.engine_service import EngineService
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
    service.submit(RequestBatch.of([request]))
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
