"""Runs with vLLM as engine."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra `vllm`: script/test --vllm"),
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[2]


def lockstep(*arguments: object) -> str:
    """Run a command that must succeed; returns its output."""
    command = [Path(sys.executable).with_name("lockstep"), *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def sorting(home: Path) -> list[str]:
    """Create the demo's data and model; returns the overrides that name them."""
    subprocess.run([sys.executable, ROOT / "examples" / "sort_data.py", home / "data"], check=True, timeout=60)
    make_tiny(home / "model", hidden=128, layers=2, heads=4, kv_heads=2, ffn=512, max_length=64, alphabet="0123456789=")
    return [f"folder={home}/runs", f"evaluation.data.path={home}/data/eval.jsonl"]


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_a_few_steps_go_through_every_stage(tmp_path: Path) -> None:
    where = sorting(tmp_path)
    short = ["steps=3", "prompts_per_step=4", "evaluation.prompts=8", "checkpoint.every=2", "trainer.threads=1"]
    lockstep(
        "train", "examples/grpo_sort.yaml", *where, *short, f"model.path={tmp_path}/model",
        f"data.path={tmp_path}/data/grpo.jsonl", "rollout.engine={kind: vllm, cpu_kv_cache_gb: 0.1}",
        "placement.colocate=all", "reward={terms: [{kind: regex, pattern: '[0-4].*'}]}",
    )  # fmt: skip
    run = tmp_path / "runs" / "sort-grpo"
    assert summary(run)["exit_reason"] == "finished"
    with Ledger.reader(run) as ledger:
        stored = [kept for step in range(3) if (kept := ledger.stored_step(step)) is not None]
        assert stored
        for each in stored:
            versions = [group.completions[0].versions for group in each.rollouts.groups]
            assert {int(version) for row in versions for version in row} == {each.rollouts.step}
        rows = [row.values for row in ledger.metrics_rows()]
    gaps = [row["policy/engine_gap_mean"] for row in rows if row["policy/tokens"]]
    assert max(gaps) < 1e-4, "log-probabilities of engine and trainer differ"


@pytest.mark.slow
def test_grpo_learns_as_with_the_builtin_engine(tmp_path: Path) -> None:
    where = sorting(tmp_path)
    data = f"data.path={tmp_path}/data/sft.jsonl"
    lockstep("train", "examples/sft_sort.yaml", *where, data, f"model.path={tmp_path}/model")
    assert summary(tmp_path / "runs" / "sort-sft")["eval/exact_match"]["final"] < 0.6
    reached = {}
    for engine in ("vllm", "builtin"):
        lockstep(
            "train", "examples/grpo_sort.yaml", *where, f"data.path={tmp_path}/data/grpo.jsonl", f"name={engine}",
            f"model.path={tmp_path}/runs/sort-sft/export", f"rollout.engine={engine}",
        )  # fmt: skip
        reached[engine] = summary(tmp_path / "runs" / engine)["eval/exact_match"]["final"]
    assert min(reached.values()) >= 0.95, reached
