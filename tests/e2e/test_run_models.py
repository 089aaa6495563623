"""What can be done with the models of a run, from any folder: resume it, export, generate and evaluate."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked_controller import ENVIRONMENT
from harness import Launched, config, task, write
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny

pytestmark = [pytest.mark.xdist_group("run models"), pytest.mark.timeout(400)]

REWARD = """
from pathlib import Path

HALF = float(Path("half.txt").read_text())


def first_digit(completions, answer, **columns):
    return [1.0 if text.startswith(each) else HALF * text.isdigit() for text, each in zip(completions, answer)]
"""


def relative_config(home: Path, **changes: Any) -> dict[str, Any]:
    """A run whose paths are all relative to `home`."""
    values = config(
        Path(), "grpo", steps=2, checkpoint={"every": 1},
        reward={"terms": [{"kind": "function", "path": "rewards.py:first_digit"}]}, **changes,
    )  # fmt: skip
    return values | {"trainer": {**values["trainer"], "ranks": 1}}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of two steps, `runs/grpo`."""
    home = task(tmp_path_factory.mktemp("models") / "project")
    (home / "rewards.py").write_text(REWARD)
    (home / "half.txt").write_text("0.5")
    file = write(home, relative_config(home))
    launched = Launched.start(home / "runs/grpo", str(file), cwd=home)
    assert launched.finish() == 0, launched.text()
    return home


def run_command(cwd: Path, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    cwd.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "lockstep", *arguments]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, input=stdin, capture_output=True, text=True, timeout=200)


@dataclass
class Used:
    """The output of a command that used a model."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Used]]:
    """Runs a command in another folder than the run's; in the end, it must have left no copy of a model."""
    scratch, elsewhere = tmp_path / "scratch", tmp_path / "elsewhere"
    scratch.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(elsewhere)

    def run(*arguments: str, stdin: str | None = None) -> Used:
        found = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments, input=stdin)
        assert not isinstance(found.exception, Exception), found.exception
        return Used(found.exit_code, found.stdout, found.stderr)

    yield run
    assert [path.name for path in scratch.glob("lockstep-model-*")] == []
    assert Path.cwd() == elsewhere


def test_an_evaluation_of_the_export_gives_the_numbers_of_the_run(project: Path, use: Callable[..., Used]) -> None:
    with Ledger.reader(project / "runs/grpo") as ledger:
        expected = ledger.evaluations()[-1].metrics
    assert "eval/reward/first_digit/mean" in expected and expected["eval/reward_mean"] > 0
    (found,) = use("eval", str(project / "runs/grpo/export"), "--json").records
    assert found["metrics"] == expected
    assert (found["prompts"], found["n"], found["by_source"]) == (16, 1, {})


@pytest.mark.slow
def test_several_completions_are_scored_by_data_source(project: Path, use: Callable[..., Used], tmp_path: Path) -> None:
    """From the newest checkpoint. The first completion of each prompt is that of an evaluation with one."""
    rows = [{"prompt": f"{n}=", "answer": f"{n}"[0], "data_source": "odd" if n % 2 else "even"} for n in range(10, 17)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, common = str(project / "runs/grpo"), ("--dataset", "../held.jsonl", "--output", "out.jsonl")
    done = use("eval", run, *common, "-n", "4", "--pass-reward", "0.5", "--json")
    assert done.exit_code == 0, done.stderr
    (found,), records = done.records, [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert found["steps"] == 2 and len(records) == 28
    rewards = np.array([record["scores"]["reward"] for record in records]).reshape(7, 4)
    assert all(record["scores"]["first_digit"] == record["scores"]["reward"] for record in records)
    metrics = found["metrics"]
    assert metrics["eval/reward_mean"] == pytest.approx(rewards.mean())
    assert metrics["eval/best@4"] == pytest.approx(rewards.max(axis=1).mean())
    assert metrics["eval/pass@4/reward"] == pytest.approx((rewards.max(axis=1) >= 0.5).mean())
    assert metrics["eval/pass@1/reward"] == pytest.approx((rewards >= 0.5).mean())
    assert found["by_source"]["odd"]["eval/reward_mean"] == pytest.approx(rewards[1::2].mean())
    assert use("eval", run, *common).exit_code == 0
    alone = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [each["completion"] for each in alone] == [each["completion"] for each in records if each["index"] == 0]


@pytest.mark.slow
def test_prompts_come_from_everywhere(project: Path, use: Callable[..., Used]) -> None:
    run = str(project / "runs/grpo")
    given = use("generate", run, "12=", "07=", "-n", "2", "--json", "--seed", "5", "--output", "same.jsonl")
    assert [(each["prompt"], each["index"]) for each in given.records] == [
        ("12=", 0), ("12=", 1), ("07=", 0), ("07=", 1),
    ]  # fmt: skip
    assert [json.loads(line) for line in Path("same.jsonl").read_text().splitlines()] == given.records
    assert all(each["tokens"] <= 4 for each in given.records), "the run's max_tokens"
    rows = "".join(json.dumps({"prompt": prompt, "other": 1}) + "\n" for prompt in ("12=", "07="))
    Path("prompts.jsonl").write_text(rows)
    again = use("generate", run, "--prompts", "prompts.jsonl", "-n", "2", "--json", "--seed", "5")
    assert again.records == given.records
    greedy = use("generate", run, "--step", "1", "--temperature", "0", "--max-tokens", "2", "--json", stdin="12=\n")
    assert [(each["prompt"], each["tokens"]) for each in greedy.records] == [("12=", 2)]
    shown = use("generate", run, "--dataset", "evaluation", "--limit", "1")
    assert shown.stdout.startswith("00=\n") and "after 2 steps" in shown.stderr


def test_a_model_without_a_run_uses_its_chat_template(use: Callable[..., Used], tmp_path: Path) -> None:
    make_tiny(tmp_path / "chat", hidden=32, layers=1, heads=2, kv_heads=1, ffn=64, chat=True)
    arguments = ("generate", "../chat", "--json", "--max-tokens", "3", "--prompts", "-")
    (chat,) = use(*arguments, stdin="hello").records
    assert chat["prompt"] != "hello" and "hello" in chat["prompt"]
    (plain,) = use(*arguments, "--no-chat", stdin='{"prompt": "hello"}\n').records
    assert plain["prompt"] == "hello"


def test_what_cannot_be_used_is_refused(project: Path, use: Callable[..., Used]) -> None:
    run, tiny = str(project / "runs/grpo"), str(project / "model")
    for arguments, reason in {
        ("generate", run, "--step", "7", "1="): "there are checkpoints after 1, 2 steps",
        ("generate", tiny, "--step", "1", "1="): "takes the folder of a run",
        ("generate", run, "1=", "--max-tokens", "40"): "leaves no room for a prompt in the context of 32 tokens",
        ("generate", tiny, "--dataset", "train"): "has no train data",
        ("generate", tiny + "x", "1="): "no such folder",
        ("eval", tiny): "has no evaluation data",
        ("eval", tiny, "--dataset", str(project / "data/sft.jsonl"), "steps=x"): "steps",
    }.items():
        refused = use(*arguments)
        assert refused.exit_code == 2 and reason in " ".join(refused.stderr.split()), (arguments, refused.stderr)


def test_a_reward_that_fails_fails_the_evaluation(project: Path, use: Callable[..., Used]) -> None:
    (project / "broken.py").write_text("def broken(completions, **columns):\n    raise RuntimeError('no verdict')\n")
    failed = use("eval", str(project / "runs/grpo"), "reward.terms.0.path=broken.py:broken", "--limit", "2")
    assert failed.exit_code == 1 and "no verdict" in failed.stderr


def test_the_best_checkpoint_is_exported(project: Path, use: Callable[..., Used], tmp_path: Path) -> None:
    run = project / "runs/grpo"
    with Ledger.reader(run) as ledger:
        best = max((row.metric, row.step + 1) for row in ledger.checkpoints() if row.metric is not None)[1]
    done = use("export", str(run), str(tmp_path / "best"), "--step", "best")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip().endswith(f"after {best} step" + ("" if best == 1 else "s"))
    use("export", str(run), str(tmp_path / "same"), "--step", str(best))
    assert (tmp_path / "best/model.safetensors").read_bytes() == (tmp_path / "same/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_with_relative_paths_resumes_and_exports_from_another_folder(project: Path, tmp_path: Path) -> None:
    exported = run_command(tmp_path, "export", str(project / "runs/grpo"), "model", "--step", "1")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model/model.safetensors").is_file()
    launched = Launched.start(project / "runs/grpo", "--resume", f"{project}/runs/grpo", "steps=3", cwd=tmp_path)
    assert launched.finish() == 0, launched.text()
    assert f"refer to {project}" in " ".join(launched.printed().split())
    with Ledger.reader(project / "runs/grpo") as ledger:
        assert ledger.steps_done() == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
