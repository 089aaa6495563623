"""Recovery by role: workers that fail during a run are replaced, and the run ends with the same result."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, config, prompts_used, seeded_random, weights, write
from resume_scenarios import Reference, References, assert_close, evaluations, metrics

from benchmarks.launched_run import Ended
from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger


def begin(
    reference: Reference, folder: Path, hold: dict[str, Any] | None = None, recipe: str = "grpo", **changes: Any
) -> Launched:
    """Start the reference's run again."""
    values = config(reference.home, recipe, folder=str(folder / "runs"), **changes)
    return Launched.start(folder / "runs" / values["name"], str(write(folder, values)), hold=hold)


def pid_of(launched: Launched, name: str) -> int:
    state = launched.beacon(name)
    assert state is not None, launched.text()
    return state.pid


def memory_of(launched: Launched) -> Path:
    """The run's folder in shared memory."""
    return run_shm_dir((launched.folder / "run-id").read_text().strip())


def wait_for_restarts(launched: Launched, count: int = 1) -> None:
    def healed() -> bool | None:
        return True if len(recoveries(launched.folder)) >= count else None

    launched.wait_until(healed, "healed", lambda: False)


def kill_worker(launched: Launched, name: str, seconds: float = 0.0) -> None:
    """Stop a worker for some time, so that it is in its next request, and then kill it."""
    pid = pid_of(launched, name)
    if seconds:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)


def recoveries(run: Path, action: str = "restarted") -> list[dict[str, Any]]:
    """The events of recovery in the ledger."""
    with Ledger.reader(run) as ledger:
        return [e.fields for e in ledger.events() if e.kind == "recovery" and e.fields["action"] == action]


def reported_stalls(run: Path, *levels: str) -> list[tuple[str, list[str]]]:
    """Kind and culprits of each stall that the supervisor reported at these levels, in order."""
    return list({each["number"]: (each["verdict"], each["who"]) for each in stalls(run, *levels)}.values())


def stalls(run: Path, *levels: str) -> list[dict[str, Any]]:
    """The supervisor's events in the ledger at these levels, without withdrawals."""
    with Ledger.reader(run) as ledger:
        found = [event.fields for event in ledger.events() if event.kind == "stall"]
    return [each for each in found if each["level"] in levels and each["change"] != "withdrawn"]


def why(run: Path, worker: str) -> str:
    """The verdict because of which a worker was ended; empty if it ended by itself."""
    return "".join(each.get("why", "") for each in recoveries(run, "failed") if each["worker"] == worker)


def log_of(run: Path, name: str) -> str:
    return (run / "logs" / f"{name}.log").read_text()


def replacements(run: Path) -> list[str]:
    """The names of all replacement workers."""
    return sorted(path.stem for path in (run / "logs").glob("*.[0-9].log"))


def assert_like_reference(launched: Launched, reference: Reference) -> None:
    """Check that the run ended by itself with the reference's weights, and that every prompt was used once."""
    assert launched.finish() == 0, launched.text()
    assert launched.has_ended(2.0)
    assert prompts_used(launched.folder) == prompts_used(reference.run)
    assert weights(launched.folder) == weights(reference.run)
    assert metrics(launched.folder) == metrics(reference.run)
    assert evaluations(launched.folder) == evaluations(reference.run)
    with Ledger.reader(launched.folder) as ledger:
        assert ledger.generation == 1, "the controller was not restarted"


@pytest.mark.timeout(300)
def test_one_worker_of_each_role_is_killed_in_one_run(reference: References, tmp_path: Path) -> None:
    """An engine is killed while it generates. A trainer rank is stopped and then killed because of the verdict, which
    costs the current step; another rank is killed while its peer waits for it in a collective, and the copy in memory
    is lost as well, which costs the steps since the checkpoint. An engine is killed while it loads weights. Nothing is
    generated twice, and ranks that waited in a collective get the verdict."""
    of = reference("grpo")
    launched = begin(of, tmp_path, {"stage": "rollout", "seconds": 0.3, "at_end": False}, watch={"notice_s": 2.0})
    launched.wait_for("rollout", 2)
    kill_worker(launched, "engine-0", seconds=1.0)  # it is handed its requests and goes no further
    launched.wait_for("rollout", 4)
    os.kill(pid_of(launched, "policy-1"), signal.SIGSTOP)
    wait_for_restarts(launched, 2)
    launched.wait_for("rollout", 5)
    for description in memory_of(launched).glob("state/*.json"):
        description.unlink()
    kill_worker(launched, "policy-0.1", seconds=1.0)
    launched.wait_for("train", 6)
    engine = launched.beacon("engine-0.1")
    assert engine is not None and engine.counters["completions"].value == 16 * (5 + 2), "steps and evaluations, once"
    kill_worker(launched, "engine-0.1", seconds=1.0)  # the next it is asked for is to take the weights
    assert_like_reference(launched, of)
    found = recoveries(launched.folder)
    assert [(each["worker"], each["step"]) for each in found] == [
        ("engine-0", 3), ("policy-1", 5), ("policy-0.1", 6), ("engine-0.1", 7)
    ]  # fmt: skip
    assert [each.get("requests") for each in found] == [16, None, None, 0]
    assert [(each.get("restored"), each.get("again")) for each in found[1:3]] == [(4, 0), (3, 2)]
    assert (
        "engine-0 died (SIGKILL); restarted in" in launched.printed() and "16 requests re-issued" in launched.printed()
    )
    assert "2 steps are trained again" in launched.printed()
    assert why(launched.folder, "policy-1").startswith("confirmed: rank 1 (policy")
    assert re.search(r"was aborted: rank 1 \(policy.*\) is stopped by a signal", log_of(launched.folder, "policy-0"))
    assert re.search(r"was aborted: rank 0 \(policy.*\) was killed by SIGKILL", log_of(launched.folder, "policy-1.1"))
    assert reported_stalls(launched.folder, "confirmed") == [
        ("dead", ["engine-0"]), ("absent", ["policy-1"]), ("dead", ["policy-0.1"]), ("dead", ["engine-0.1"])
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_is_killed_while_it_generates_and_while_it_loads_weights(
    reference: References, tmp_path: Path
) -> None:
    of = reference("grpo")
    launched = begin(of, tmp_path, hold={"stage": "rollout", "seconds": 0.3, "at_end": False})
    launched.wait_for("rollout", 2)
    kill_worker(launched, "engine-0", seconds=1.0)  # it is handed its requests and goes no further
    launched.wait_for("train", 5)
    kill_worker(launched, "engine-0.1", seconds=1.0)  # the next it is asked for is to take the weights
    assert_like_reference(launched, of)
    one, other = recoveries(launched.folder)
    assert (one["worker"], one["what"], one["step"], one["requests"]) == ("engine-0", "died (SIGKILL)", 3, 16)
    assert (other["worker"], other["step"], other["requests"]) == ("engine-0.1", 6, 0)
    assert (
        "engine-0 died (SIGKILL); restarted in" in launched.printed() and "16 requests re-issued" in launched.printed()
    )
    assert replacements(launched.folder) == ["engine-0.1", "engine-0.2"], "the trainer was not touched"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_used_up_budget_ends_the_run_which_resumes(reference: References, tmp_path: Path) -> None:
    of = reference("grpo")
    launched = begin(of, tmp_path, recovery={"rollout": {"max_restarts": 0}})
    launched.wait_for("train", 1)
    began = time.monotonic()
    os.kill(pid_of(launched, "engine-0"), signal.SIGKILL)
    assert launched.finish() == 1
    assert time.monotonic() - began < 20
    printed = " ".join(launched.printed().split())
    assert "engine-0 died (SIGKILL), and is not restarted: the limit of 0 restarts within 3600 s is reached" in printed
    assert "recovery.rollout.max_restarts" in printed and f"--resume {launched.folder}" in printed
    assert [each["worker"] for each in recoveries(launched.folder, "gave up")] == ["engine-0"]
    launched = Launched.resume(launched.folder)
    assert launched.finish() == 0, launched.text()
    assert weights(launched.folder) == weights(of.run)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_of_two_engines_is_killed_in_the_middle_of_its_completions(reference: References, tmp_path: Path) -> None:
    """The batches change, and with them the last bits of log-probabilities, so the sampled tokens are compared."""
    long = {"sampling": {"max_tokens": 20, "ignore_eos": True}, "engine": {"max_rows": 2, "threads": 1, "count": 2}}
    quick = {"steps": 3, "evaluation": None, "rollout": long, "trainer": {"ranks": 1, "threads": 1}}
    of = reference("grpo")
    baseline = begin(of, tmp_path / "whole", **quick)
    assert baseline.finish() == 0, baseline.text()

    launched = begin(of, tmp_path, hold={"keep_every_s": 0.0}, **quick)
    launched.wait_for_file(launched.folder, "steps/00000002.partial")
    os.kill(pid_of(launched, "engine-1"), signal.SIGKILL)
    assert launched.finish() == 0, launched.text()
    (done,) = recoveries(launched.folder)
    assert (done["worker"], done["step"]) == ("engine-1", 2) and 0 < done["requests"] <= 8
    assert prompts_used(launched.folder) == prompts_used(baseline.folder)
    assert sampled(launched.folder) == sampled(baseline.folder)
    assert_close(launched.folder, baseline.folder)


def sampled(run: Path) -> dict[str, list[int]]:
    """The tokens of every completion."""
    with Ledger.reader(run) as ledger:
        rollouts = [ledger.rollouts(step) for step in ledger.collected_steps()]
    groups = [group for each in rollouts if each is not None for group in each.groups]
    return {each.request: each.tokens.tolist() for group in groups for each in group.completions}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trainer_ranks_are_killed_in_a_step(reference: References, tmp_path: Path) -> None:
    """The first fault costs the current step. The second costs the steps since the checkpoint, as the copy in memory is
    lost as well. Nothing is generated again, and the engine is kept."""
    of = reference("grpo")
    launched = begin(of, tmp_path, hold={"stage": "train", "seconds": 0.1, "at_end": False})
    launched.wait_for("train", 4)
    kill_worker(launched, "policy-1")
    wait_for_restarts(launched)
    launched.wait_for("train", 5)
    for description in memory_of(launched).glob("state/*.json"):
        description.unlink()
    kill_worker(launched, "policy-0.1")
    launched.wait_for("train", 6)
    engine = launched.beacon("engine-0")
    assert engine is not None and engine.counters["completions"].value == 16 * (7 + 4), "steps and evaluations, once"
    assert_like_reference(launched, of)
    one, other = recoveries(launched.folder)
    assert (one["worker"], one["step"], one["restored"], one["again"]) == ("policy-1", 5, 4, 0)
    assert (other["worker"], other["step"], other["restored"], other["again"]) == ("policy-0.1", 6, 3, 2)
    assert (
        "policy-1 died (SIGKILL); restarted in" in launched.printed()
        and "2 steps are trained again" in launched.printed()
    )
    assert replacements(launched.folder) == ["policy-0.1", "policy-0.2", "policy-1.1", "policy-1.2"], (
        "no engine was touched"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["rollout", "logprobs", "publish", "checkpoint", "evaluate"])
def test_a_trainer_rank_is_killed_in_any_stage(reference: References, tmp_path: Path, stage: str) -> None:
    of, chance = reference("grpo"), seeded_random("rank", stage)
    hold = {"stage": stage, "seconds": 0.2, "at_end": chance.random() < 0.5}
    launched = begin(of, tmp_path, hold, recovery={"memory_copy": chance.random() < 0.5})
    first, second = sorted(chance.sample(range(7), 2))
    launched.wait_for(stage, first)
    kill_worker(launched, f"policy-{chance.randrange(2)}", seconds=chance.choice([0.0, 0.5]))
    wait_for_restarts(launched)
    with contextlib.suppress(Ended):
        launched.wait_for(stage, second)
        kill_worker(launched, f"policy-{chance.randrange(2)}.1")
    assert_like_reference(launched, of)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainer_rank_is_killed_after_its_state_was_copied(reference: References, tmp_path: Path) -> None:
    """The step is done: it is reported, and its weights are published, although the rank dies before."""
    of = reference("grpo")
    launched = begin(of, tmp_path, hold={"stage": "publish", "seconds": 0.3, "at_end": False})
    launched.wait_for("publish", 2)
    kill_worker(launched, "policy-1")
    assert_like_reference(launched, of)
    assert [each["restored"] for each in recoveries(launched.folder)] == [3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_are_killed_in_supervised_training(reference: References, tmp_path: Path) -> None:
    of = reference("sft")
    values = config(of.home, "sft", folder=str(tmp_path / "runs"), recovery={"memory_copy": False})
    hold = {"stage": "train", "seconds": 0.1, "at_end": False}
    launched = Launched.start(tmp_path / "runs" / "sft", str(write(tmp_path, values)), hold=hold)
    launched.wait_for("train", 1)
    kill_worker(launched, "policy-0")
    wait_for_restarts(launched)
    launched.wait_for("train", 5)
    kill_worker(launched, "policy-1.1")
    assert launched.finish() == 0, launched.text()
    assert weights(launched.folder) == weights(of.run)
    assert metrics(launched.folder) == metrics(of.run)
    assert [done["restored"] for done in recoveries(launched.folder)] == [0, 3]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("allowed", [True, False])
def test_fewer_ranks_where_no_replacement_can_be_had(reference: References, tmp_path: Path, allowed: bool) -> None:
    of = reference("grpo")
    launched = begin(of, tmp_path, {"replacements_for": 1}, recovery={"fewer_ranks": allowed})
    launched.wait_for("logprobs", 5)
    kill_worker(launched, "policy-1")
    code = launched.finish()
    printed = " ".join(launched.printed().split())
    if not allowed:
        assert code == 1 and "is not restarted: the limit of 5 restarts within 3600 s is reached" in printed
        return
    assert code == 0, launched.text()
    assert "no replacement available; continuing with 1 ranks (recovery.fewer_ranks)" in printed
    assert prompts_used(launched.folder) == prompts_used(of.run)
    assert sampled(launched.folder) == sampled(of.run)
    assert_close(launched.folder, of.run)
    assert replacements(launched.folder) == ["policy-0.1"]
    (done,) = recoveries(launched.folder)
    assert done["restored"] == 3, "the copy in memory is divided among two"
    assert [each["ranks"] for each in recoveries(launched.folder, "fewer ranks")] == [1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_error_again_stops_the_run_quickly(reference: References, tmp_path: Path) -> None:
    """Here the ranks cannot write their checkpoint, which a restart does not change."""
    of = reference("sft")
    values = config(of.home, "sft", folder=str(tmp_path / "runs"))
    hold = {"stage": "checkpoint", "seconds": 0.3, "at_end": False}
    launched = Launched.start(tmp_path / "runs" / "sft", str(write(tmp_path, values)), hold=hold)
    launched.wait_for("checkpoint", 1)
    (launched.folder / "checkpoints").rmdir()
    (launched.folder / "checkpoints").write_text("in the way")
    assert launched.finish() == 1
    assert "CheckpointError" in launched.printed()
    assert recoveries(launched.folder) == []
