"""What a path stands for; adapters as whole models; temporary copies of models do not pile up."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from lockstep.base.folders import scratch_dir
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.run.errors import RunRefused
from lockstep.run.trained_models.model_source import load_target, target_config
from lockstep.run.trained_models.model_target import SCRATCH_PREFIX, find_target


def test_runs_checkpoints_exports_and_others_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    Ledger.create(run, {"name": "run"}).close()
    for folder in ("checkpoints/00000040/critic", "export", "adapter"):
        (run / folder).mkdir(parents=True)
    (run / "adapter/adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found = find_target("run", None)
    assert (found.run, found.step, found.path) == (run, "last", str(run))
    assert find_target("run", "best").step == "best"
    for inside, step, adapter in (
        ("checkpoints/00000040", "40", False), ("checkpoints/00000040/critic", "40", False),
        ("export", None, False), ("adapter", None, True),
    ):  # fmt: skip
        found = find_target(f"run/{inside}", None)
        assert (found.run, found.step, found.adapter) == (run, step, adapter)
    hub = find_target("owner/name", None)
    assert (hub.run, hub.path) == (None, "owner/name")
    with pytest.raises(RunRefused, match="--step 3 takes the folder of a run"):
        find_target("owner/name", "3")


def test_an_adapter_becomes_a_whole_model(tmp_path: Path) -> None:
    """As peft merges it."""
    base = make_tiny(tmp_path / "base", hidden=32, layers=1, heads=2, kv_heads=1, ffn=64, tie_embeddings=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(tmp_path / "adapter")
    target = find_target(str(tmp_path / "adapter"), None)
    (tmp_path / "scratch").mkdir()
    with target_config(target, None) as config:
        model, steps = load_target(target, config, tmp_path / "scratch")
    assert steps == 0 and model.path == str(tmp_path / "scratch/model")
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    ).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(model.path)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), parameter)
    assert not torch.equal(
        found.get_parameter("model.layers.0.self_attn.q_proj.weight"),
        AutoModelForCausalLM.from_pretrained(base).get_parameter("model.layers.0.self_attn.q_proj.weight"),
    )


def test_an_adapter_without_a_base_is_refused(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base", hidden=32, layers=1, heads=2, kv_heads=1, ffn=64)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(file.read_text().replace(f'"{base}"', "null"))
    target = find_target(str(tmp_path / "adapter"), None)
    with target_config(target, None) as config, pytest.raises(RunRefused, match="no base_model_name_or_path"):
        load_target(target, config, tmp_path)


HOLD = """
import os
from lockstep.base.folders import scratch_dir
from lockstep.run.trained_models.model_target import SCRATCH_PREFIX
with scratch_dir(SCRATCH_PREFIX) as folder:
    (folder / "model").mkdir()
    print(folder, flush=True)
    input()
"""


def test_the_copy_of_a_killed_process_is_deleted_and_one_in_use_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert other.stdout is not None
    left = Path(other.stdout.readline().strip())
    with scratch_dir(SCRATCH_PREFIX) as own:
        assert left.is_dir() and own.is_dir() and own != left
    assert not own.exists()
    other.kill()
    other.wait(10)
    assert (left / "model").is_dir()
    os.utime(left, (0, 0))
    with scratch_dir(SCRATCH_PREFIX):
        assert not left.exists()
