"""The examples that learn to sort digits, with paths in a folder of the test."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from harness import ALPHABET, train

from lockstep.models.tiny_model import make_tiny

ROOT = Path(__file__).parents[2]


def example(stem: str, home: Path, **changes: Any) -> dict[str, Any]:
    """The config of an example with paths in `home`."""
    values = yaml.safe_load((ROOT / f"examples/{stem}.yaml").read_text().replace("runs/", f"{home}/runs/"))
    return {**values, "folder": f"{home}/runs", **changes}


def prepare_sorting(home: Path, *before: str) -> Path:
    """Create the data and the model of the README's first command, and do the runs with which an example begins."""
    subprocess.run([sys.executable, ROOT / "examples/sort_data.py", home / "runs/sort-data"], check=True, timeout=60)
    make_tiny(home / "runs/sort-model", alphabet=ALPHABET, max_length=64)
    for stem in before:
        train(home, example(stem, home))
    return home
