"""The demo reaches its target whatever the seed: below 0.6 after SFT, at least 0.95 after GRPO."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_the_demo_learns(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = subprocess.run(
        [ROOT / "script" / "demo", folder, f"seed={seed}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    exact = {
        name: json.loads((folder / name / "summary.json").read_text())["eval/exact_match"]
        for name in ("sort-sft", "sort-grpo")
    }
    assert exact["sort-sft"]["final"] < 0.6
    assert exact["sort-grpo"]["final"] >= 0.95
