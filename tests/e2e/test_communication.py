"""Which rank waits for which, of a watched torchrun in which one rank is late on purpose."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness import LOCKSTEP
from typer.testing import CliRunner

from lockstep.cli import app

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PROGRAM = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(262144)
for step in range(60):
    if dist.get_rank() == 1:
        time.sleep(0.1)
    dist.all_reduce(value)
dist.destroy_process_group()
"""


def test_the_matrix_names_the_rank_that_is_late(tmp_path: Path) -> None:
    program, file = tmp_path / "job.py", tmp_path / "communication.json"
    program.write_text(textwrap.dedent(PROGRAM))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(program)]
    watch = [
        *LOCKSTEP,
        "watch",
        "--communication",
        str(file),
        "--incidents",
        str(tmp_path / "incidents"),
        "--",
        *torchrun,
    ]
    done = subprocess.run(watch, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", "--comm", "--json", str(file)])
    assert shown.exit_code == 0, shown.output
    summary = json.loads(shown.stdout)
    matrix = summary["matrix"]
    caused = {name: sum(row) for name, row in zip(matrix["processes"], matrix["seconds"], strict=True)}
    (late,) = [name for name in caused if name.endswith("1")]
    assert caused[late] > 0.8 * sum(caused.values()), matrix
    found = [
        of
        for each in summary["communicators"]
        for of in each["operations"]
        if of["operation"] == "all_reduce" and of["size"] == 1 << 20
    ]
    assert found, summary["communicators"]
    assert 30 <= found[0]["calls"] <= 60 and found[0]["waiting_share"] > 0.5
    assert 60 < found[0]["spread_ms"]["p50"] < 400
    assert found[0]["bus_gb_s"] > 0
    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", "--comm", str(file)])
    assert text.exit_code == 0 and "all_reduce" in text.stdout and late in text.stdout


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    for given, why in ((tmp_path / "nothing", "does not exist"), (tmp_path / "x.json", "no file of collectives")):
        refused = CliRunner().invoke(app, ["report", "--comm", str(given)])
        assert refused.exit_code == 2 and why in refused.output
    refused = CliRunner().invoke(app, ["report", "--json", str(tmp_path)])
    assert refused.exit_code == 2 and "--comm" in refused.output
