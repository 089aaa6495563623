"""Runs whose data holds the images itself: nothing is written before the run's folder exists, then all are kept."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from harness import seeded_random, train, write
from PIL import Image
from resume_scenarios import InterruptedRun, References

from lockstep.config.loader import load_config
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.run.planning.prepare import dry_run

pytestmark = [pytest.mark.timeout(300)]


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_images_in_the_data_are_kept_in_the_folder_of_a_run_and_of_no_dry_run(tmp_path: Path) -> None:
    make_tiny_vision(tmp_path / "model", family="qwen3_vl", max_length=64)
    pictures = [picture(seed) for seed in range(4)]
    for name, some in (("train", pictures[:3]), ("held-out", pictures[3:])):
        urls = ["data:image/png;base64," + base64.b64encode(each).decode() for each in some]
        rows = [{"prompt": "what?", "answer": "x", "image": url} for url in urls]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "recipe": "grpo", "name": "inline", "folder": str(tmp_path / "runs"), "steps": 1, "prompts_per_step": 3,
        "group_size": 2, "token_budget": 128, "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "train.jsonl")}, "reward": {"terms": [{"kind": "exact_match"}]},
        "rollout": {"sampling": {"max_tokens": 4}},
        "evaluation": {"every": 1, "data": {"path": str(tmp_path / "held-out.jsonl")}},
    }  # fmt: skip
    dry_run(load_config(write(tmp_path, values)), resume=None)
    assert not (tmp_path / "runs" / "inline").exists()
    run = train(tmp_path, values)
    kept = [path.read_bytes() for path in (run / "images").rglob("*.original")]
    assert sorted(kept) == sorted(pictures)
    assert all("base64" not in path.read_text() for path in (run / "logs").rglob("*.log"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["pictures-grpo", "pictures-sft"])
def test_killed_in_one_stage_after_the_other(reference: References, tmp_path: Path, recipe: str) -> None:
    """The tower is trained, on two ranks: the run ends with the weights of an undisturbed one."""
    interrupted, chance = InterruptedRun(reference(recipe), tmp_path, recipe), seeded_random("images", recipe)
    if recipe == "pictures-grpo":
        interrupted.kill("rollout", 0, chance.random())
        interrupted.kill("logprobs", 4, chance.random())
    interrupted.kill("train", 3, chance.random())
    interrupted.kill("checkpoint", 5, chance.random())
    interrupted.finish()
