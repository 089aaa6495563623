"""By which speeds a step is divided among ranks, and what of a step's loads is stored."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.ledger import Ledger
from lockstep.ledger.rank_loads import RankLoads
from lockstep.run.trained_roles import TrainedRoles
from lockstep.run.trainer_group import TrainerGroup
from lockstep.train.trainer_protocol import RankLoad, StepStats


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "run", {"name": "run", "steps": 30}) as made:
        yield made


def values(speeds: Any, ranks: int = 2) -> dict[str, Any]:
    return {
        "recipe": "sft", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d"},
        "trainer": {"ranks": ranks, "rank_speeds": speeds},
    }  # fmt: skip


def group(speeds: Any, ranks: int = 2) -> TrainerGroup:
    role = check_config(values(speeds, ranks), "test").policy
    workers: Any = [SimpleNamespace()] * ranks
    infos: Any = [SimpleNamespace(packing="block")] * ranks
    return TrainerGroup(workers, infos, role)


def loads(slower: float) -> RankLoads:
    return RankLoads([1.0, slower], [0.0, 0.0], [1.0, 1.0], [100, 100], [100.0, 100.0])


def test_measured_speeds_are_stored_before_a_step_and_used_again(ledger: Ledger) -> None:
    made = group("measured")
    for step in range(10):
        made.choose_speeds(ledger, step)
        ledger.record_rank_loads(step, {"policy": loads(2.0 if step >= 3 else 1.0)})
    speeds = [ledger.rank_speeds(step, "policy") for step in range(10)]
    assert speeds[0] == speeds[4] == [1.0, 1.0] and speeds[9] == [1.0, 0.5]
    for step in range(10):  # what was measured since then makes no difference
        ledger.record_rank_loads(step, {"policy": loads(5.0)})
    for step in range(10):
        made.choose_speeds(ledger, step)
        assert made.speeds == speeds[step]
    made.choose_speeds(ledger, 10)
    assert made.speeds == [1.0, 0.2]


def test_speeds_of_another_number_of_ranks_are_measured_anew(ledger: Ledger) -> None:
    ledger.record_rank_speeds(0, "policy", [1.0, 0.5])
    made = group("measured", 3)
    made.choose_speeds(ledger, 0)
    assert made.speeds == [1.0, 1.0, 1.0] == ledger.rank_speeds(0, "policy")


def test_equal_and_given_speeds_store_nothing(ledger: Ledger) -> None:
    for given, expected in (("equal", None), ([1.0, 0.5], (1.0, 0.5))):
        made = group(given)
        made.choose_speeds(ledger, 0)
        assert made.speeds == expected and ledger.rank_speeds(0, "policy") is None


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.0], "fast"])
def test_wrong_speeds_are_refused(speeds: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.rank_speeds|rank_speeds has 1 numbers"):
        check_config(values(speeds), "test")


def test_loads_of_a_steps_updates_are_added(ledger: Ledger) -> None:
    made = group("equal")
    minibatch: Any = SimpleNamespace(cost=np.array([30.0, 10.0]), tokens_of_ranks=np.array([20, 10]), skipped=0)
    for _ in range(2):
        stats = StepStats({}, [RankLoad(1.0, 0.5, 100.0), RankLoad(2.0, 0.25, 300.0)])
        made.step_metrics(minibatch, stats)
    assert TrainedRoles([made]).record_loads(ledger, 0) == []
    (row,) = ledger.rank_loads("policy")
    assert row.loads == RankLoads([2.0, 4.0], [1.0, 0.5], [100.0, 300.0], [40, 20], [60.0, 20.0])
    assert made.take_loads() is None, "they are taken once"
