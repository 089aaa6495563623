"""What of a run's places a later controller can go on with."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.cluster.bundles import Wanted
from lockstep.config.placement import Placement

if find_spec("ray") is None:
    pytest.skip("needs the extra `ray`", allow_module_level=True)

from lockstep.cluster.ray.record import RECORD, Needs, Record

pytestmark = pytest.mark.ray


def engines(count: int, gpus: int = 1) -> list[Wanted]:
    return [Wanted(f"engine-{rank}", "rollout", rank, 1.0, gpus) for rank in range(count)]


@pytest.mark.parametrize(
    ("now", "placement", "why"),
    [
        (engines(2), Placement(), None),
        (engines(4), Placement(), "has also engine-2..3"),
        (engines(1), Placement(), "has no more engine-1"),
        (engines(2, gpus=2), Placement(), "has other CPUs or GPUs for engine-0..1"),
        (engines(2), Placement(strategy="spread"), "its placement is another one"),
    ],
    ids=["same", "more", "fewer", "wider", "placement"],
)
def test_places_do_for_the_same_processes_only(now: list[Wanted], placement: Placement, why: str | None) -> None:
    said = Needs.of(now, placement).difference(Needs.of(engines(2), Placement()))
    assert (said is None) if why is None else (said is not None and why in said)


def test_a_record_says_who_was_the_last(tmp_path: Path) -> None:
    assert Record.read(tmp_path / "nothing") == Record(0, None)
    record = Record(3, "run", Needs.of(engines(2), Placement()))
    record.write(tmp_path)
    assert Record.read(tmp_path) == record
    (tmp_path / RECORD).write_text('{"run": "of an earlier version"}')
    assert Record.read(tmp_path) == Record(0, None)
