"""Recovery of one of several trained roles: which ranks are replaced, and what is restored."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.base.errors import CollectiveStalled
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.rpc.futures import PendingCall
from lockstep.config.fault_tolerance import RecoveryConfig
from lockstep.config.trainer import CheckpointConfig, TrainerConfig
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_incidents import RECOVERY_EVENT
from lockstep.run.checkpoint_manager import CheckpointManager
from lockstep.run.devices.device_turns import DeviceTurns
from lockstep.run.errors import GaveUp
from lockstep.run.recovery import trainer_recovery
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.recovery.trainer_recovery import RecoveryContext, TrainerRecovery
from lockstep.run.trained_roles import TrainedRoles
from lockstep.train.errors import CheckpointError

SIZES = {"policy": 2, "critic": 1}


class Rank:
    """A rank whose progress is known."""

    def __init__(self, name: str) -> None:
        self.name, self.progress_count, self.last_progress_at = name, 0, time.monotonic()
        self.stall_limit_s, self.notice_after_s = 0.5, 60.0

    def describe(self) -> str:
        return "is in stage train"


class Group:
    """The ranks of a role; `dead` is a rank that does not answer any more."""

    def __init__(self, role: str, workers: list[Any]) -> None:
        self.role = SimpleNamespace(name=role, trainer=TrainerConfig(ranks=len(workers)))
        self.turns = DeviceTurns()
        self.replace_ranks(workers, [])

    def ranks_killed(self) -> None:
        pass

    @property
    def ranks(self) -> int:
        return len(self.workers)

    def replace_ranks(self, workers: Sequence[Any], infos: Sequence[Any]) -> None:
        self.workers, self.loaded, self.dead = list(workers), "", ""
        self.open_calls: list[list[PendingCall[Any]]] = []

    def close_calls(self, calls: Sequence[Any]) -> None:
        self.open_calls = [each for each in self.open_calls if each is not calls]

    def saved(self) -> bool:
        self._answer()
        return True

    def load(self, folder: Path) -> None:
        self._answer()
        self.loaded = f"{folder.parent.name}/{folder.name}"

    def begin_step(self) -> list[PendingCall[None]]:
        """A step that all ranks are doing."""
        calls = [PendingCall(Rank(worker.spec.name), "step", lambda payload: None) for worker in self.workers]
        self.open_calls = [calls]
        return calls

    def _answer(self) -> None:
        if self.dead:
            raise WorkerDied(self.dead, 0, -9, "")


def set_up(workers: Sequence[Any]) -> dict[str, tuple[list[Any], list[None]]]:
    """Workers by role, without a model to load."""
    ready: dict[str, tuple[list[Any], list[None]]] = {worker.spec.role: ([], []) for worker in workers}
    for worker in workers:
        ready[worker.spec.role][0].append(worker)
        ready[worker.spec.role][1].append(None)
    return ready


class Site:
    """A policy on two ranks and a critic on one, after three steps."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger, self.killed, self.started, self.opened = ledger, [], [], 0
        monkeypatch.setattr(trainer_recovery, "set_up_ranks", set_up)
        monkeypatch.setattr(TrainerRecovery, "_wait_for_aborts", lambda self, role: None)
        self.groups = {role: Group(role, self.workers(role, range(size))) for role, size in SIZES.items()}
        self.trained: Any = TrainedRoles(list(self.groups.values()))  # type: ignore[arg-type]
        self.manager = RecoveryManager(RecoveryConfig(), ledger)
        launcher: Any = SimpleNamespace(kill=self.kill, launch=self.launch)
        checkpoints = CheckpointManager(CheckpointConfig(), ledger.folder / "checkpoints", ledger, self.trained)
        weights: Any = SimpleNamespace(open_on_ranks=self.open)
        context = RecoveryContext(self.manager, launcher)
        self.recovery = TrainerRecovery(self.trained, context, checkpoints, ledger, weights)

    def workers(self, role: str, ranks: Sequence[int], end: str = "") -> list[Any]:
        return [SimpleNamespace(spec=SimpleNamespace(name=f"{role}-{n}{end}", rank=n, role=role)) for n in ranks]

    def kill(self, workers: Sequence[Any]) -> None:
        self.killed += [worker.spec.name for worker in workers]

    def launch(self, role: str, ranks: Sequence[int]) -> list[Any]:
        self.started.append((role, len(ranks)))
        return self.workers(role, ranks, ".1")

    def open(self) -> None:
        self.opened += 1

    def checkpoint(self) -> None:
        path = self.ledger.folder / "checkpoints" / "00000002"
        path.mkdir(parents=True)
        self.ledger.record_checkpoint(1, path)

    def events(self, action: str) -> list[tuple[str, str]]:
        self.manager.flush()
        found = [each.fields for each in self.ledger.events() if each.kind == RECOVERY_EVENT]
        return [(each["role"], each["worker"]) for each in found if each["action"] == action]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    ledger = Ledger.create(tmp_path / "run", {"name": "x"})
    for step in range(3):
        ledger.commit(step, {})
    return Site(ledger, monkeypatch)


def died(worker: str) -> WorkerDied:
    return WorkerDied(worker, 0, -9, "")


def test_a_kept_role_finishes_the_step_that_it_is_doing(site: Site) -> None:
    site.checkpoint()
    policy = site.groups["policy"]
    first, second = policy.begin_step()
    threading.Timer(0.1, first.settle, [memoryview(b"")]).start()
    threading.Timer(0.3, second.settle, [memoryview(b"")]).start()
    assert site.recovery.recover(died("critic-0"), 3) == 2
    assert first.done() and second.done()
    assert site.started == [("critic", 1)]
    assert (policy.open_calls, policy.loaded) == ([], "00000002/policy"), "the results are dropped"


@pytest.mark.parametrize("how", ["dead", "freed", "stuck"])
def test_a_role_whose_step_fails_while_another_is_restarted_is_replaced_too(site: Site, how: str) -> None:
    """A rank that has left a collective cannot be used again, although it answers."""
    site.checkpoint()
    first, second = site.groups["policy"].begin_step()
    if how == "dead":
        second.fail(died("policy-1"))
    elif how == "freed":
        first.fail(RemoteError("policy-0", 0, "CollectiveStalled", "it", "", CollectiveStalled.error_code))
    else:
        first.settle(memoryview(b""))  # and the second makes no progress
    assert site.recovery.recover(died("critic-0"), 3) == 2
    assert site.started == [("critic", 1), ("policy", 2)]
    assert {group.loaded for group in site.groups.values()} == {"00000002/policy", "00000002/critic"}
    name = "policy-0" if how == "freed" else "policy-1"
    assert site.events("failed") == site.events("restarted") == [("critic", "critic-0"), ("policy", name)]
    assert site.groups["policy"].open_calls == []


def test_an_error_of_a_kept_role_that_a_restart_cannot_mend_ends_the_run(site: Site) -> None:
    site.checkpoint()
    first, _ = site.groups["policy"].begin_step()
    first.fail(RemoteError("policy-0", 0, "CheckpointError", "it is torn", "", CheckpointError.error_code))
    with pytest.raises(RemoteError, match="it is torn"):
        site.recovery.recover(died("critic-0"), 3)
    assert site.started == []


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_only_the_failed_roles_ranks_are_replaced_and_all_are_rolled_back(site: Site, role: str) -> None:
    site.checkpoint()
    assert site.recovery.recover(died(f"{role}-0"), 3) == 2
    assert site.started == [(role, SIZES[role])]
    assert site.killed == [f"{role}-{rank}" for rank in range(SIZES[role])]
    assert {name: group.loaded for name, group in site.groups.items()} == {
        "policy": "00000002/policy",
        "critic": "00000002/critic",
    }
    assert site.opened == (role == "policy"), "only new ranks of the policy open the store of weights"
    assert site.events("failed") == site.events("restarted") == [(role, f"{role}-0")]


def test_without_a_state_to_restore_all_ranks_are_replaced(site: Site) -> None:
    assert site.recovery.recover(died("critic-0"), 0) == 0
    assert set(site.started) == {("critic", 1), ("policy", 2)}
    assert [worker.spec.name for worker in site.groups["policy"].workers] == ["policy-0.1", "policy-1.1"]
    assert site.opened == 1


def test_a_kept_role_that_fails_meanwhile_is_replaced_too(site: Site) -> None:
    site.checkpoint()
    site.groups["policy"].dead = "policy-1"
    assert site.recovery.recover(died("critic-0"), 3) == 2
    assert {name: group.loaded for name, group in site.groups.items()} == {
        "policy": "00000002/policy",
        "critic": "00000002/critic",
    }
    assert site.events("failed") == [("critic", "critic-0"), ("policy", "policy-1")]
    assert site.events("restarted") == [("critic", "critic-0"), ("policy", "policy-1")]


def test_each_role_has_a_budget_of_its_own(site: Site) -> None:
    site.checkpoint()
    allowed = RecoveryConfig().policy.max_restarts
    for _ in range(allowed):
        site.recovery.recover(died(site.groups["critic"].workers[0].spec.name), 3)
    site.recovery.recover(died("policy-0"), 3)
    with pytest.raises(GaveUp, match=rf"recovery.policy.max_restarts {allowed}"):
        site.recovery.recover(died("critic-0.1"), 3)


def test_an_error_of_another_process_is_raised(site: Site) -> None:
    error = RemoteError("engine-0", 0, "ValueError", "bad request", "", "")
    with pytest.raises(RemoteError, match="bad request"):
        site.recovery.recover(error, 3)
    assert site.started == []
