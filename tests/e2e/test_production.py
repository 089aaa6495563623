"""The production example: its plan, with and without the model's metadata, and its rewards."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import Qwen2Config
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.models.tiny_model import TinyModel, char_tokenizer
from lockstep.models.vision.tiny_vision import make_tiny_vision

pytestmark = pytest.mark.xdist_group("bad input")

ROOT = Path(__file__).parents[2]
FILE = "examples/production/grpo_gsm8k_8gpu.yaml"
VISION_FILE = "examples/production/grpo_geometry_8gpu.yaml"
QWEN = {
    "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 8960, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
"""The config of Qwen2.5-1.5B."""


def dry_run(monkeypatch: pytest.MonkeyPatch, *arguments: str, file: str = FILE) -> tuple[int, str, str]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["train", file, "--dry-run", *arguments])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_offline_the_plan_lists_what_could_not_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown, notes = dry_run(monkeypatch, "--gpus", "8")
    assert code == 0, notes
    for rank in range(8):
        for name in (f"policy-{rank}", f"engine-{rank}"):
            (line,) = [line for line in shown.splitlines() if line.split()[:1] == [name]]
            assert f"cuda:{rank}" in line
    assert "scorer-7" in shown and "collectives of a step" not in shown and "M parameters" not in shown
    for words in ("planned for a host with 8 GPUs", "not looked up: model.path = 'Qwen/Qwen2.5-1.5B-Instruct'"):
        assert words in notes
    assert "not looked up: data = openai/gsm8k" in notes and "not looked up: evaluation.data = openai/gsm8k" in notes


def test_with_model_and_data_the_plan_is_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    Qwen2Config(**QWEN, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    tokenizer = char_tokenizer(TinyModel(chat=True))
    tokenizer.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    monkeypatch.setattr(
        "lockstep.models.model_facts.check_weights", lambda policy, folder: None
    )  # 3 GB of weights that are not needed
    rows = [{"question": "1+1?", "answer": "so it is\n#### 2"}] * 4
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = ("kind=jsonl", f"path={tmp_path}/data.jsonl")
    here = [f"{section}.{value}" for section in ("data", "evaluation.data") for value in values]
    code, shown, notes = dry_run(monkeypatch, "--gpus", "8", f"model.path={tmp_path}", *here)
    assert code == 0, notes
    assert "1,543.71 M parameters, bfloat16" in shown, shown[-400:]
    assert "all_gather" in shown and "reduce_scatter" in shown and "not looked up" not in notes


def test_with_images_the_plan_is_listed_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown, notes = dry_run(monkeypatch, "--gpus", "8", file=VISION_FILE)
    assert code == 0, notes
    assert "engine-7" in shown and "max_pixels: 1003520" in shown
    assert "not looked up: data = hiyouga/geometry3k" in notes


def test_with_a_vision_model_and_images_the_plan_is_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The columns are those of the dataset on the hub: `problem` with `<image>`, `answer`, `images`."""
    from PIL import Image

    model = make_tiny_vision(tmp_path / "model", family="qwen2_5_vl", max_length=4096)
    Image.new("RGB", (64, 48), "red").save(tmp_path / "one.png")
    row = {"problem": "<image>Find x.", "answer": "5", "images": ["one.png"]}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    values = "data.kind=jsonl", f"data.path={tmp_path}/data.jsonl", f"model.path={model}", f"folder={tmp_path}/runs"
    code, shown, notes = dry_run(monkeypatch, "--gpus", "8", *values, "model.vision.max_pixels=4096", file=VISION_FILE)
    assert code == 0, notes
    assert "all_gather" in shown and "reduce_scatter" in shown and "not looked up" not in notes
    assert not (tmp_path / "runs").exists(), "a dry run keeps no images"


def test_on_a_host_without_gpus_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.device_count():
        pytest.skip("this host has GPUs")
    code, _, printed = dry_run(monkeypatch)  # this, too, does not need the hub
    assert code == 2 and "cluster.device is cuda, and torch finds no GPU on this host" in printed


def test_a_missing_folder_is_not_taken_for_a_hub_model(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, printed = dry_run(monkeypatch, "--gpus", "8", "model.path=examples/no-such-model")
    assert code == 2 and "there is no such folder" in printed


def test_gpus_requires_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["train", str(ROOT / FILE), "--gpus", "8"])
    assert result.exit_code == 2 and "--dry-run" in result.output


def test_its_rewards() -> None:
    spec = importlib.util.spec_from_file_location("gsm8k", ROOT / "examples" / "production" / "gsm8k.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts = ["Two and two.\n#### 1,004", "it is 1004.", "#### 1004 or #### 5", "no idea", "#### 1004.0\nand so on"]
    completions = [texts[0], *[[{"role": "assistant", "content": text}] for text in texts[1:]]]
    assert module.correct(completions, ["how so\n#### 1,004"] * 5) == [1, 1, 0, 0, 1]
    assert module.formed(completions) == [1, 0, 0, 0, 0]
