"""Runs whose data holds the images itself: nothing is written before the run's folder exists, then all are kept. Runs
whose data has videos."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from harness import train, write
from PIL import Image

from lockstep.config.loader import load_config
from lockstep.ledger.step_file import read_step_file
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


def test_a_run_with_videos(tmp_path: Path) -> None:
    """GRPO with an animation and a folder of frames: the ledger names the frames, whose pixels are files."""
    letters = "abxwht?0123456789<>. secod"
    make_tiny_vision(tmp_path / "model", family="qwen3_vl", max_length=256, alphabet=letters)
    frames = [Image.open(io.BytesIO(picture(seed))) for seed in range(3)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], duration=500, lossless=True)
    (tmp_path / "clip").mkdir()
    for number, frame in enumerate(frames[:2]):
        frame.save(tmp_path / "clip" / f"{number}.png")
    asked = [{"role": "user", "content": "<video>what?"}]
    rows = [{"prompt": asked, "videos": [{"video": name}], "answer": "x"} for name in ("a.webp", "clip")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "recipe": "grpo", "name": "videos", "folder": str(tmp_path / "runs"), "steps": 2, "prompts_per_step": 2,
        "group_size": 2, "token_budget": 512, "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "train.jsonl")}, "reward": {"terms": [{"kind": "exact_match"}]},
        "rollout": {"sampling": {"max_tokens": 4}},
    }  # fmt: skip
    run = train(tmp_path, values)
    stored = read_step_file(run / "steps" / "00000002.arrow", 1)
    images = sorted((group.prompt.images for group in stored.rollouts.groups), key=len)
    assert [image.source for image in images[0]] == [str(tmp_path / "clip" / f"{number}.png") for number in range(2)]
    assert [image.origin for image in images[1]] == [f"{tmp_path}/a.webp#{number}" for number in range(3)]
    for image, frame in zip(images[1], frames, strict=True):
        with Image.open(image.source) as kept:
            np.testing.assert_array_equal(np.asarray(kept), np.asarray(frame))
