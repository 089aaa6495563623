"""Reservations that a later controller can reuse."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.cluster.placement.bundles import ProcessRequest
from lockstep.config.cluster import PlacementConfig

if find_spec("ray") is None:
    pytest.skip("needs the extra `ray`", allow_module_level=True)

from lockstep.cluster.ray.ray_reattach import STATE_FILE, PlacedResources, RayRunState

pytestmark = pytest.mark.ray


def engines(count: int, gpus: int = 1) -> list[ProcessRequest]:
    return [ProcessRequest(f"engine-{rank}", "rollout", rank, 1.0, gpus) for rank in range(count)]


@pytest.mark.parametrize(
    ("now", "placement", "why"),
    [
        (engines(2), PlacementConfig(), None),
        (engines(4), PlacementConfig(), "also has engine-2..3"),
        (engines(1), PlacementConfig(), "no longer has engine-1"),
        (engines(2, gpus=2), PlacementConfig(), "has different CPUs or GPUs for engine-0..1"),
        (engines(2), PlacementConfig(strategy="spread"), "its placement has changed"),
    ],
    ids=["same", "more", "fewer", "wider", "placement"],
)
def test_reservations_serve_only_the_same_processes(
    now: list[ProcessRequest], placement: PlacementConfig, why: str | None
) -> None:
    said = PlacedResources.of(now, placement).difference(PlacedResources.of(engines(2), PlacementConfig()))
    assert (said is None) if why is None else (said is not None and why in said)


def test_state_file_round_trip(tmp_path: Path) -> None:
    assert RayRunState.read(tmp_path / "nothing") == RayRunState(0, None)
    record = RayRunState(3, "run", PlacedResources.of(engines(2), PlacementConfig()))
    record.write(tmp_path)
    assert RayRunState.read(tmp_path) == record
    (tmp_path / STATE_FILE).write_text('{"run": "of an earlier version"}')
    assert RayRunState.read(tmp_path) == RayRunState(0, None)
