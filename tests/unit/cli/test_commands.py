"""The commands' help, and what they say about a command line that they cannot read."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import _COMMANDS, _FILES, app
from lockstep.cli.train import _stored_config
from lockstep.ledger.ledger import Ledger


@pytest.mark.parametrize("name", _COMMANDS)
def test_listed_help_is_the_first_paragraph_of_the_command(name: str) -> None:
    text = import_module(f"lockstep.cli.{_FILES.get(name, name)}").command.__doc__
    assert " ".join(text.partition("\n\n")[0].split()) == _COMMANDS[name]


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_shows_no_type_for_options_without_a_value(name: str) -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, "--help"])
    assert shown.exit_code == 0 and "bool" not in shown.output.lower()
    assert re.search(r"--help +-h +Show this message", shown.output)
    assert "...}..." not in shown.output and "...]..." not in shown.output


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (
            "watch torchrun --nproc_per_node 2 train.py --name 'a b'",
            "lockstep watch -- torchrun --nproc_per_node 2 train.py --name 'a b'",
        ),
        (
            "watch --on-stall kill torchrun --nproc_per_node=2 train.py",
            "lockstep watch --on-stall kill -- torchrun --nproc_per_node=2 train.py",
        ),
        ("watch --on-stal kill -- torchrun --nproc_per_node=2", "(Possible options: --on-stall)"),
        ("train --steps 3", "did you mean steps=3?"),
        ("train run.yaml --steps=3", "did you mean steps=3?"),
        ("train run.yaml --trainer.optimizer.lr 1e-4", "did you mean trainer.optimizer.lr=1e-4?"),
        ("train run.yaml --learning-rate 1e-4", "did you mean trainer.optimizer.lr=1e-4?"),
        ("train run.yaml --advantage_estimator group_norm", "did you mean advantage.kind=group_norm?"),
        ("train run.yaml --every --resume x", "did you mean checkpoint.every=... or evaluation.every=... or"),
        ("train run.yaml --packing_samples", "leave it out: rows are always packed"),
        ("train run.yaml --remote_rm_url http://x", "here it is called 'reward.terms: {kind: http"),
        ("train run.yaml --dryrun", "(Possible options: --dry-run)"),
        ("check run.yaml --steps 3", "did you mean steps=3?"),
    ],
)
def test_an_unknown_option_is_refused_with_what_to_type(line: str, hint: str) -> None:
    refused = CliRunner().invoke(app, shlex.split(line))
    assert refused.exit_code == 2
    assert hint in refused.stderr


def test_a_resumed_run_is_prepared_with_the_config_of_its_ledger(tmp_path: Path) -> None:
    """With the overrides. What cannot be read is None: preparing the run says why."""
    stored = {
        "recipe": "sft", "name": "run", "steps": 4, "model": {"path": "model"}, "data": {"path": "data.jsonl"},
    }  # fmt: skip
    Ledger.create(tmp_path / "run", stored).close()
    found = _stored_config(tmp_path / "run", ["steps=6", "cluster.device=cpu"])
    assert found is not None
    assert (found.recipe, found.steps, found.cluster.device) == ("sft", 6, "cpu")
    assert _stored_config(tmp_path / "run", ["stepps=6"]) is None
    assert _stored_config(tmp_path / "missing", []) is None
