"""The root cause when one rank stalls and another one raises, in either order."""

import io
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.base.errors import CollectiveStalled
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.rpc.futures import PendingCall
from lockstep.cluster.worker_failures import describe_failure, is_effect
from lockstep.config.fault_tolerance import RecoveryConfig as Config
from lockstep.ledger.ledger import Ledger
from lockstep.report.live_console import LiveConsole
from lockstep.run.recovery import recovery_manager, trainer_recovery
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.recovery.trainer_recovery import RecoveryContext, TrainerRecovery
from lockstep.run.recovery.verdict_handler import VerdictHandler
from lockstep.run.trained_roles import TrainedRoles
from lockstep.watch.diagnosis.verdict import Culprit, Verdict, VerdictKind, VerdictLevel
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

FREED = "lockstep.base.errors.CollectiveStalled"
WHY = "policy-1 is stopped by a signal or a debugger"
CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:46111"


def remote(kind: str, message: str) -> RemoteError:
    code = CollectiveStalled.error_code if kind == FREED else ""
    return RemoteError("policy-0", 0, kind, message, '  File "step.py", line 9, in step\n', code)


def said(kind: VerdictKind = VerdictKind.ABSENT, number: int = 1) -> SupervisorEvent:
    verdict = Verdict(kind, VerdictLevel.CONFIRMED, (Culprit(1, "policy"),), confidence=0.95).json()
    return SupervisorEvent(number, "told", "confirmed", WHY, verdict, 4.0, None, time.time(), ("policy-1",))


@dataclass
class Rank:
    """A worker as far as it is called here: answers, or dies when it is killed."""

    spec: Any
    answers: bool
    open: list[PendingCall[None]] = field(default_factory=list)
    dead: bool = False

    @property
    def name(self) -> str:
        return str(self.spec.name)

    def submit(self, method: Any, *args: Any) -> PendingCall[None]:
        call: PendingCall[None] = PendingCall(self, method.__name__, lambda payload: None)  # type: ignore[arg-type]
        self.open.append(call)
        if self.dead:
            self.die()
        elif self.answers:
            call.settle(memoryview(b""))
        return call

    def die(self) -> None:
        self.dead = True
        for call in self.open:
            call.fail(WorkerDied(self.spec.name, self.spec.rank, -9, ""))


@dataclass
class Site:
    """Two ranks, the second of which does not answer; recovery hears of verdicts."""

    ledger: Ledger
    recovery: RecoveryManager
    verdicts: VerdictHandler
    ranks: list[Rank]
    trainers: TrainerRecovery

    def failed(self) -> dict[str, Any]:
        self.recovery.flush()
        (found,) = [each.fields for each in self.ledger.events() if each.fields.get("action") == "failed"]
        return dict(found)

    def recover(self, error: Exception) -> None:
        self.trainers.recover(error, 3)  # type: ignore[arg-type]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(trainer_recovery, "ABORT_LIMIT_S", 1.0)
    monkeypatch.setattr(TrainerRecovery, "_rebuild", lambda self, ranks: 3)
    ranks = [Rank(SimpleNamespace(name=f"policy-{n}", rank=n), answers=n == 0) for n in range(2)]

    def kill(name: str) -> bool:
        found = next(each for each in ranks if each.spec.name == name)
        alive = not found.dead
        found.die()
        return alive

    with Ledger.create(tmp_path / "run", {"name": "run", "steps": 1}) as ledger:
        recovery = RecoveryManager(Config(), ledger)
        verdicts = VerdictHandler(
            LiveConsole("run", tmp_path, 1, quiet=True, stream=io.StringIO(), terminal=False), ledger
        )
        recovery.listen(verdicts, kill)
        policy: Any = SimpleNamespace(workers=ranks, ranks=2, role=SimpleNamespace(name="policy"))
        nobody: Any = None
        healing = RecoveryContext(recovery, nobody)
        yield Site(
            ledger,
            recovery,
            verdicts,
            ranks,
            TrainerRecovery(TrainedRoles([policy]), healing, nobody, ledger, None),
        )


@pytest.mark.parametrize("kind, text", [(FREED, WHY), ("RuntimeError", CLOSED)], ids=["freed", "closed"])
@pytest.mark.parametrize("first", ["verdict", "error"])
def test_the_culprit_is_named_whether_verdict_or_error_comes_first(
    site: Site, first: str, kind: str, text: str
) -> None:
    if first == "verdict":
        site.verdicts.handle(said())
    else:
        threading.Timer(0.2, site.verdicts.handle, [said()]).start()
    site.recover(remote(kind, text))
    found = site.failed()
    assert found["worker"] == "policy-1"
    assert (found["what"], found["why"]) == ("died (SIGKILL)", f"confirmed: {WHY}")
    assert [each.worker for each in site.recovery._history] == ["policy-1"], "it is the culprit's restart that counts"


def test_a_death_is_the_cause_whichever_rank_raises(site: Site) -> None:
    site.ranks[1].die()
    threading.Timer(0.1, site.verdicts.handle, [said(VerdictKind.DEAD)]).start()
    site.recover(remote("RuntimeError", CLOSED))
    found = site.failed()
    assert (found["worker"], found["what"], "why" in found) == ("policy-1", "died (SIGKILL)", False)


def test_a_culprit_that_cannot_be_killed_is_named(site: Site) -> None:
    site.recovery._kill = lambda name: True  # it was told to, and does not end
    threading.Timer(0.1, site.verdicts.handle, [said()]).start()
    site.recover(remote(FREED, WHY))
    found = site.failed()
    assert found["worker"] == "policy-1"
    assert (found["what"], found["why"]) == ("held up the other ranks", f"confirmed: {WHY}")


def test_an_error_of_a_rank_itself_names_that_rank(site: Site) -> None:
    site.verdicts.handle(said())
    began = time.monotonic()
    site.recover(remote("torch.OutOfMemoryError", "CUDA out of memory"))
    assert site.failed()["worker"] == "policy-0"
    assert time.monotonic() - began < 0.5, "nobody is waited for"


def test_without_a_verdict_the_raising_rank_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_manager, "VERDICT_AFTER_ABORT_S", 0.2)
    site.recover(remote(FREED, WHY))
    assert (site.failed()["worker"], site.failed()["what"]) == ("policy-0", f"raised CollectiveStalled: {WHY}")


def test_the_ledger_gets_no_secrets_of_an_errors_message(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "wolf-and-moon-17")
    site.recover(remote("OSError", "https://anna:hunter22@judge refused wolf-and-moon-17"))
    assert site.failed()["what"] == "raised OSError: https://[hidden]@judge refused [hidden]"


@pytest.mark.parametrize(
    "kind, message, effect",
    [
        (FREED, "rank 1: OSError: No space left on device", True),
        ("RuntimeError", CLOSED, True),
        ("torch.distributed.DistBackendError", "NCCL error: remote process exited or there was a network error: "
         "ncclRemoteError", True),
        ("lockstep.train.errors.NonFinite", "loss of optimizer step 3 is not finite", False),
        ("RuntimeError", "shape mismatch", False),
    ],
    ids=["freed", "gloo", "nccl", "ours", "own"],
)  # fmt: skip
def test_errors_that_are_effects(kind: str, message: str, effect: bool) -> None:
    error = remote(kind, message)
    assert is_effect(error) == effect
    assert (describe_failure(error, "policy", "policy-0", 0, 0).how == "stalled") == effect
