"""Recovery of runs ahead of training and of conversations, of stopped processes, and of several faults in a row."""

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, prompts_used, seeded_random, task, write
from resume_scenarios import References
from test_async import TERMS, check
from test_async import values as ahead
from test_bad_input import MODES, short
from test_environment_runs import WORLD, grpo
from test_recovery import (
    assert_like_reference,
    begin,
    kill_worker,
    log_of,
    pid_of,
    recoveries,
    replacements,
    reported_stalls,
    sampled,
    stalls,
    wait_for_restarts,
    why,
)

from benchmarks.launched_run import Ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_an_engine_is_replaced_while_training_continues(tmp_path: Path) -> None:
    """The engine runs ahead of the trainer and is killed while the trainer works; then a trainer rank is killed."""
    home = task(tmp_path / "home")
    made = ahead(home, tmp_path, "ahead", reward={"terms": TERMS}, evaluation=None)
    hold = {"stage": "train", "seconds": 1.5, "at_end": False}
    run = tmp_path / "runs" / "ahead"
    launched = Launched.start(run, str(write(tmp_path, made)), hold=hold)
    launched.wait_for("train", 2)
    kill_worker(launched, "engine-0")
    position = launched.position()
    launched.wait_until(lambda: launched.beacon("engine-0.1"), "a new engine", lambda: False)
    assert launched.position() == position, "the trainer is not affected"
    wait_for_restarts(launched)
    launched.wait_for("train", 4)
    kill_worker(launched, "policy-0")
    assert launched.finish() == 0, launched.text()
    rows = check(run, 2)
    assert sorted(rows) == list(range(6))
    one, other = recoveries(run)
    assert (one["worker"], one["step"], other["worker"], other["step"]) == ("engine-0", 3, "policy-0", 5)
    assert one["requests"] > 0


@pytest.mark.parametrize("branches", [[], [2]])
def test_conversations_of_a_dead_engine_repeat_their_turn(tmp_path: Path, branches: list[int]) -> None:
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
            kill_worker(launched, "engine-0", seconds=1.0)
            launched.wait_for("rollout", 2)
            engine = launched.beacon("engine-0.1")
            assert engine is not None
            made = engine.counters["completions"].value

            def more(launched: Launched = launched, made: int = made) -> bool | None:
                now = launched.beacon("engine-0.1")
                return True if now is not None and now.counters["completions"].value > made else None

            launched.wait_until(more, "in the middle of its conversations", lambda: True)
            kill_worker(launched, "engine-0.1")
        assert launched.finish() == 0, launched.text()
        runs.append(launched.folder)
    assert len(recoveries(runs[1])) in (1, 2), "the second kill may have been after its last turn"
    assert prompts_used(runs[1]) == prompts_used(runs[0])
    assert sampled(runs[1]) == sampled(runs[0])


def test_a_stopped_engine_is_killed_and_replaced(reference: References, tmp_path: Path) -> None:
    of = reference("grpo")
    launched = begin(of, tmp_path)
    launched.wait_for("train", 3)
    os.kill(pid_of(launched, "engine-0"), signal.SIGSTOP)
    began = time.monotonic()
    wait_for_restarts(launched)
    assert time.monotonic() - began < 60
    assert_like_reference(launched, of)
    (done,) = recoveries(launched.folder)
    assert (done["worker"], done["what"]) == ("engine-0", "died (SIGKILL)")
    assert why(launched.folder, "engine-0").startswith("confirmed: engine-0 ")
    assert reported_stalls(launched.folder, "confirmed") == [("absent", ["engine-0"])]
    assert [each["done"] for each in stalls(launched.folder, "act")] == ["killed engine-0"], (
        "no process had to be released"
    )


@pytest.mark.parametrize("how", ["stop", "sleep", "gil"])
def test_a_trainer_rank_freezes_in_a_step(reference: References, tmp_path: Path, how: str) -> None:
    """By SIGSTOP, or in a sleep with or without the interpreter lock: the rank is named while its peer waits for it in
    a collective, the peer is released with the verdict as its exception, and all ranks are restarted."""
    of, trigger = reference("grpo"), tmp_path / "now"
    watch = {"notice_s": 2.0, "confirm_after_s": 6.0}
    launched = begin(of, tmp_path, {"trainer": str(trigger), "how": how}, watch=watch)
    launched.wait_for("train", 4)
    trigger.touch()
    began = time.monotonic()
    wait_for_restarts(launched)
    print(f"{how}: healed after {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < 45, "the stop is detected, and not only an unchanged stack"
    assert_like_reference(launched, of)
    (done,) = recoveries(launched.folder)
    assert (done["worker"], done["what"]) == ("policy-1", "died (SIGKILL)")
    assert why(launched.folder, "policy-1").startswith("confirmed: rank 1 (policy")
    (confirmed,) = stalls(launched.folder, "confirmed")
    assert (confirmed["verdict"], confirmed["who"]) == ("absent", ["policy-1"])
    printed = ("is stopped by a signal",) if how == "stop" else ("freeze_rank",)
    assert all(words in confirmed["text"] for words in printed), confirmed["text"]
    (notice, *_) = stalls(launched.folder, "notice", "confirmed")
    assert notice["who"] == ["policy-1"]
    acts = {each["done"]: each["said_at"] for each in stalls(launched.folder, "act")}
    assert acts.keys() == {"killed policy-1", "policy-0 freed"}
    freed_s = acts["policy-0 freed"] - confirmed["said_at"]
    print(f"{how}: freed {freed_s:.3f} s after the verdict, which came {confirmed['since_s']:.1f} s after the notice")
    assert freed_s < 5, "a second, and more on a busy machine"
    assert confirmed["text"][:40] in log_of(launched.folder, "policy-0")


def test_supervisor_scorer_and_agent_are_killed(reference: References, tmp_path: Path) -> None:
    """The death of the supervisor is reported, and the next one detects a stopped process. The samples of a killed
    scorer are scored again. The workers of a killed agent end with it, and all are replaced."""
    of = reference("grpo")
    launched = begin(of, tmp_path, {"stage": "rollout", "seconds": 0.3, "at_end": False}, watch={"notice_s": 2.0})
    launched.wait_for("rollout", 1)
    supervisor = launched.folder / "cluster" / "supervisor.json"
    first = launched.wait_until(lambda: supervisor_of(supervisor), "supervised", lambda: False)
    os.kill(first, signal.SIGKILL)
    kill_worker(launched, "scorer-0")

    def another() -> bool | None:
        return supervisor_of(supervisor) not in (None, first) or None

    launched.wait_until(another, "supervised again", lambda: False)
    launched.wait_for("rollout", 3)
    os.kill(pid_of(launched, "engine-0"), signal.SIGSTOP)

    def of_roles() -> list[dict[str, Any]]:
        """Without the scorer's, which is one only if it was killed while it scored."""
        return [each for each in recoveries(launched.folder) if each["role"] != "reward"]

    launched.wait_until(lambda: bool(of_roles()) or None, "healed", lambda: False)
    launched.wait_for("rollout", 5)
    kill_worker(launched, "agent")
    assert_like_reference(launched, of)
    assert "the supervisor ended (killed by SIGKILL), restarting it" in launched.printed()
    assert "the node agent (pid" in launched.printed() and "starting a new one" in launched.printed()
    stopped, *rest = of_roles()
    assert stopped["worker"] == "engine-0" and why(launched.folder, "engine-0").startswith("confirmed: engine-0 ")
    assert {each["worker"].partition(".")[0] for each in rest} >= {"engine-0", "policy-0"}
    assert ("absent", ["engine-0"]) in reported_stalls(launched.folder, "confirmed")
    assert replacements(launched.folder)[-1].startswith("scorer-0.")


def supervisor_of(file: Path) -> int | None:
    """The pid of a run's supervisor."""
    with contextlib.suppress(OSError, ValueError):
        return int(json.loads(file.read_text())["pid"])
    return None


def test_a_reward_that_never_returns_is_named_with_its_line(tmp_path: Path) -> None:
    """Its process is replaced, the samples are tried one by one, and the one that fails alone is reported."""
    home = task(tmp_path / "home")
    (home / "mode").write_text("hang")
    (home / "functions.py").write_text(MODES)
    line = next(i for i, text in enumerate(MODES.splitlines(), 1) if "time.sleep(0.1)" in text)
    values = short(home, "judge", {"kind": "function", "path": f"{home}/functions.py:score"})
    values["reward"]["timeout_s"] = 8
    values |= {"watch": {"notice_s": 1.0, "confirm_after_s": 4.0}}
    launched = Launched.start(home / "runs" / "judge", str(write(home, values)))
    assert launched.finish() == 1, launched.text()
    printed = " ".join(launched.printed().split())
    assert (
        "did not finish a sample for 8 s (reward.timeout_s)" in printed
        and "in never_return" in printed
        and "(row " in printed
    )
    (notice, *_) = stalls(launched.folder, "notice", "confirmed")
    assert notice["who"] == ["scorer-0"] and f"never_return() at functions.py:{line}" in notice["text"], notice
    assert stalls(launched.folder, "act") == [], "only the user's own time limit applies"
    assert any(name.startswith("scorer-0.") for name in replacements(launched.folder)), "tried again, sample by sample"


def test_a_port_in_use_costs_the_metrics_and_not_the_run(tmp_path: Path) -> None:
    home = task(tmp_path / "home")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        tracking = [{"kind": "prometheus", "port": taken.getsockname()[1]}]
        values = short(home, "taken", {"kind": "regex", "pattern": "[0-4].*"}, tracking=tracking)
        launched = Launched.start(home / "runs" / "taken", str(write(home, values)))
        assert launched.finish() == 0, launched.text()
    printed = " ".join(launched.printed().split())
    assert "Address already in use" in printed and "the run continues" in printed


@pytest.mark.parametrize("chain", range(3))
def test_several_faults_one_after_the_other(reference: References, tmp_path: Path, chain: int) -> None:
    """Worker, stage and time are random; the run ends with the same result."""
    of, chance = reference("grpo"), seeded_random("faults", chain)
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
        name = max((each for each in names if each.startswith(role)), key=restart_number, default=role)
        kill_worker(launched, name, seconds=chance.choice([0.0, 0.0, 0.3]))
        killed.append((step, name))
        if role != "scorer-0":
            time.sleep(1.0)
    print(f"{stage}: {killed}")
    assert_like_reference(launched, of)


def restart_number(name: str) -> int:
    return int(name.partition(".")[2] or 0)
