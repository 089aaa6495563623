"""Completions of real runs, without an evaluation: on the console, in the report, in TensorBoard, and by
`lockstep samples` while the run is in progress, after a kill, and when it has ended."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
from gated_rewards import Gate
from harness import Launched, config, task, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


def shown(run: Path, *arguments: str) -> dict[str, Any]:
    """What `lockstep samples` prints as JSON."""
    done = CliRunner().invoke(app, ["samples", str(run), "--json", *arguments])
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


def in_ledger(run: Path, step: int) -> list[tuple[str, str, float]]:
    """Prompt, completion and reward of all completions, the best first."""
    with Ledger.reader(run) as ledger:
        rollouts = ledger.rollouts(step)
    assert rollouts is not None
    found = [
        (group.prompt.text, completion.text, float(group.rewards[k]))
        for group in rollouts.groups
        if group.rewards is not None
        for k, completion in enumerate(group.completions)
    ]
    return sorted(found, key=lambda each: -each[2])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was looked at while it trained, killed, looked at, and resumed; and what it printed."""
    folder = task(tmp_path_factory.mktemp("samples"))
    gate = Gate(folder / "gate", 2)
    terms = [{"kind": "regex", "pattern": "[0-4].*"}, {"kind": "exact_match", "weight": 0.5}, gate.term]
    report = {"samples_every": 2, "samples_shown": 3}
    checkpoint = {"every": 1, "export": False}
    changes = {"steps": 5, "evaluation": None, "report": report, "checkpoint": checkpoint, "reward": {"terms": terms}}
    values = config(folder, "grpo", name="seen", **changes)
    run = folder / "runs" / "seen"
    launched = Launched.start(run, str(write(folder, values)))
    try:
        gate.wait(2, launched)
        live = shown(run, "--n", "3", "--best")
        assert live["step"] == 2 and live["completions"] == 16
        best = [(each["prompt"], each["completion"], pytest.approx(each["reward"])) for each in live["samples"]]
        assert best == in_ledger(run, 1)[:3]
        unfinished = CliRunner().invoke(app, ["samples", str(run), "--step", "3"])
        assert unfinished.exit_code == 2 and "step 3 is not complete yet" in " ".join(unfinished.stderr.split())
        launched.kill()
        assert shown(run, "-n", "3", "--best") == live, "the same of an interrupted run"
        gate.open(2)
        again = Launched.resume(run)
        assert again.finish() == 0, again.text()
    finally:
        launched.kill()
    return run, launched.printed() + again.printed()


def test_the_console_shows_completions(run: tuple[Path, str]) -> None:
    folder, printed = run
    steps = re.findall(r"^samples of step (\d)$", printed, re.M)
    assert sorted(set(steps)) == ["1", "2", "4", "5"], "every second, the first and the last"
    assert "\x1b" not in printed
    lines = printed.splitlines()
    at = lines.index("samples of step 5")
    assert [line.split()[0] for line in lines[at + 1 : at + 10]] == 3 * ["prompt", "completion", "reward"]
    prompt, _, reward = in_ledger(folder, 4)[0]
    assert lines[at + 1] == f"  prompt      {prompt}"
    assert lines[at + 3].startswith(f"  reward      {reward:.4g}  regex ") and "exact_match" in lines[at + 3]


def test_the_report_has_completions(run: tuple[Path, str]) -> None:
    page = (run[0] / "report.html").read_text()
    assert "Completions in training" in page
    assert re.findall(r"Step (\d)</div>", page) == ["1", "2", "4", "5"]
    assert re.search(r"reward [-\d.]+</span>", page) and page.count('<span class="tag">completion</span>') == 12


def test_tensorboard_has_completions(run: tuple[Path, str]) -> None:
    events = EventAccumulator(str(run[0] / "tensorboard"))
    events.Reload()
    assert "samples" in events.Tags()["tensors"]
    found = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples")}
    assert sorted(found) == [1, 2, 4, 5]
    prompt, _, reward = in_ledger(run[0], 4)[0]
    assert found[5].startswith(f"prompt\n\n    {prompt}\n\ncompletion\n\n    ")
    assert f"reward {reward:.4g}, regex " in found[5]


def test_samples_of_an_earlier_step_are_those_that_were_shown(run: tuple[Path, str]) -> None:
    found = shown(run[0], "--step", "1")
    assert found["file"] is None and len(found["samples"]) == 3
    done = CliRunner().invoke(app, ["samples", str(run[0]), "--step", "3"])
    assert "step 3 is not there: there are step files of 5, and a few samples of 1 to 2, 4" in " ".join(
        done.stderr.split()
    )


def test_the_documented_way_to_read_a_step_file(run: tuple[Path, str]) -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text().partition("## Completions")[2]
    names: dict[str, Any] = {"Any": Any}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    rows = names["completions"](f"{run[0]}/steps/00000005.arrow")
    found = [(row["prompt"], row["completion"], row["reward"]) for row in rows]
    assert sorted(found, key=lambda each: -each[2]) == in_ledger(run[0], 4)
    assert "regex" in pandas.DataFrame(rows)
    assert datasets.Dataset.from_list(rows).column_names[:3] == ["prompt", "completion", "reward"]
