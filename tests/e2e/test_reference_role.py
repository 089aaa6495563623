"""A run whose reference model has processes of its own: it equals a run without them, also if they are killed."""

import contextlib
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, build_once, config, prompts_used, seeded_random, task, weights, write
from resume_scenarios import STEPS, metrics
from test_recovery import kill_worker, pid_of, recoveries, replacements, reported_stalls, wait_for_restarts

from benchmarks.launched_run import Ended
from lockstep.ledger.ledger import Ledger

STAGES = ("rollout", "logprobs", "train", "publish", "checkpoint")


def settings(home: Path, **changes: Any) -> dict[str, Any]:
    """A run with a KL penalty whose reference has two ranks; rows are so short that every rank gets several."""
    loss = {"old_logprobs": "trainer", "kl": {"coefficient": 0.2}}
    values = config(home, "grpo", name="kl", evaluation=None, token_budget=16, loss=loss)
    return {**values, "reference": {"ranks": 2, "threads": 1}, **changes}


@pytest.fixture(scope="session")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run whose policy ranks hold the reference."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "reference"

    def make(home: Path) -> None:
        task(home)
        launched = Launched.start(home / "runs" / "kl", str(write(home, settings(home, reference=None))))
        assert launched.finish() == 0, launched.text()

    return build_once(shared / "reference_role", make)


def start(inside: Path, folder: Path, hold: dict[str, Any] | None = None, **changes: Any) -> Launched:
    values = settings(inside, folder=str(folder / "runs"), **changes)
    return Launched.start(folder / "runs" / "kl", str(write(folder, values)), hold=hold)


def assert_same(launched: Launched, inside: Path, generation: int = 1) -> None:
    """Check that the run ended by itself, with the same weights, metrics and prompts."""
    assert launched.finish() == 0, launched.text()
    run = inside / "runs" / "kl"
    assert weights(launched.folder) == weights(run)
    assert metrics(launched.folder) == metrics(run)
    assert prompts_used(launched.folder) == prompts_used(run)
    with Ledger.reader(launched.folder) as ledger:
        assert ledger.generation == generation


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_ranks_are_killed_and_replaced_alone(inside: Path, tmp_path: Path) -> None:
    """One rank is stopped while its peer computes with it and the policy's ranks compute beside; then killed because of
    the verdict. Another is killed while engines generate. Each time both are replaced, and nothing else."""
    launched = start(inside, tmp_path, {"stage": "rollout", "seconds": 0.3, "at_end": True}, watch={"notice_s": 2.0})
    launched.wait_for("rollout", 1)
    os.kill(pid_of(launched, "reference-1"), signal.SIGSTOP)
    wait_for_restarts(launched)
    launched.wait_for("rollout", 3)
    kill_worker(launched, "reference-0.1")
    assert_same(launched, inside)
    assert replacements(launched.folder) == ["reference-0.1", "reference-0.2", "reference-1.1", "reference-1.2"]
    found = [(each["worker"], each["role"], each["step"]) for each in recoveries(launched.folder)]
    assert found == [("reference-1", "reference", 2), ("reference-0.1", "reference", 4)]
    assert ("absent", ["reference-1"]) in reported_stalls(launched.folder, "confirmed")
    assert "reference-0.1 died (SIGKILL); restarted in" in " ".join(launched.printed().split())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_are_killed_at_random(inside: Path, tmp_path: Path, stage: str) -> None:
    """Those of the reference, or of the policy beside it."""
    chance = seeded_random("reference", stage)
    ranks = chance.choice([1, 2, 3])
    hold = {"stage": stage, "seconds": 0.2, "at_end": chance.random() < 0.5}
    launched = start(inside, tmp_path, hold, reference={"ranks": ranks, "threads": 1})
    names = [*(f"reference-{rank}" for rank in range(ranks)), "policy-1"]
    first, second = sorted(chance.sample(range(STEPS), 2))
    with contextlib.suppress(Ended):
        for step in (first, second):
            launched.wait_for(stage, step)
            name = chance.choice(names)
            latest = f"{name}.1" if launched.beacon(f"{name}.1") else name
            with contextlib.suppress(ProcessLookupError):
                kill_worker(launched, latest, seconds=chance.choice([0.0, 0.5]))
    assert_same(launched, inside)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reference_and_policy_are_killed_at_the_same_time(inside: Path, tmp_path: Path) -> None:
    launched = start(inside, tmp_path, {"stage": "logprobs", "seconds": 0.3, "at_end": False})
    launched.wait_for("logprobs", 2)
    for name in ("reference-0", "policy-1"):
        os.kill(pid_of(launched, name), signal.SIGKILL)
    assert_same(launched, inside)
    assert {each["role"] for each in recoveries(launched.folder)} == {"reference", "policy"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_used_up_budget_ends_the_run_which_resumes(inside: Path, tmp_path: Path) -> None:
    hold = {"stage": "rollout", "seconds": 0.2, "at_end": True}
    launched = start(inside, tmp_path, hold, recovery={"reference": {"max_restarts": 0}})
    launched.wait_for("rollout", 2)
    kill_worker(launched, "reference-0")
    assert launched.finish() == 1
    printed = " ".join(launched.printed().split())
    assert "reference-0 died (SIGKILL), and is not restarted" in printed
    assert "recovery.reference.max_restarts 0" in printed
    launched = Launched.resume(launched.folder)
    assert_same(launched, inside, generation=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_controller_is_killed_and_the_run_resumed_on_other_ranks(inside: Path, tmp_path: Path) -> None:
    launched = start(inside, tmp_path, {"stage": "logprobs", "seconds": 0.2, "at_end": False})
    launched.wait_for("logprobs", 3)
    launched.kill_controller()
    assert launched.has_ended(20.0)
    launched = Launched.resume(launched.folder, "reference.ranks=1")
    assert_same(launched, inside, generation=2)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
@pytest.mark.timeout(300)
def test_ranks_are_killed_on_ray(inside: Path, tmp_path: Path) -> None:
    placement = {name: {"cpus": 0.25} for name in ("policy", "rollout", "reference")}
    hold = {"stage": "rollout", "seconds": 0.3, "at_end": True}
    launched = start(inside, tmp_path, hold, cluster="ray", placement=placement)
    launched.wait_for("rollout", 1)
    kill_worker(launched, "reference-1")
    assert_same(launched, inside)
    assert [each["worker"] for each in recoveries(launched.folder)] == ["reference-1"]
