"""The examples with tools, with procedural tasks and with images run through all their parts, in a few steps each;
those with images learn in the long suites."""

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import train

from lockstep.config.loader import load_config
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision

pytestmark = [pytest.mark.xdist_group("examples"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
TINY = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 64}


def example(name: str, home: Path, **changes: Any) -> dict[str, Any]:
    """The config of an example with paths in `home` and few steps."""
    values = yaml.safe_load((ROOT / "examples" / name).read_text().replace("runs/", f"{home}/runs/"))
    load_config(ROOT / "examples" / name)
    values |= {"folder": f"{home}/runs", "report": {"tensorboard": False, "html": False}, **changes}
    values["trainer"] |= {"threads": 1, "schedule": {"kind": "constant"}}
    if values["recipe"] == "grpo":
        values |= {"prompts_per_step": 4, "group_size": 4}
        values["rollout"]["engine"] = {"threads": 1}
        values["evaluation"] |= {"prompts": 4}
    else:
        values |= {"batch_size": 16}
    return values


def test_the_calculator(tmp_path: Path) -> None:
    """With an untrained model: all text that ends in "]" is a call, and most calls are invalid."""
    runs = tmp_path / "runs"
    script = ROOT / "examples" / "calculator.py"
    subprocess.run([sys.executable, script, runs / "calculator-data"], check=True, timeout=60)
    make_tiny(runs / "calculator-model", alphabet="0123456789*=[];", max_length=64, **TINY)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    load_config(ROOT / "examples" / "calculator_sft.yaml")
    values = example("calculator.yaml", tmp_path, steps=2, model={"path": str(runs / "calculator-model")})
    environment = values["rollout"]["environment"]
    environment |= {"tools": [f"{tmp_path}/examples/calculator.py:calculator"], "pattern": "(?P<arguments>.*)\\]"}
    values["rollout"]["sampling"]["max_tokens"] = 48
    run = train(tmp_path, values)
    with Ledger.reader(run) as ledger:
        rows = [row.values for row in ledger.metrics_rows()]
        stored = ledger.rollouts(0)
    assert rows[0]["environment/calls"] > 0
    assert {"environment/call_errors", "environment/ended_turns", "rollout/turns_mean"} <= set(rows[0])
    completions = [each for group in stored.groups for each in group.completions]
    talked = [each for each in completions if len(each.episode.messages) > 1]
    assert talked and all(not each.mask.all() for each in talked)
    assert all(each.episode.messages[0]["content"].endswith("]") for each in talked)


def test_the_environment_with_pictures(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    subprocess.run([sys.executable, ROOT / "examples" / "grid_moves.py", runs / "grid-data"], check=True, timeout=60)
    make_tiny_vision(runs / "grid-model", family="qwen3_vl", alphabet="udlraetinv?", max_length=256, seed=11)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    values = example("grid_moves.yaml", tmp_path, steps=1, model={"path": str(runs / "grid-model")})
    values |= {"prompts_per_step": 4, "group_size": 4}
    values["rollout"]["environment"] |= {"path": f"{tmp_path}/examples/grid_moves.py:GridMoves"}
    values["rollout"]["engine"], values["evaluation"]["prompts"] = {"threads": 1}, 4
    run = train(tmp_path, values)
    with Ledger.reader(run) as ledger:
        completions = [each for group in ledger.rollouts(0).groups for each in group.completions]
        (row,) = [row.values for row in ledger.metrics_rows()]
    assert "environment/arrived" in row and math.isfinite(row["policy/loss"])
    assert all(1 <= len(each.images) <= 6 for each in completions)
    assert all(not each.mask[image.places].any() for each in completions for image in each.images)


SCENE_MODEL = {"family": "qwen3_vl", "alphabet": "0123456789,?abcdefghijklmnopqrstuvwxyz", "max_length": 64}


def make_scenes(home: Path, share: float, seed: int = 11) -> None:
    """Writes the data and the model with which the examples with images begin."""
    spec = importlib.util.spec_from_file_location("scene_data", ROOT / "examples" / "scene_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(home / "runs" / "scene-data", seed, share)
    make_tiny_vision(home / "runs" / "scene-model", seed=seed, **SCENE_MODEL)


@pytest.mark.parametrize(
    "name",
    ["scene_grpo.yaml", *(pytest.param(each, marks=pytest.mark.slow) for each in ("scene_sft.yaml", "scene_dpo.yaml"))],
)
def test_images(tmp_path: Path, name: str) -> None:
    make_scenes(tmp_path, 0.01)
    model = {"path": f"{tmp_path}/runs/scene-model"}
    values = example(name, tmp_path, steps=2, batch_size=8) if name != "scene_grpo.yaml" else None
    values = values or example(name, tmp_path, steps=2)
    if "evaluation" in values:
        values["evaluation"] |= {"prompts": 4}
        values["rollout"]["engine"] = {"threads": 1}
    values["model"] |= model
    run = train(tmp_path, values)
    with Ledger.reader(run) as ledger:
        rows = [row.values for row in ledger.metrics_rows()]
        stored = ledger.rollouts(0) if values["recipe"] == "grpo" else None
    assert len(rows) == 2 and all(math.isfinite(row["policy/loss"]) for row in rows)
    assert list((run / "images").rglob("*.safetensors"))
    if stored is not None:
        assert all(len(group.prompt.images) == 1 for group in stored.groups)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_a_policy_learns_where_the_square_is(tmp_path: Path, seed: int) -> None:
    """GRPO raises the share of boxes with an IoU of at least 0.5, on scenes that it was not trained on."""
    make_scenes(tmp_path, 1.0, seed)
    results = {}
    for name in ("scene_sft.yaml", "scene_grpo.yaml"):
        load_config(ROOT / "examples" / name)
        values = yaml.safe_load((ROOT / "examples" / name).read_text().replace("runs/", f"{tmp_path}/runs/"))
        values |= {"folder": f"{tmp_path}/runs", "seed": seed}
        run = train(tmp_path, values, limit_s=800)
        results[name] = json.loads((run / "summary.json").read_text())
    rewards = results["scene_grpo.yaml"]["eval/reward_mean"]
    assert rewards["first"] < 0.5 and rewards["final"] > rewards["first"] + 0.25, rewards


@pytest.mark.slow
def test_a_procedural_task(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    model = make_tiny(tmp_path / "runs" / "chain-sum-model", max_length=96, **TINY)
    load_config(ROOT / "examples" / "chain_sum_sft.yaml")
    run = train(tmp_path, example("grpo_chain_sum.yaml", tmp_path, steps=2, model={"path": str(model)}))
    with Ledger.reader(run) as ledger:
        rows = [row.values for row in ledger.metrics_rows()]
        stored = ledger.rollouts(0)
    assert "reward/task/mean" in rows[0]
    assert stored.groups[0].prompt.columns["reasoning_gym"]["task"] == "chain_sum"
