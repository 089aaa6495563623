"""What commands print while they work: on real terminals of any kind, in a pipe, and as JSON."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import LOCKSTEP, config, task, write
from pseudo_terminal import ATTACKS, Shown, on_terminal

pytestmark = [pytest.mark.xdist_group("command line"), pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
STEPS = 12
REPORT = {"tensorboard": False, "html": False, "lines_every": 5, "samples_every": 0}
_COLOUR = r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38;[25];\d+)(?:;\d+)*m"
"""A style with a colour."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("console"))


def run_file(home: Path, name: str, recipe: str = "sft", **changes: Any) -> tuple[Path, str]:
    """The run's folder, and the file of a run of twelve steps."""
    values = config(home, recipe, name=name, **{"steps": STEPS, "report": REPORT, **changes})
    if recipe == "sft":
        values.pop("evaluation")
    return Path(values["folder"]) / name, str(write(home, values))


def shown_steps(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.match(r"step (\d+)/\d+  .*\[", line))]


def test_a_terminal_has_one_live_line_whatever_its_width(home: Path) -> None:
    """With a hostile name in the folder, and a window that becomes narrower while the run works."""
    folder = home / (ATTACKS["title"] + ATTACKS["clear"] + "\u202e[red]wet[/red]")
    _, file = run_file(home, "narrow", "grpo", folder=str(folder))
    shown = on_terminal(["train", file], ROOT, 200, columns=100, narrows=("step 5/12  ", 38))
    assert shown.code == 0, shown.text
    assert shown.dangers() == [] and shown.obeyed_markup() == [], shown.text
    assert shown_steps(shown.lines()) == [1, 5, 10, 12], "the lines that stay"
    assert not any("━" in line for line in shown.lines()), "the live line is gone"
    wide, narrow = shown.live_lines(), shown.live_lines("step 10/12  ")
    assert max(map(len, wide)) == 100 and narrow and max(map(len, narrow)) <= 38, "no line is wrapped"
    assert any(re.match(r"step [1-4]/12 ━+─+ \S+, about \S+ left  .*(reward|loss) \S", line) for line in wide), wide
    assert any(re.match(r"step 1[01]/12 \S+, about \S+ left", line) for line in narrow), "without a bar"
    assert any(line.startswith("start ") and " waits for " in line for line in wide), wide
    assert shown.lines()[-2].startswith("finished after 12 of 12 steps in ")


def colours(shown: Shown) -> list[str]:
    return re.findall(_COLOUR, shown.text)


@pytest.mark.slow
def test_no_color_leaves_the_live_line(home: Path) -> None:
    _, file = run_file(home, "colourless", steps=4)
    shown = on_terminal(["train", file], ROOT, 200, NO_COLOR="1")
    assert shown.code == 0 and colours(shown) == [], shown.text
    assert any(line.startswith("step ") for line in shown.live_lines())
    assert shown_steps(shown.lines()) == [1, 4]


@pytest.mark.slow
def test_a_dumb_terminal_gets_plain_lines(home: Path) -> None:
    _, file = run_file(home, "dumb", steps=4)
    shown = on_terminal(["train", file], ROOT, 200, TERM="dumb")
    assert shown.code == 0 and "\x1b" not in shown.text, shown.text
    assert "\r" not in shown.text.replace("\r\n", "\n")
    assert shown_steps(shown.lines()) == [1, 4]


def lockstep(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*LOCKSTEP, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=200,
        env={**os.environ, **environment}, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def events_of(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    """What a command wrote on standard error; every line is an event."""
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(list(each)[:5] == ["time", "level", "process", "event", "message"] for each in found), done.stderr
    return found


@pytest.mark.slow
def test_a_run_as_json(home: Path) -> None:
    run, file = run_file(home, "events", "grpo", report={**REPORT, "samples_every": 100})
    done = lockstep("train", file, "--log-format", "json")
    assert done.returncode == 0 and done.stdout == "", done.stderr
    events = events_of(done)
    names = [each["event"] for each in events]
    assert names[:3] == ["progress", "progress", "progress"] and names[-1] == "finished"
    assert {each["process"] for each in events} == {"controller"}
    steps = [each for each in events if each["event"] == "step"]
    assert [each["step"] for each in steps] == list(range(1, STEPS + 1)), "each of them, however short"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row for row in rows if "reward/mean" in row}
    assert all(each["metrics"]["reward/mean"] == by_step[each["step"]]["reward/mean"] for each in steps)
    assert steps[0]["seconds_left"] > 0 and steps[-1]["seconds_left"] == 0
    assert names.count("evaluation") == 7 and names.count("samples") == 2
    last = events[-1]
    assert (last["reason"], last["step"], last["steps"], last["run"]) == ("finished", STEPS, STEPS, str(run))
    again = lockstep("train", "--resume", str(run), "--log-format", "json")
    assert again.returncode == 0 and events_of(again)[-1]["event"] == "note", again.stderr


@pytest.mark.slow
def test_refusals_and_progress_of_other_commands_as_json(home: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("recipe: sft\nname: x\nstepz: 3\n")
    done = lockstep("train", str(tmp_path / "bad.yaml"), "--log-format", "json")
    (refused,) = events_of(done)
    assert (done.returncode, refused["event"], refused["level"]) == (2, "refused", "error")
    assert {"stepz"} <= {each["field"] for each in refused["problems"]}
    for command in ("eval", "generate"):
        done = lockstep(command, str(tmp_path), "--log-format", "json", *(["x"] if command == "generate" else []))
        (refused,) = events_of(done)
        assert (done.returncode, refused["event"], refused["process"]) == (2, "refused", command)
    done = lockstep("watch", "--log-format", "json", "--", "/no/such/command")
    (refused,) = events_of(done)
    assert (refused["event"], refused["process"]) == ("refused", "watch") and done.returncode != 0
    done = lockstep("generate", str(home / "model"), "12=", "--max-tokens", "2", "--log-format", "json")
    assert done.returncode == 0 and events_of(done)[-1]["event"] == "progress", done.stderr
    done = lockstep("check", "--env", "--json", "--log-format", "json", NCCL_TIMEOUT="1800")
    (section,) = events_of(done)
    assert (section["event"], section["section"], section["level"]) == ("section", "environment", "warning")
    assert any("NCCL_TIMEOUT" in each["seen"] for each in section["findings"])
    assert json.loads(done.stdout), "the result is on standard output, as without it"


@pytest.mark.slow
def test_verdicts_as_json(tmp_path: Path) -> None:
    """Of a job that hangs; its own lines are between the events."""
    job = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/stuck_rank.py"]
    options = ["--log-format", "json", "--on-stall", "kill", "--notice-after", "1", "--confirm-after", "3"]
    done = lockstep("watch", *options, "--incidents", str(tmp_path / "incidents"), "--", *job)
    assert done.returncode == 124, done.stderr
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    verdicts = [each for each in events if each["event"] == "verdict"]
    confirmed = next(each for each in verdicts if each["verdict_level"] == "confirmed")
    assert (confirmed["process"], confirmed["level"], confirmed["kind"]) == ("watch", "error", "absent")
    assert len(confirmed["culprits"]) == 1 and "1" in confirmed["culprits"][0]
    assert Path(confirmed["incident"]).is_dir() and confirmed["seconds"] > 0
