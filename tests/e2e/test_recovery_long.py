"""Recovery of runs ahead and of conversations, from who stands still, and from one fault after the other."""

import os
import signal
import time
from pathlib import Path

import pytest
from harness import Ended, Launched, moment, prompts_used, task, write
from lives import References
from test_async import TERMS, check
from test_async import values as ahead
from test_environment_runs import WORLD, grpo
from test_recovery import begin, lose, pid_of, recoveries, sampled, undisturbed, wait_healed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_an_engine_comes_back_while_training_goes_on(tmp_path: Path) -> None:
    """It runs ahead of the trainer, and is killed while the trainer works; then the trainer is."""
    home = task(tmp_path / "home")
    made = ahead(home, tmp_path, "ahead", reward={"terms": TERMS}, evaluation=None)
    held = {"stage": "train", "seconds": 1.5, "at_end": False}
    run = tmp_path / "runs" / "ahead"
    launched = Launched.start(run, str(write(tmp_path, made)), hold=held)
    launched.wait_for("train", 2)
    lose(launched, "engine-0")
    place = launched.place()
    launched.wait_until(lambda: launched.beacon("engine-0.1"), "a new engine", lambda: False)
    assert launched.place() == place, "the trainer has not even noticed"
    wait_healed(launched)
    launched.wait_for("train", 4)
    lose(launched, "policy-0")
    assert launched.finish() == 0, launched.text()
    rows = check(run, 2)
    assert sorted(rows) == list(range(6))
    one, other = recoveries(run)
    assert (one["worker"], one["step"], other["worker"], other["step"]) == ("engine-0", 2, "policy-0", 4)
    assert one["requests"] > 0


@pytest.mark.parametrize("branches", [[], [2]])
def test_conversations_of_a_dead_engine_begin_their_turn_again(tmp_path: Path, branches: list[int]) -> None:
    home = task(tmp_path / "home")
    (home / "world.py").write_text(WORLD)
    environment = {"path": f"{home}/world.py:Echo", "branches": branches}
    runs = []
    for name in ("whole", "killed"):
        values = grpo(home, name, environment, evaluation=None)
        hold = {"stage": "rollout", "seconds": 0.3, "at_end": False}
        launched = Launched.start(home / "runs" / name, str(write(home, values)), hold=hold)
        if name == "killed":
            launched.wait_for("rollout", 1)
            lose(launched, "engine-0", seconds=1.0)
            launched.wait_for("rollout", 2)
            engine = launched.beacon("engine-0.1")
            assert engine is not None
            made = engine.counters["completions"].value

            def more(launched: Launched = launched, made: int = made) -> bool | None:
                now = launched.beacon("engine-0.1")
                return True if now is not None and now.counters["completions"].value > made else None

            launched.wait_until(more, "in the middle of its conversations", lambda: True)
            lose(launched, "engine-0.1")
        assert launched.finish() == 0, launched.text()
        runs.append(launched.folder)
    assert len(recoveries(runs[1])) in (1, 2), "the second kill may have come after its last turn"
    assert prompts_used(runs[1]) == prompts_used(runs[0])
    assert sampled(runs[1]) == sampled(runs[0])


@pytest.mark.parametrize("victim", ["engine-0", "policy-1"])
def test_one_that_stands_still_is_killed_and_replaced(reference: References, tmp_path: Path, victim: str) -> None:
    of = reference("grpo")
    launched = begin(of, tmp_path, cluster={"stall_limit_s": 8})
    launched.wait_for("train", 3)
    os.kill(pid_of(launched, victim), signal.SIGSTOP)
    began = time.monotonic()
    wait_healed(launched)
    assert time.monotonic() - began < 60
    undisturbed(launched, of)
    (done,) = recoveries(launched.folder)
    assert done["worker"] == victim
    assert done["what"] in ("made no progress for 8 s", "died (SIGKILL)"), done
    if done["what"] == "died (SIGKILL)":
        assert recoveries(launched.folder, "failed")[0]["why"].startswith("confirmed: ")


@pytest.mark.parametrize("chain", range(3))
def test_one_fault_after_the_other(reference: References, tmp_path: Path, chain: int) -> None:
    """Who, in which stage and when is drawn; the run ends as if nothing had happened."""
    of, chance = reference("grpo"), moment("faults", chain)
    generous = {"policy": {"max_restarts": 99}, "rollout": {"max_restarts": 99}}
    stage = chance.choice(["rollout", "reward", "logprobs", "train", "publish"])
    hold = {"stage": stage, "seconds": 0.2, "at_end": chance.random() < 0.5}
    launched = begin(of, tmp_path, hold, recovery={**generous, "memory_copy": chance.random() < 0.5})
    killed = []
    for step in sorted(chance.sample(range(8), 4)):
        try:
            launched.wait_for(stage, step)
        except Ended:
            break
        names = [path.stem for path in (launched.folder / "logs").glob("*.log") if path.stem != "controller"]
        role = chance.choice(["engine-0", "policy-0", "policy-1", "scorer-0", "agent"])
        name = max((each for each in names if each.startswith(role)), key=life, default=role)
        lose(launched, name, seconds=chance.choice([0.0, 0.0, 0.3]))
        killed.append((step, name))
        if role != "scorer-0":
            time.sleep(1.0)
    print(f"{stage}: {killed}")
    undisturbed(launched, of)


def life(name: str) -> int:
    return int(name.partition(".")[2] or 0)
