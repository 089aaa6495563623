"""Runs whose reward functions misbehave: what is an incident, what the report says, and the exit code."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, config, task, write

from lockstep.base import waits

REWARDS = """
import asyncio, os, sys, time
from pathlib import Path

MARKS = Path(__file__).with_name("marks")


def first(name):
    MARKS.mkdir(exist_ok=True)
    new = not (MARKS / name).exists()
    (MARKS / name).write_text(str(os.getpid()))
    return new


def differs(completions):
    return [float(len(completion) % 2) for completion in completions]


def stumbles(prompts, completions, trainer_state, **columns):
    "Fails in another way in each step, once."
    step = trainer_state.global_step
    if step == 0 and first("raised"):
        raise LookupError("no such key")
    if step == 1 and first("left"):
        os._exit(3)
    if step == 2 and first("hung"):
        time.sleep(1000)
    if step == 3 and first("waits"):
        time.sleep(1000)
    return differs(completions)


def raises(prompts, completions, **columns):
    raise LookupError("no such key")


def exits(prompts, completions, **columns):
    sys.exit(3)


def reads_input(prompts, completions, **columns):
    return [float(input("score? ")) for _ in completions]


async def asynchronous(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    raise LookupError("no such key")


def needs_memory(prompts, completions, **columns):
    return [float(len(bytearray(8 << 30))) for _ in completions]


def hangs(prompts, completions, **columns):
    first("hangs")
    time.sleep(1000)


def leaves(prompts, completions, **columns):
    os._exit(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = task(tmp_path_factory.mktemp("rewards"))
    (home / "rewards.py").write_text(REWARDS)
    return home


def start(home: Path, function: str, steps: int, timeout_s: float = 2.0, name: str = "") -> Launched:
    reward: dict[str, Any] = {"terms": [{"kind": "function", "path": f"{home}/rewards.py:{function}"}]}
    values = config(
        home, "grpo", name=name or function, steps=steps, evaluation=None, checkpoint={"every": 0, "export": False},
        reward={**reward, "timeout_s": timeout_s, "memory_mb": 4096, "workers": 1}, trainer={"ranks": 1, "threads": 1},
    )  # fmt: skip
    return Launched.start(home / "runs" / (name or function), str(write(home, values)))


def incidents(run: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(run.glob("incidents/*/verdict.json"))]


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_a_run_that_deals_with_a_reward_that_fails_once_in_every_way(folder: Path) -> None:
    """A scorer that left by itself and one that somebody killed are incidents, and healed; one that Lockstep killed
    because it hung is healed and leaves no evidence of a death."""
    launched = start(folder, "stumbles", steps=4)
    launched.wait_for_file(folder / "marks", "waits")
    pid = launched.wait_until(lambda: (folder / "marks" / "waits").read_text() or None, "written", lambda: True)
    os.kill(int(pid), signal.SIGKILL)
    assert launched.finish() == 0, launched.text()
    deaths = incidents(launched.folder)
    assert [each["kind"] for each in deaths] == ["dead", "dead"], launched.text()
    assert ["exit code 3" in deaths[0]["explanation"], "SIGKILL" in deaths[1]["explanation"]] == [True, True]
    found = summary(launched.folder)
    assert [each["outcome"] for each in found["incidents"]] == ["healed"] * 3
    assert found["exit_reason"] == "finished"
    assert "3 incidents, all healed" in launched.printed()


@pytest.mark.slow
@pytest.mark.parametrize("function", ["raises", "exits", "reads_input", "asynchronous", "needs_memory"])
def test_a_run_that_ends_because_its_reward_fails_has_no_incident(folder: Path, function: str) -> None:
    launched = start(folder, function, steps=2)
    assert launched.finish() == 1, launched.text()
    assert incidents(launched.folder) == [] == summary(launched.folder)["incidents"]
    assert function in summary(launched.folder)["exit_reason"] and f"rewards.py:{function}" in launched.printed()


@pytest.mark.slow
@pytest.mark.parametrize(("function", "deaths"), [("hangs", 0), ("leaves", 2)])
def test_a_run_gives_up_on_a_reward_that_ends_its_process_every_time(folder: Path, function: str, deaths: int) -> None:
    launched = start(folder, function, steps=2, timeout_s=1.0)
    assert launched.finish() == 1, launched.text()
    assert len([each for each in incidents(launched.folder) if each["kind"] == "dead"]) <= deaths
    (incident,) = summary(launched.folder)["incidents"]
    assert (incident["who"].split(",")[0], incident["outcome"]) == ("scorer-0", "gave up")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_a_reward_hangs_is_no_incident(folder: Path, number: signal.Signals) -> None:
    (folder / "marks" / "hangs").unlink(missing_ok=True)
    launched = start(folder, "hangs", steps=2, timeout_s=60.0, name=number.name)
    launched.wait_for_file(folder / "marks", "hangs")
    launched.process.send_signal(number)
    waits.sleep(1.0, "the first signal")  # pending signals of one number are delivered once
    launched.process.send_signal(number)
    assert launched.finish() not in (0, 1), launched.text()
    assert incidents(launched.folder) == [] == summary(launched.folder)["incidents"]
    assert summary(launched.folder)["exit_reason"] == "interrupted"
