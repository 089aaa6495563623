"""Text from outside neither controls the terminal nor breaks the command that shows it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from pseudo_terminal import ATTACKS, HOSTILE, on_terminal

from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.ledger import CompletionSample, Ledger
from lockstep.models.tiny_model import make_tiny

TRACEBACK = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/{text}/train.py", line 12, in {text}
[rank{rank}]:     x = f({text})
[rank{rank}]: KeyError: '{text}'
"""


@pytest.mark.parametrize("text", [ATTACKS["markup"], HOSTILE], ids=["markup", "all"])
def test_a_hostile_log_controls_no_terminal(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    steps = "".join(f"step {at} loss 1.0\n" for at in range(20))
    for rank in range(2):
        (folder / f"{rank}.log").write_text(steps + TRACEBACK.format(rank=rank, text=text), errors="surrogateescape")
    shown = on_terminal(["explain", str(folder)], tmp_path)
    assert shown.code == 0, shown.text
    assert "KeyError" in shown.text
    assert shown.dangers() == [] and shown.obeyed_markup() == []


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """The folder of a run all of whose texts are hostile."""
    folder = tmp_path / "run"
    token = np.array([1], np.int32)
    completion = Completion("0:0/0", token, np.zeros(1, np.float32), token, "stop", HOSTILE)
    prompt = Prompt("0:0", 0, token, HOSTILE, answer=HOSTILE)
    group = Group(prompt, [completion], np.ones(1, np.float32), {HOSTILE: np.ones(1, np.float32)})
    config = {"recipe": HOSTILE, "name": HOSTILE, "steps": 3, "model": {"path": HOSTILE}}
    with Ledger.create(folder, config) as ledger:
        ledger.record_evaluation(-1, {HOSTILE: 1.0}, [CompletionSample(HOSTILE, HOSTILE, HOSTILE, 1.0, {HOSTILE: 1.0})])
        ledger.record_rollouts(0, Rollouts(step=0, version=0, groups=[group]))
        ledger.record_metrics(0, {HOSTILE: 1.0})
        stall = {
            "number": 1, "change": "told", "level": "confirmed", "verdict": "absent", "cause": HOSTILE,
            "who": [HOSTILE], "text": HOSTILE, "since_s": 0.0, "said_at": 1e9, "incident": f"incidents/{HOSTILE}",
        }  # fmt: skip
        ledger.record_event("stall", **stall)
        ledger.record_event("end", reason=HOSTILE)
    return folder


@pytest.mark.parametrize("command", [["report"], ["top", "--once"], ["train", "--resume"]], ids=" ".join)
def test_a_hostile_run_folder_controls_no_terminal(command: list[str], hostile_run: Path) -> None:
    (hostile_run / "run-id").write_text("gone-123456" if command[0] == "top" else HOSTILE, errors="surrogateescape")
    shown = on_terminal([*command, str(hostile_run)], hostile_run.parent)
    assert "Traceback" not in shown.text and shown.code in (0, 2), shown.text
    assert shown.dangers() == [] and shown.obeyed_markup() == [], shown.text


@pytest.mark.slow
def test_a_hostile_model_controls_no_terminal_through_push(tmp_path: Path) -> None:
    """Names of files and the README of a folder that somebody else has exported."""
    model = make_tiny(tmp_path / "model", max_length=32)
    (model / f"{HOSTILE.replace('/', '|')}.txt").write_text("x")
    (model / "README.md").write_text(HOSTILE)
    shown = on_terminal(["push", str(model), "anna/sort", "--dry-run"], tmp_path)
    assert shown.code == 0 and "README.md" in shown.text, shown.text
    assert shown.dangers() == [] and shown.obeyed_markup() == [], shown.text


def test_hostile_completions_control_no_terminal(hostile_run: Path) -> None:
    shown = on_terminal(["samples", str(hostile_run)], hostile_run.parent)
    assert shown.code == 0 and "genuine" in shown.text, shown.text
    assert shown.dangers() == [] and shown.obeyed_markup() == [], shown.text


@pytest.mark.slow
def test_a_hostile_prompt_controls_no_terminal_through_generate(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", max_length=512)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": HOSTILE}) + "\n")
    command = ["generate", str(model), "--prompts", "prompts.jsonl", "--max-tokens", "4"]
    shown = on_terminal(command, tmp_path, timeout_s=120)
    assert shown.code == 0 and "genuine" in shown.text, shown.text
    assert shown.dangers() == [] and shown.obeyed_markup() == [], shown.text


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_hostile_config_controls_no_terminal(command: str, tmp_path: Path) -> None:
    shown_text = HOSTILE.replace("\x9b", "")  # YAML forbids some control characters
    values = {"recipe": "sft", "name": shown_text, shown_text: 1, "steps": shown_text, "model": {"path": shown_text}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    shown = on_terminal([command, "run.yaml"], tmp_path)
    assert shown.code == 2 and "Traceback" not in shown.text, shown.text
    assert shown.dangers() == [] and shown.obeyed_markup() == [], shown.text


def test_a_hostile_incident_controls_no_terminal(tmp_path: Path) -> None:
    incident = tmp_path / "incidents" / "20261121-231502-absent-policy-1"
    incident.mkdir(parents=True)
    verdict = {
        "kind": "absent", "class": HOSTILE, "level": "confirmed", "confidence": 0.9, "explanation": HOSTILE,
        "culprits": [{"rank": 1, "role": HOSTILE, "host": HOSTILE, "pid": 1, "where": HOSTILE}], "collective": None,
        "waiting": [], "alternatives": [], "evidence": [{"source": HOSTILE, "text": HOSTILE}], "fix": HOSTILE,
        "collect": HOSTILE,
    }  # fmt: skip
    (incident / "verdict.json").write_text(json.dumps(verdict))
    shown = on_terminal(["explain", str(incident)], tmp_path)
    assert "Traceback" not in shown.text, shown.text
    assert shown.dangers() == [] and shown.obeyed_markup() == [], shown.text


def test_a_hostile_job_controls_no_terminal_through_watch(tmp_path: Path) -> None:
    """What a job writes itself passes; what `watch` says about it is clean."""
    script = tmp_path / "job.py"
    script.write_text(f"import sys\nraise RuntimeError({HOSTILE!r}) if len(sys.argv) > 5 else SystemExit(3)\n")
    shown = on_terminal(["watch", "--", sys.executable, str(script), HOSTILE], tmp_path)
    assert shown.code == 3 and shown.dangers() == [] and shown.obeyed_markup() == [], shown.text
