"""A controller is killed, and the run resumed within the grace period: engines and scorers are adopted, and the run
ends with the same result. The same holds if the first controller is still alive."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, pause, seeded_random
from resume_scenarios import GONE_S, STEPS, InterruptedRun, References, newest, step_of

from lockstep.ledger.ledger import Ledger
from lockstep.watch.procfs import processes

KEPT = ("engine-0", "scorer-0")
"""Workers that the next controller adopts."""
RANKS = ("policy-0", "policy-1")


def interrupted(reference: References, folder: Path, grace_s: float, **changes: Any) -> InterruptedRun:
    return InterruptedRun(reference("grpo"), folder, "grpo", cluster={"orphan_grace_s": grace_s}, **changes)


def pids(launched: Launched, *names: str) -> list[int]:
    """The pids of the living processes with these names."""
    found = [launched.beacon(name) for name in names]
    return [each.pid for each in found if each is not None and processes.is_alive(each.pid, each.start_ticks)]


def adopted(run: Path) -> list[str]:
    """The workers that a later controller adopted, by its log."""
    return sorted(re.findall(r"adopted (\S+) \(pid \d+\)", (run / "logs" / "controller.log").read_text()))


def kill(one: InterruptedRun, stage: str, step: int | None, fraction: float = 0.0) -> Launched:
    """Kill only the controller, in that stage."""
    launched = one.launch()
    launched.wait_for(stage, step)
    pause(fraction * one.reference.seconds(stage))
    launched.members()
    launched.kill_controller()
    return launched


@pytest.mark.timeout(600)
def test_engines_and_scorers_are_adopted_by_the_next_controller(reference: References, tmp_path: Path) -> None:
    one = interrupted(reference, tmp_path, 120.0)
    first = kill(one, "train", 4)
    before, agent, ranks = pids(first, *KEPT), pids(first, "agent"), pids(first, *RANKS)
    assert len(before) == len(KEPT), "they live on for the grace period"
    one.check_state(first, first.position())
    second = one.launch()
    second.wait_for("train", 5)
    assert pids(second, *KEPT) == before, "the same processes"
    assert pids(second, "agent") == agent
    assert not set(pids(second, *RANKS)) & set(ranks), "trainer ranks are new"
    assert second.finish() == 0, second.text()
    assert adopted(one.run) == sorted(KEPT)
    assert first.has_ended(1.0) and second.has_ended(1.0)
    one.compare()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["start", "rollout", "reward", "publish", "evaluate", "checkpoint", "export"])
def test_whatever_the_controller_did(reference: References, tmp_path: Path, stage: str) -> None:
    one, chance = interrupted(reference, tmp_path, 120.0), seeded_random("adoption", stage)
    launched = [kill(one, stage, step_of(stage, chance), chance.random())]
    launched.append(kill(one, "start", None, chance.random()))
    launched.append(one.launch())
    assert launched[-1].finish() == 0, launched[-1].text()
    # A supervisor that was just starting when its controller was killed may wait for a while before it exits.
    assert all(each.has_ended(GONE_S) for each in launched)
    one._note_run_id()
    one.compare()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_the_grace_period_all_workers_are_new(reference: References, tmp_path: Path) -> None:
    one = interrupted(reference, tmp_path, 1.0)
    first = kill(one, "train", 4)
    assert first.has_ended(1.0 + GONE_S)
    one.finish()
    assert adopted(one.run) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_number_of_engines(reference: References, tmp_path: Path) -> None:
    """The first engine is adopted, the second is not needed any more."""
    one = interrupted(
        reference, tmp_path, 120.0, rollout={"sampling": {"max_tokens": 4}, "engine": {"threads": 1, "count": 2}}
    )
    first = kill(one, "train", 2)
    (second,) = pids(first, "engine-1")
    launched = one.launch("rollout.engine.count=1")
    launched.wait_for("train", 4)
    assert not processes.is_alive(second)
    assert launched.finish() == 0, launched.text()
    assert adopted(one.run) == sorted(KEPT)
    assert newest(one.run) == STEPS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_controller_that_was_superseded_can_do_nothing(reference: References, tmp_path: Path) -> None:
    one = interrupted(reference, tmp_path, 120.0)
    first = one.launch()
    first.wait_for("train", 3)
    first.members()
    first.process.send_signal(signal.SIGSTOP)
    before = pids(first, *KEPT)
    (one.run / "lock").unlink()  # as where the file system keeps no locks
    second = one.launch()
    second.wait_for("train", 4)
    assert pids(second, *KEPT) == before
    first.process.send_signal(signal.SIGCONT)
    assert first.finish() == 1
    assert second.finish() == 0, second.text()
    assert first.has_ended(1.0) and second.has_ended(1.0)
    one.compare()
    with Ledger.reader(one.run) as ledger:
        assert {row.generation for row in ledger.commits() if row.step >= 4} == {2}
        assert [event.generation for event in ledger.events() if event.kind == "end"] == [2]
