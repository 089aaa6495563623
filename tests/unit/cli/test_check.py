"""The command `lockstep check`: what it prints and how it ends."""

import json
from pathlib import Path

from typer.testing import CliRunner

from lockstep.cli import app


def test_json_is_all_that_is_printed() -> None:
    result = CliRunner().invoke(app, ["check", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["passed"] else 1)
    assert set(report) == {"passed", "counts", "rungs", "findings"}


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert "refused" in result.stderr and "Traceback" not in result.output
