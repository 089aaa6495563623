"""A controller that is killed, and resumed within the grace of its workers: engines and scorers go on with it, and the
run ends as if nothing had happened. So it does beside a first controller that still lives."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, moment, pause
from resume_scenarios import GONE_S, STEPS, Life, References, newest, step_of

from lockstep.ledger.ledger import Ledger
from lockstep.watch.procfs import processes

KEPT = ("engine-0", "scorer-0")
"""Whoever goes on with the next controller."""
RANKS = ("policy-0", "policy-1")


def life(reference: References, folder: Path, grace_s: float, **changes: Any) -> Life:
    return Life(reference("grpo"), folder, "grpo", cluster={"orphan_grace_s": grace_s}, **changes)


def pids(launched: Launched, *names: str) -> list[int]:
    """Of those that live."""
    found = [launched.beacon(name) for name in names]
    return [each.pid for each in found if each is not None and processes.is_alive(each.pid, each.start_ticks)]


def adopted(run: Path) -> list[str]:
    """Who went on with a later controller, as that one says."""
    return sorted(re.findall(r"adopted (\S+) \(pid \d+\)", (run / "logs" / "controller.log").read_text()))


def kill(one: Life, stage: str, step: int | None, fraction: float = 0.0) -> Launched:
    """Kills the controller, and nobody else, in that stage."""
    launched = one.launch()
    launched.wait_for(stage, step)
    pause(fraction * one.reference.seconds(stage))
    launched.members()
    launched.kill_controller()
    return launched


@pytest.mark.timeout(600)
def test_engines_and_scorers_go_on_with_the_next_controller(reference: References, tmp_path: Path) -> None:
    one = life(reference, tmp_path, 120.0)
    first = kill(one, "train", 4)
    before, agent, ranks = pids(first, *KEPT), pids(first, "agent"), pids(first, *RANKS)
    assert len(before) == len(KEPT), "they have their grace"
    one.look(first, first.place())
    second = one.launch()
    second.wait_for("train", 5)
    assert pids(second, *KEPT) == before, "the same processes"
    assert pids(second, "agent") == agent
    assert not set(pids(second, *RANKS)) & set(ranks), "trainer ranks are new"
    assert second.finish() == 0, second.text()
    assert adopted(one.run) == sorted(KEPT)
    assert first.gone(1.0) and second.gone(1.0)
    one.compare()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["start", "rollout", "reward", "publish", "evaluate", "checkpoint", "export"])
def test_whatever_the_controller_did(reference: References, tmp_path: Path, stage: str) -> None:
    one, chance = life(reference, tmp_path, 120.0), moment("adoption", stage)
    launched = [kill(one, stage, step_of(stage, chance), chance.random())]
    launched.append(kill(one, "start", None, chance.random()))
    launched.append(one.launch())
    assert launched[-1].finish() == 0, launched[-1].text()
    # A supervisor that was only beginning when its controller was killed may find the run over, and lingers a while.
    assert all(each.gone(GONE_S) for each in launched)
    one._note_place()
    one.compare()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_the_grace_all_are_new(reference: References, tmp_path: Path) -> None:
    one = life(reference, tmp_path, 1.0)
    first = kill(one, "train", 4)
    assert first.gone(1.0 + GONE_S)
    one.finish()
    assert adopted(one.run) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_number_of_engines(reference: References, tmp_path: Path) -> None:
    """The first goes on, the second is not wanted any more."""
    one = life(
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
def test_a_controller_that_was_only_stopped_can_do_nothing_any_more(reference: References, tmp_path: Path) -> None:
    one = life(reference, tmp_path, 120.0)
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
    assert first.gone(1.0) and second.gone(1.0)
    one.compare()
    with Ledger.reader(one.run) as ledger:
        assert {row.generation for row in ledger.commits() if row.step >= 4} == {2}
        assert [event.generation for event in ledger.events() if event.kind == "end"] == [2]
