"""The runs of the endurance benchmark: the examples on tiny models, with steps of a fraction of a second."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from benchmarks.endurance.schedule import STEPS, Episode, Variant
from benchmarks.faults.ray_hosts import Hosts
from benchmarks.runner import ROOT
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision

EXAMPLES = {"grpo": "grpo_sort", "ppo": "ppo_sort", "dpo": "dpo_sort", "vlm": "scene_grpo"}
REWARD = {"terms": [{"kind": "exact_match"}, {"kind": "regex", "pattern": "[0-4].*", "weight": 0.5}]}
"""Differs within groups of an untrained model, so that every step changes the weights."""
GENEROUS = {"max_restarts": 999}


def prepare(home: Path) -> None:
    """Make the models and the data of all runs, once."""
    if (home / "made").exists():
        return
    make_tiny(
        home / "sort-model", hidden=64, layers=2, heads=4, kv_heads=2, ffn=256, max_length=64, alphabet="0123456789=",
        seed=11,
    )  # fmt: skip
    make_tiny_vision(
        home / "scene-model", family="qwen3_vl", alphabet="0123456789,?abcdefghijklmnopqrstuvwxyz", max_length=64,
        seed=11,
    )  # fmt: skip
    _example("sort_data").main(home / "sort-data", 7)
    _example("scene_data").main(home / "scene-data", 7, 0.2)
    (home / "made").touch()


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(each: Episode, home: Path, folder: Path, hosts: Hosts | None) -> dict[str, Any]:
    """The config of an episode's run, in this folder."""
    variant = each.variant
    text = (ROOT / "examples" / f"{EXAMPLES[variant.task]}.yaml").read_text()
    values: dict[str, Any] = yaml.safe_load(text.replace("runs/", f"{home}/"))
    images = variant.task == "vlm"
    values["model"]["path"] = str(home / ("scene-model" if images else "sort-model"))
    values |= {
        "name": "run", "folder": str(folder), "seed": each.seed, "steps": STEPS, "checkpoint": {"every": 15},
        "report": {"html": False, "tensorboard": False}, "trainer": _trainer(variant), "cluster": _cluster(each, hosts),
        "recovery": dict.fromkeys(("policy", "rollout", "reference", "reward_model"), GENEROUS),
    }  # fmt: skip
    del values["evaluation"]
    if variant.task == "dpo":
        del values["rollout"]
        return {**values, "batch_size": 32}
    values |= {"prompts_per_step": 8, "reward": REWARD}
    values["rollout"]["engine"] = {"max_rows": 32, "threads": 1, "count": 2 if hosts else 1}
    values["loss"]["old_logprobs"] = "trainer"
    if variant.task == "ppo":
        values |= {"prompts_per_step": 32}
        values["critic"] |= {"trainer": _trainer(variant), "export": True}
    if variant.cluster == "hosts":
        values["placement"] = {"strategy": "spread"}
    return values


def _trainer(variant: Variant) -> dict[str, Any]:
    # A small rate, so that rewards still differ within groups, and every step still changes the weights, at the end.
    common: dict[str, Any] = {"ranks": 2, "threads": 1, "optimizer": {"lr": 2e-4, "eps": 1e-5}}
    if variant.trainer == "fsdp2":
        return common
    return {**common, "kind": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 2}}}


def _cluster(each: Episode, hosts: Hosts | None) -> dict[str, Any]:
    if each.variant.cluster == "local":
        return {"kind": "local", "orphan_grace_s": each.orphan_grace_s}
    found: dict[str, Any] = {"kind": "ray", "orphan_grace_s": each.orphan_grace_s}
    return found if hosts is None else found | {"address": hosts.address}
