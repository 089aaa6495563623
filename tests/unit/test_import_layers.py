"""The arrows between the rooms point down, and config and watch stay light."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_import_linter_keeps_every_contract() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    "module",
    ["lockstep.config.loader", "lockstep.watch.agent.node_agent", "lockstep.report.top_table", "lockstep.cli"],
)
def test_light_modules_bring_no_torch(module: str) -> None:
    """What must answer at once: a misspelt key, the agent, `top`, `--help`."""
    code = f"import {module}, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
