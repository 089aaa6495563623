"""What `lockstep check` says of models and data with images: sizes, times and rooms, and what is refused."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from lockstep.cli.check import check_plan
from lockstep.config.loader import check_config
from lockstep.data.images.image_processor import load_image_processor
from lockstep.data.images.image_usage import ImageUsage
from lockstep.doctor.check.rules.memory_fit import ProcessMemory, engine_memory_parts
from lockstep.doctor.check.rules.step_durations import GPU_SPEEDS, step_durations
from lockstep.doctor.output.findings import CheckReport, Finding
from lockstep.models.model_facts import model_facts
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.vision.row_images import image_features, row_images
from lockstep.models.vision.tiny_families import VISION_FAMILIES
from lockstep.models.vision.tiny_vision import make_tiny_vision

SIZE = (64, 64)


def config(folder: Path, **changes: Any) -> Any:
    base = {
        "recipe": "grpo", "name": "seen", "folder": str(folder / "runs"), "steps": 1, "prompts_per_step": 1,
        "group_size": 2, "token_budget": 512, "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "data.jsonl")}, "reward": {"terms": [{"kind": "exact_match"}]},
        "rollout": {"sampling": {"max_tokens": 32}}, "cluster": {"device": "cpu"},
    }  # fmt: skip
    return check_config(base | changes, "x")


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def home(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    fields = {"hidden": 64, "heads": 2, "ffn": 128, "alphabet": "what?abc", "vision_ffn": 256, "max_length": 512}
    make_tiny_vision(folder / "model", family=request.param, image_size=64, **fields)
    content = io.BytesIO()
    Image.new("RGB", SIZE, (200, 90, 20)).save(content, "PNG")
    url = "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
    rows = [{"prompt": "<image>what?" * count, "answer": "a", "images": [url] * count} for count in (1, 2, 1)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_the_shape_has_all_parameters(home: Path) -> None:
    run = config(home)
    facts = model_facts(run.model, "cpu")
    shape = check_plan._shape(run.policy, facts, ImageUsage())
    assert shape.parameters == facts.parameters and shape.vision is not None and shape.vision.flops == 0
    text = replace(shape, vision=None)
    width = 4  # float32 on a CPU
    assert engine_memory_parts(run, shape)["weights"] == width * facts.parameters
    assert engine_memory_parts(run, text)["weights"] < width * facts.parameters
    frozen = config(home, model={
        "path": str(home / "model"), "vision": {"tower": {"train": False}, "projector": {"train": False}},
    })  # fmt: skip
    still = check_plan._shape(frozen.policy, model_facts(frozen.model, "cpu"), ImageUsage())
    assert still.sent == text.parameters and shape.sent == shape.parameters


def test_the_tower_s_share_of_the_time_is_that_of_its_operations(home: Path) -> None:
    """Operations of the forward are counted by torch; in training each costs three times as much, in both parts."""
    run = config(home)
    cfg = run.model
    model = AutoModelForImageTextToText.from_pretrained(cfg.path, attn_implementation="eager").eval()
    images = load_image_processor(cfg, load_tokenizer(cfg))
    assert images is not None
    image = images.prepare(Image.new("RGB", SIZE, (90, 20, 200)), "0123456789abcdef")
    usage = ImageUsage(1, 1, image.features, 1, image.features, image.features, SIZE)
    shape = check_plan._shape(run.policy, model_facts(cfg, "cpu"), usage)
    length = 2 * 32 + image.features
    with torch.no_grad(), FlopCounterMode(display=False) as tower:
        image_features(model, row_images([image], [], "cpu").inputs)
    with torch.no_grad(), FlopCounterMode(display=False) as text:
        model(torch.full((1, length), 5))
    took, without = (
        step_durations(run, run.policy, each, GPU_SPEEDS["H200"])
        for each in (shape, replace(shape, vision=replace(shape.vision, flops=0.0)))
    )
    # Two completions of one prompt: the text is estimated for each alone, and the tower's work is done once.
    share = (took.train - without.train) / without.train
    assert share == pytest.approx(tower.get_total_flops() / (2 * text.get_total_flops()), rel=0.5)
    assert took.rollout > without.rollout and took.prefill > without.prefill


def findings(run: Any) -> dict[str, Finding]:
    report = CheckReport()
    check_plan.check_plan(report, run, [], ProcessMemory("cpu", 8 << 30))
    assert report.passed or any(each.id == "placement" for each in report.findings), report.findings
    return {each.id: each for each in report.findings}


def test_the_images_of_the_data_are_in_the_report(home: Path) -> None:
    found = findings(config(home))
    assert "4 images in 3 samples, at most 2 in one" in found["images"].seen
    assert found["images-disk"].severity == "ok"


def test_only_answers_of_an_environment_have_images(home: Path, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text("class Game:\n    def step(self, action):\n        return {'text': 'a'}\n")
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": "what?", "answer": "a"}))
    environment = {"path": f"{tmp_path / 'game.py'}:Game", "max_images": 2}
    rollout = {"sampling": {"max_tokens": 32}, "environment": environment}
    found = findings(config(home, data={"path": str(tmp_path / "text.jsonl")}, rollout=rollout))
    assert found["placement"].severity == "ok" and not found.keys() & {"images", "images-disk"}


def test_fewer_images_for_vllm_than_the_data_has_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.run.planning.prepare.check_installed", lambda: "0")
    for limit in (1, {"count": 1}):
        engine = {"kind": "vllm", "extra": {"limit_mm_per_prompt": {"image": limit}}}
        rollout = {"sampling": {"max_tokens": 32}, "engine": engine}
        error = findings(config(home, rollout=rollout))["placement"]
        assert "limit_mm_per_prompt has 1 for image, and a prompt of the data has 2 images" in error.seen
        assert "to 2 or more, or leave it out" in error.seen + error.fix
