"""State of several trained roles: one version for all of them, on disk and in memory."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.rpc.futures import PendingCall
from lockstep.config.trainer import CheckpointConfig
from lockstep.ledger.ledger import Ledger
from lockstep.run.checkpoint_manager import CheckpointManager, restore_checkpoint
from lockstep.run.devices.device_turns import DeviceTurns
from lockstep.run.recovery.trainer_recovery import MemoryCheckpointer
from lockstep.run.trained_roles import TrainedRoles
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.errors import CheckpointError


class Group:
    """One rank of a role, whose state is a version."""

    def __init__(self, role: str) -> None:
        self.role, self.ranks, self.done, self.state = SimpleNamespace(name=role), 1, True, -1

    def save(self, folder: Path) -> None:
        self._folder = folder
        self.saved()

    def saved(self) -> bool:
        if self.done:
            self._folder.mkdir(exist_ok=True)
            (self._folder / "state").write_text(self._folder.parent.name[:8])
        return self.done

    def load(self, folder: Path) -> None:
        if not (folder / "state").exists():
            name = self.role.name
            raise RemoteError(f"{name}-0", 0, "CheckpointError", f"{folder}: is torn", "", CheckpointError.error_code)
        self.state = int((folder / "state").read_text())

    def save_to_memory(self, folder: Path, version: int) -> None:
        MemoryCheckpoints(folder, 0, 1).write(version, {"x": torch.tensor(version)}, {})

    def load_from_memory(self, folder: Path, version: int) -> None:
        tensor = torch.tensor(-1)
        MemoryCheckpoints(folder, 0, 1).read(version, {"x": tensor})
        self.state = int(tensor)


@pytest.fixture
def groups() -> list[Any]:
    return [Group("policy"), Group("critic")]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger.create(tmp_path / "run", {"name": "x"})
    for step in range(12):
        ledger.commit(step, {})
    return ledger


def manager(ledger: Ledger, trained: TrainedRoles) -> CheckpointManager:
    config = CheckpointConfig.model_validate({"keep_last": 2})
    return CheckpointManager(config, ledger.folder / "checkpoints", ledger, trained, trained.parts)


def names(checkpoints: CheckpointManager) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_a_checkpoint_has_its_name_when_the_parts_of_all_roles_are_complete(ledger: Ledger, groups: list[Any]) -> None:
    checkpoints = manager(ledger, TrainedRoles(groups))
    groups[1].done = False
    checkpoints.begin(4, None)
    checkpoints.poll()
    assert (names(checkpoints), checkpoints.newest()) == (["00000004.parts"], None)
    groups[1].done = True
    checkpoints.poll()
    assert (names(checkpoints), checkpoints.newest()) == (["00000004"], 4)
    assert sorted(path.name for path in (checkpoints.folder / "00000004").iterdir()) == ["critic", "policy"]
    for version in (6, 8):
        checkpoints.begin(version, None)
        checkpoints.finish()
    assert names(checkpoints) == ["00000006", "00000008"], "a version is removed with all its parts"


def test_with_one_role_the_folder_is_its_checkpoint(ledger: Ledger, groups: list[Any]) -> None:
    trained = TrainedRoles(groups[:1])
    assert trained.parts == () and trained.part_folder(Path("x"), "policy") == Path("x")
    checkpoints = manager(ledger, trained)
    checkpoints.begin(4, None)
    checkpoints.finish()
    assert [path.name for path in (checkpoints.folder / "00000004").iterdir()] == ["state"]


def test_parts_that_a_lost_rank_left_are_removed_unless_all_are_complete(ledger: Ledger, groups: list[Any]) -> None:
    checkpoints = manager(ledger, TrainedRoles(groups))
    groups[0].done = False
    checkpoints.begin(4, None)
    checkpoints.writer_lost()
    assert (names(checkpoints), checkpoints.newest()) == ([], None)
    groups[0].done = True
    checkpoints.begin(6, 0.5)
    checkpoints.writer_lost()
    assert (names(checkpoints), checkpoints.newest()) == (["00000006"], 6)
    (checkpoints.folder / "00000008.parts" / "critic").mkdir(parents=True)
    (checkpoints.folder / "mine.parts").mkdir()
    assert names(manager(ledger, TrainedRoles(groups))) == ["00000006", "mine.parts"], "as a killed run leaves it"


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_all_roles_fall_back_if_the_part_of_one_is(ledger: Ledger, groups: list[Any], role: str, how: str) -> None:
    trained = TrainedRoles(groups)
    checkpoints = manager(ledger, trained)
    for version in (2, 4):
        checkpoints.begin(version, None)
        checkpoints.finish()
    part = checkpoints.folder / "00000004" / role
    (part / "state").unlink()
    if how == "missing":
        part.rmdir()
    assert restore_checkpoint(trained, ledger) == 2
    assert [group.state for group in groups] == [2, 2]
    assert [row.step + 1 for row in ledger.checkpoints()] == [2]


def test_only_a_version_that_all_roles_have_is_restored_from_memory(tmp_path: Path, groups: list[Any]) -> None:
    trained = TrainedRoles(groups)
    memory = MemoryCheckpointer(trained, tmp_path / "state")
    assert memory.restore(at_least=0) is None
    for version in (1, 2):
        memory.write(version)
    groups[0].save_to_memory(tmp_path / "state" / "policy", 3)  # the critic died before it had copied its state
    assert memory.restore(at_least=3) is None
    assert memory.restore(at_least=0) == 2
    assert [group.state for group in groups] == [2, 2]
    for description in (tmp_path / "state" / "critic").glob("*.json"):
        description.unlink()
    assert memory.restore(at_least=0) is None


class Trainee:
    """A role whose ranks answer when they are told to."""

    def __init__(self, role: str) -> None:
        self.role, self.calls, self.open_calls, self.turns = SimpleNamespace(name=role), [], [], DeviceTurns()
        self.name, self.progress_count, self.last_progress_at = f"{role}-0", 0, time.monotonic()
        self.stall_limit_s = self.notice_after_s = 60.0

    def submit_step(self, minibatch: Any) -> list[PendingCall[Any]]:
        call: PendingCall[Any] = PendingCall(self, "step", lambda payload: minibatch)  # type: ignore[arg-type]
        self.calls.append(call)
        self.open_calls.append([call])
        return self.open_calls[-1]

    def step_metrics(self, minibatch: Any, stats: Any) -> dict[str, float]:
        assert minibatch == stats, "the result belongs to this mini-batch"
        return {"loss": float(stats)}

    def close_calls(self, calls: list[Any]) -> None:
        self.open_calls = [each for each in self.open_calls if each is not calls]


def answer(role: Trainee, number: int) -> None:
    role.calls[number].settle(memoryview(b""))


def test_roles_take_their_steps_at_the_same_time() -> None:
    """Each has two steps to do at most; one may have more steps than the other."""
    policy, critic = Trainee("policy"), Trainee("critic")
    trained, made = TrainedRoles([policy, critic]), []  # type: ignore[list-item]

    def minibatches() -> Iterator[Any]:
        for number in range(4):
            made.append(number)
            yield number

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(trained.step, {"policy": minibatches(), "critic": [10, 11]})
        until(lambda: len(policy.calls) == len(critic.calls) == 2)
        answer(critic, 0)
        answer(critic, 1)
        time.sleep(0.1)
        assert made == [0, 1], "not before the first step of both is done"
        answer(policy, 0)
        until(lambda: len(policy.calls) == 3)
        assert len(policy.open_calls) == 2
        for number in (1, 2):
            answer(policy, number)
        until(lambda: len(policy.calls) == 4)
        answer(policy, 3)
        found = result.result(10)
    losses = {role: [each["loss"] for each in steps] for role, steps in found.items()}
    assert losses == {"policy": [0, 1, 2, 3], "critic": [10, 11]}
    seconds = {role: sum(each["train_s"] for each in steps) for role, steps in found.items()}
    assert 0 <= seconds["critic"] < 0.1 < seconds["policy"], "each role's own time"
    assert policy.open_calls == critic.open_calls == []


def test_roles_that_share_devices_take_their_steps_one_after_the_other() -> None:
    policy, critic = Trainee("policy"), Trainee("critic")
    policy.turns = critic.turns
    trained = TrainedRoles([policy, critic])  # type: ignore[list-item]
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(trained.step, {"critic": [10, 11, 12], "policy": [0, 1]})
        until(lambda: len(critic.calls) == 2)
        for number in range(3):
            until(lambda number=number: len(critic.calls) > number)
            assert policy.calls == [], "the policy is not asked before the critic's last step"
            answer(critic, number)
        until(lambda: len(policy.calls) == 2)
        assert critic.open_calls == []
        for number in range(2):
            answer(policy, number)
        found = result.result(10)
    losses = {role: [each["loss"] for each in steps] for role, steps in found.items()}
    assert losses == {"critic": [10, 11, 12], "policy": [0, 1]}


def test_a_failure_of_one_role_leaves_the_open_calls_of_the_other() -> None:
    policy, critic = Trainee("policy"), Trainee("critic")
    trained = TrainedRoles([policy, critic])  # type: ignore[list-item]
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(trained.step, {"policy": [0, 1, 2], "critic": [10, 11, 12]})
        until(lambda: len(critic.calls) == 2)
        critic.calls[0].fail(WorkerDied("critic-0", 0, -9, ""))
        with pytest.raises(WorkerDied, match="critic-0"):
            result.result(10)
    assert policy.open_calls == [[each] for each in policy.calls] and len(policy.calls) == 2


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
