"""New runs that start from a checkpoint of another one, with changed settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, config, task, train, weights, write
from safetensors.numpy import load_file
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.xdist_group("forks"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished SFT run of four steps with checkpoints after 2 and 4, and its config."""
    home = task(tmp_path_factory.mktemp("forks"))
    values = config(home, "sft", steps=4, checkpoint={"every": 2}, evaluation=None)
    values["trainer"] |= {"ranks": 1}
    values["data"]["shuffle"] = False
    return train(home, values), values


def start(run: Path, *arguments: str) -> Launched:
    launched = Launched.start(run, *arguments)
    assert launched.finish() == 0, launched.text()
    return launched


def learning_rates(run: Path) -> list[float]:
    with Ledger.reader(run) as ledger:
        return [row.values["policy/lr"] for row in ledger.metrics_rows()]


def test_a_fork_takes_over_weights_and_optimizer_and_restarts_the_schedule(
    parent: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run, values = parent
    child = run.with_name("child")
    changes = "name=child", "steps=3", "trainer.optimizer.lr=0.002", "trainer.schedule.kind=linear"
    launched = start(child, "--from", f"{run}@2", *changes)
    text = " ".join(launched.printed().split())
    assert "after 2 steps with its weights and optimizer state" in text
    assert learning_rates(child) == pytest.approx([0.002, 0.002 * 2 / 3, 0.002 / 3])
    with Ledger.reader(child) as ledger:
        (event,) = (each.fields for each in ledger.events() if each.kind == "parent")
        assert ledger.steps_done() == 3
    assert (event["run"], event["steps"], event["optimizer"]) == (str(run), 2, True)
    assert "trainer.optimizer.lr: 0.003 -> 0.002" in event["changes"]
    assert json.loads((child / "summary.json").read_text())["parent"] == event
    assert weights(child) != weights(run)

    kept = run.with_name("kept")
    start(kept, "--from", f"{run}@2", "name=kept", "trainer.optimizer.lr=1e-30", "steps=1")
    start(run.with_name("first"), str(write(tmp_path, {**values, "name": "first", "steps": 2})))
    assert weights(kept) == weights(run.with_name("first")), "the weights after two steps"


@pytest.mark.slow
def test_a_fork_that_is_resumed_ends_as_one_that_was_not(parent: tuple[Path, dict[str, Any]]) -> None:
    run, _ = parent
    same = run.with_name("same")
    start(same, "--from", f"{run}@2", "name=same", "steps=2", "batch_size=20")
    again = run.with_name("again")
    start(again, "--from", f"{run}@2", "name=again", "steps=1", "batch_size=20")
    start(again, "--resume", str(again), "steps=2")
    assert weights(same) == weights(again)


@pytest.mark.slow
def test_the_start_is_a_checkpoint_of_the_new_run(parent: tuple[Path, dict[str, Any]]) -> None:
    """It does not need the parent's any more, which may be deleted."""
    run, _ = parent
    child = run.with_name("torn")
    start(child, "--from", str(run), "name=torn", "steps=1", "checkpoint.every=0")
    start_folder = child / "checkpoints/00000000"
    assert json.loads((start_folder / "checkpoint.json").read_text())["inherited"] == "all"


@pytest.mark.slow
def test_a_fork_does_not_need_its_parent_any_more(parent: tuple[Path, dict[str, Any]]) -> None:
    """It is killed, its parent is deleted, and it is resumed. The report still names the parent."""
    run = shutil.copytree(parent[0], parent[0].with_name("gone"))
    child = run.with_name("orphan")
    launched = Launched.start(child, "--from", f"{run}@2", "name=orphan", "steps=3", "checkpoint.every=0")
    launched.wait_for("train", 1)
    launched.kill()
    shutil.rmtree(run)
    resumed = Launched.resume(child)
    assert resumed.finish() == 0, resumed.text()
    with Ledger.reader(child) as ledger:
        assert ledger.steps_done() == 3
    shown = CliRunner().invoke(app, ["report", str(child)])
    assert shown.exit_code == 0, shown.output
    page = (child / "report.html").read_text()
    assert str(run) in page and "2 steps" in page


@pytest.mark.slow
def test_a_damaged_parent_is_refused_with_the_checkpoint_before(
    parent: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run = shutil.copytree(parent[0], parent[0].with_name("damaged"))
    file = max((run / "checkpoints/00000004").glob("*.safetensors"), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    exported = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out")])
    assert exported.exit_code == 2 and "take the one before it: --step 2" in " ".join(exported.output.split())
    launched = Launched.start(run.with_name("heir"), "--from", str(run), "name=heir", "steps=1")
    assert launched.finish() != 0
    assert f"take the one before it: --from {run}@2" in " ".join(launched.printed().split()), launched.printed()


def test_what_does_not_fit_is_refused(parent: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, values = parent
    other = write(tmp_path, {**values, "name": "other", "model": {**values["model"], "adapter": {"r": 2}}})
    for arguments, reason in (
        (("--from", f"{run}@3", "name=x"), "there are checkpoints after 2, 4 steps"),
        (("--from", str(tmp_path), "name=x"), "is not"),
        ((str(other), "--from", str(run)), "must train the same models, but policy has model.adapter None"),
        (("--from", str(run), "name=x", "model.vision.projector.train=false"), "and in the new run 'tower, language'"),
        (("--from", str(run)), "already holds a run"),
    ):
        launched = Launched.start(run.with_name("x"), *arguments)
        assert launched.finish() == 2, launched.text()
        assert reason in " ".join(launched.printed().split()), launched.printed()
    assert not run.with_name("x").exists() and not run.with_name("other").exists()


@pytest.mark.slow
def test_another_recipe_takes_over_the_weights_alone(parent: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, values = parent
    home = Path(values["folder"]).parent
    grpo = config(home, "grpo", name="after", steps=1, evaluation=None)
    grpo["trainer"] |= {"ranks": 1, "optimizer": {"lr": 1e-30}}
    child = run.with_name("after")
    launched = start(child, str(write(tmp_path, grpo)), "--from", str(run))
    assert "its weights; the optimizer starts afresh" in " ".join(launched.printed().split())
    assert weights(child) == weights(run)
    stored = load_file(child / "checkpoints/00000001/rank-00000.safetensors")
    assert {name.partition(".")[0] for name in stored} >= {"parameter", "exp_avg"}
