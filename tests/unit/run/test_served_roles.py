"""Which roles compute a batch's fields, and the restart of a served role that fails meanwhile."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.base.errors import CollectiveStalled
from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.cluster.rpc.futures import PendingCall
from lockstep.config.fault_tolerance import RecoveryConfig, RestartBudget
from lockstep.config.model import ModelConfig
from lockstep.config.serve_role import ServeRole
from lockstep.config.trainer import OffloadConfig, TrainerConfig
from lockstep.data.forest_builder import forest_from_documents
from lockstep.data.micro_batch import decode_micro_batches
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.data.samples import Document
from lockstep.ledger.ledger import Ledger
from lockstep.run.devices.device_turns import DeviceTurns
from lockstep.run.errors import GaveUp
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.served_roles import ServedGroup, annotate_batches
from lockstep.run.trainer_group import TrainerGroup

Answer = Callable[[str, Any], Any]
RANKS = 2


class Worker:
    """Answers calls at once, with the first token of every row as the value of its targets, or fails."""

    stall_limit_s, notice_after_s, last_progress_at, progress_count = 5.0, 5.0, 0.0, 0

    def __init__(self, name: str, rank: int, packing: str = "forest") -> None:
        self.name, self.packing = name, packing
        self.spec = SimpleNamespace(name=name, rank=rank, role=name.rpartition("-")[0])
        self.error: Exception | None = None
        self.calls: list[str] = []

    def submit(self, method: Callable[..., Any], *args: Any) -> PendingCall[Any]:
        self.calls.append(method.__name__)
        call: PendingCall[Any] = PendingCall(self, method.__name__, lambda _: self.answer(method.__name__, args))
        if self.error is None:
            call.settle(memoryview(b""))
        else:
            call.fail(self.error)
        return call

    def answer(self, method: str, args: Any) -> Any:
        if method in ("offload", "onload"):
            return None
        if method == "setup":
            return SimpleNamespace(packing=self.packing, slower="")
        encoded, outputs = args
        rows = decode_micro_batches(encoded)
        return [{name: np.full(row.targets.size, float(row.tokens[0]), np.float32) for name in outputs} for row in rows]


class Site:
    """A policy on two ranks and a reference on three."""

    def __init__(
        self, ledger: Ledger, budget: int = 5, packing: str = "forest", turns: DeviceTurns | None = None
    ) -> None:
        self.ledger, self.packing, self.started, self.killed = ledger, packing, 0, []
        self.fails: list[Exception] = []
        self.manager = RecoveryManager(RecoveryConfig(reference=RestartBudget(max_restarts=budget)), ledger)
        launcher: Any = SimpleNamespace(launch=self.launch, kill=self.kill)
        role = ServeRole(
            name="reference", model=ModelConfig(path="m"), ranks=3, fields={"reference_logprob": "logprobs"}
        )
        self.reference = ServedGroup(role, self.launch("reference", range(3)), launcher, self.manager, turns)
        self.reference.begin_setup()
        self.reference.finish_setup()
        trainer = TrainerConfig(offload=OffloadConfig().resolved(turns is not None, movable=True))
        trained: Any = SimpleNamespace(objective=None, trainer=trainer, evaluated_fields={"old_logprob": "logprobs"})
        self.ranks = [Worker(f"policy-{rank}", rank) for rank in range(RANKS)]
        self.policy = TrainerGroup(self.ranks, [SimpleNamespace()] * RANKS, trained, turns)  # type: ignore[arg-type, list-item]

    def launch(self, role: str, ranks: range) -> Any:
        end = f".{self.started}" if self.started else ""
        self.started += 1
        workers = [Worker(f"{role}-{rank}{end}", rank, self.packing) for rank in ranks]
        if self.started > 1 and self.fails:
            workers[0].error = self.fails.pop()
        return workers

    def kill(self, workers: Any) -> None:
        self.killed += [worker.name for worker in workers]

    def annotate(self, batch: TrainingBatch) -> None:
        annotate_batches([(self.policy, batch)], [self.reference], nullcontext)

    def events(self, action: str) -> list[tuple[str, str]]:
        self.manager.flush()
        found = [event.fields for event in self.ledger.events()]
        return [(each["role"], each["worker"]) for each in found if each.get("action") == action]


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    with Ledger.create(tmp_path / "run", {"name": "x"}) as made:
        yield made


def batch() -> TrainingBatch:
    """Seven documents, whose first tokens differ, in four rows."""
    lengths = [8, 12, 5, 16, 11, 4, 7]
    documents = [
        Document(f"0:{n}", n, np.full(length, 10 + n, np.int32), np.arange(length) > 0)
        for n, length in enumerate(lengths)
    ]
    return pack(forest_from_documents(documents), RANKS, 20, "forest")


def test_every_role_computes_its_fields(ledger: Ledger) -> None:
    site, made = Site(ledger), batch()
    site.annotate(made)
    assert made.fields["old_logprob"].tobytes() == made.fields["reference_logprob"].tobytes(), "the same rows"
    assert [worker.calls for worker in (*site.ranks, *site.reference.workers)] == [
        *[["evaluate"]] * RANKS,
        *[["setup", "evaluate"]] * 3,
    ]


def test_a_model_that_needs_another_packing_gets_it(ledger: Ledger) -> None:
    site, made = Site(ledger, packing="single"), batch()
    site.annotate(made)
    assert made.fields["reference_logprob"].tolist() == [10 + sequence for sequence in made.sequences]
    assert len(np.unique(made.fields["old_logprob"])) < 7, "several documents in a row"


def test_without_fields_nothing_is_packed_or_called(ledger: Ledger) -> None:
    site = Site(ledger)
    site.policy.role.evaluated_fields.clear()
    annotate_batches([(site.policy, SimpleNamespace())], [], nullcontext)  # type: ignore[arg-type]
    assert site.ranks[0].calls == []


def test_a_dead_rank_is_replaced_with_its_peers_and_computes_again(ledger: Ledger) -> None:
    site, made = Site(ledger), batch()
    site.reference.workers[1].error = WorkerDied("reference-1", 1, -9, "")
    site.annotate(made)
    assert np.isfinite(made.fields["reference_logprob"]).all()
    assert site.killed == ["reference-0", "reference-1", "reference-2"]
    assert [worker.calls for worker in site.ranks] == [["evaluate"]] * RANKS, "the policy is asked once"
    assert [worker.name for worker in site.reference.workers] == [f"reference-{rank}.1" for rank in range(3)]
    assert site.events("failed") == site.events("restarted") == [("reference", "reference-1")]


def test_a_replacement_that_does_not_start_is_replaced_within_the_budget(ledger: Ledger) -> None:
    site, made = Site(ledger), batch()
    site.fails = [WorkerDied("reference-0.1", 0, -9, "")]
    site.reference.workers[2].error = WorkerDied("reference-2", 2, -9, "")
    site.annotate(made)
    assert site.events("failed") == [("reference", "reference-2"), ("reference", "reference-0.1")]
    site.fails = [WorkerDied("reference-0", 0, -9, "")] * 9
    site.reference.workers[2].error = WorkerDied(site.reference.workers[2].name, 2, -9, "")
    with pytest.raises(GaveUp, match=r"limit of 5 restarts .*recovery.reference.max_restarts 5"):
        site.annotate(made)


def test_roles_that_share_devices_compute_in_turn(ledger: Ledger) -> None:
    """The reference first; each leaves the devices before the other comes, and what they compute is the same."""
    site, made, other = Site(ledger, turns=DeviceTurns()), batch(), batch()
    for each in (made, other):
        site.annotate(each)
    apart = batch()
    Site(ledger).annotate(apart)
    for name in ("old_logprob", "reference_logprob"):
        assert made.fields[name].tobytes() == other.fields[name].tobytes() == apart.fields[name].tobytes()
    moved = ["setup", "evaluate", "offload", "onload", "evaluate", "offload"]
    assert [worker.calls for worker in site.reference.workers] == [moved] * 3
    assert [worker.calls for worker in site.ranks] == [["offload", "onload", "evaluate"] * 2] * RANKS, "also at first"


def test_a_served_role_that_dies_on_shared_devices_is_replaced_in_its_turn(ledger: Ledger) -> None:
    """While it leaves the devices, and while it comes back."""
    site = Site(ledger, turns=DeviceTurns())
    site.annotate(batch())
    site.reference.workers[1].error = WorkerDied("reference-1", 1, -9, "")
    made = batch()
    site.annotate(made)
    assert np.isfinite(made.fields["reference_logprob"]).all()
    assert site.events("failed") == site.events("restarted") == [("reference", "reference-1")]
    site.reference.begin_fields(made, made.everything())  # is on the devices
    site.reference.workers[2].error = WorkerDied("reference-2.1", 2, -9, "")
    site.reference.offload()
    assert "reference-2.1" in site.killed, "it has left the devices"


def test_an_error_of_data_or_config_ends_the_run(ledger: Ledger) -> None:
    site = Site(ledger)
    site.reference.workers[0].error = RemoteError("reference-0", 0, "ModelError", "no", "", "model")
    with pytest.raises(RemoteError):
        site.annotate(batch())
    assert site.started == 1 and site.killed == []


def test_an_error_of_the_policy_is_not_handled_here(ledger: Ledger) -> None:
    site = Site(ledger)
    site.ranks[1].error = WorkerDied("policy-1", 1, -9, "")
    with pytest.raises(WorkerDied):
        site.annotate(batch())
    assert site.started == 1


def test_the_rank_that_a_verdict_names_is_blamed_for_an_aborted_collective(ledger: Ledger) -> None:
    site = Site(ledger)
    site.manager.kill_culprits(["reference-2"], "confirmed: stopped")
    code = CollectiveStalled.error_code
    site.reference.workers[0].error = RemoteError("reference-0", 0, "CollectiveStalled", "aborted", "", code)
    site.annotate(batch())
    assert site.events("failed") == [("reference", "reference-2")]
