"""Offloading: the trainer frees its devices while engines generate, and returns before it is needed."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.loader import check_config
from lockstep.config.trainer import OffloadConfig, TrainerConfig
from lockstep.ledger.ledger import Ledger
from lockstep.run.devices.device_turns import EngineTurn, turns_by_role
from lockstep.run.interrupt import InterruptHandler
from lockstep.run.planning.run_data import RunData
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.recovery.trainer_recovery import RecoveryContext
from lockstep.run.run import MissingRole, Run, RunRoles
from lockstep.run.run_reporter import StageTimers
from lockstep.run.trained_roles import TrainedRoles
from lockstep.run.trainer_group import TrainerGroup
from lockstep.run.weight_sync import WeightPublisher


class Done:
    """A call that has its answer."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self, why: str) -> Any:
        return self.value


class Worker:
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def submit(self, method: Any, *arguments: Any) -> Done:
        self.calls.append((method.__name__, *arguments))
        return Done(SimpleNamespace(values={}, loads=[]) if method.__name__ == "step" else None)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr("lockstep.run.trainer_group.gather_results", lambda calls, why: [call.value for call in calls])
    monkeypatch.setattr("lockstep.run.trainer_group.gather_identical", lambda calls, why: calls[0].value)
    monkeypatch.setattr("lockstep.run.trainer_group.wait_for_calls", lambda groups, why: None)
    return Worker()


def run_of(folder: Path, worker: Worker, offload: dict[str, bool], colocate: object = (), engines: Any = None) -> Run:
    values = {
        "recipe": "grpo", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d"},
        "reward": {"terms": [{"kind": "exact_match"}]}, "trainer": {"offload": offload},
        "placement": {"colocate": colocate},
    }  # fmt: skip
    config = check_config(values, "test")
    turns = turns_by_role(config)
    policy = TrainerGroup([worker], [SimpleNamespace()], config.policy, turns["policy"])  # type: ignore[list-item]
    reporter: Any = SimpleNamespace(stage=StageTimers())
    launcher: Any = None
    folder.mkdir(exist_ok=True)
    with Ledger.create(folder / "run", {"name": "x"}) as ledger:
        recovery = RecoveryManager(config.recovery, ledger)
        roles = RunRoles(TrainedRoles([policy]), RunData(SimpleNamespace(has_images=False)), engines)
        if engines is not None:
            roles.engine_turn = EngineTurn(turns["rollout"], engines)
        return Run(
            config,
            ledger.folder,
            ledger,
            roles,
            reporter,
            InterruptHandler(),
            0,
            RecoveryContext(recovery, launcher),
        )


def a_step(run: Run) -> None:
    minibatch: Any = SimpleNamespace(encode=lambda: [None], skipped=0)
    for name in ("rollout", "reward", "rollout"):
        with run.stage(name):
            pass
    with run.stage("logprobs"):
        run.policy.evaluate(minibatch, ["logprobs"])
    with run.stage("train"):
        run.policy.step(minibatch)
    with run.stage("publish"):
        run.policy.write_weights(1)
    with run.stage("evaluate"):
        pass
    with run.stage("checkpoint"):
        run.policy.save(Path("x"))


def test_the_trainer_is_offloaded_while_engines_generate(tmp_path: Path, worker: Worker) -> None:
    a_step(run_of(tmp_path, worker, {"optimizer": True}))
    assert [call[0] for call in worker.calls] == [
        *("offload", "onload", "evaluate", "step", "write_weights", "offload", "save")
    ]
    assert worker.calls[0] == ("offload", False, True)


def test_nothing_is_offloaded_by_default(tmp_path: Path, worker: Worker) -> None:
    a_step(run_of(tmp_path, worker, {}))
    assert [call[0] for call in worker.calls] == ["evaluate", "step", "write_weights", "save"]
    assert not OffloadConfig().anything and OffloadConfig(parameters=True).anything


def test_engines_sleep_while_the_trainer_trains_on_their_devices(tmp_path: Path, worker: Worker) -> None:
    engines = SimpleNamespace(
        sleep=lambda: worker.calls.append(("sleep",)), wake=lambda: worker.calls.append(("wake",))
    )
    a_step(run_of(tmp_path, worker, {"parameters": True}, "all", engines))
    calls = [call[0] for call in worker.calls]
    before, training = ["offload", "wake", "wake"], ["sleep", "onload", "evaluate", "sleep", "step", "write_weights"]
    assert calls == [*before, *training, "offload", "wake", "save"]
    assert worker.calls[0] == ("offload", True, True), "the optimizer as well, as nothing says otherwise"
    worker.calls.clear()
    a_step(run_of(tmp_path / "stays", worker, {"parameters": False, "optimizer": False}, "all", engines))
    assert "offload" not in [call[0] for call in worker.calls]
    worker.calls.clear()
    a_step(run_of(tmp_path / "apart", worker, {}, (), engines))
    assert ("sleep",) not in worker.calls


def test_engines_load_weights_after_the_trainer_has_freed_memory(tmp_path: Path, worker: Worker) -> None:
    """They wake for that: the trainer writes first, then leaves the device."""
    role: Any = SimpleNamespace(
        objective=None, trainer=TrainerConfig(offload=OffloadConfig(parameters=True, optimizer=True))
    )
    policy = TrainerGroup([worker], [SimpleNamespace()], role)  # type: ignore[list-item]
    tell = worker.calls.append

    def publish(version: int, write: Callable[[], object]) -> None:
        write()
        tell(("deliver",))

    delivery: Any = SimpleNamespace(publish=publish, delete_former_stores=lambda: None, blocking_readers=list)
    engines: Any = SimpleNamespace(workers=[], progress_by_engine=lambda _: {}, load_weights=lambda *_: tell(("load",)))
    ledger: Any = SimpleNamespace(record_published=lambda version: None)
    weights = WeightPublisher(policy, engines, delivery, ledger)
    for version in (1, 1):
        weights.publish(version)
    assert [call[0] for call in worker.calls] == ["write_weights", "offload", "deliver", "load"]


def test_every_trained_role_is_offloaded_while_engines_generate_or_load_weights(tmp_path: Path, worker: Worker) -> None:
    run, critic = run_of(tmp_path, worker, {"optimizer": True}), Worker()
    role = run.policy.role.model_copy(update={"name": "critic"})
    group = TrainerGroup([critic], [SimpleNamespace()], role)  # type: ignore[list-item]
    run.trained = run.roles.trained = TrainedRoles([run.policy, group])
    minibatch: Any = SimpleNamespace(encode=lambda: [None], skipped=0)
    for stage in ("rollout", "train"):
        with run.stage(stage):
            if stage == "train":
                run.policy.step(minibatch)
                run.critic.step(minibatch)
    run.trained.offload()  # as before engines load weights
    assert [call[0] for call in critic.calls] == ["offload", "onload", "step", "offload"]
    assert worker.calls == critic.calls


def test_a_role_that_the_recipe_has_not_is_named(tmp_path: Path, worker: Worker) -> None:
    with pytest.raises(MissingRole, match="this run has no critic"):
        _ = run_of(tmp_path, worker, {}).critic
