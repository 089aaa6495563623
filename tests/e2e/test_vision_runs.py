"""Runs with images: those in the data are written once the run's folder exists; runs that are killed and resumed end as
undisturbed ones, and one whose image files have changed is refused or leaves them out."""

import base64
import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from harness import (
    Launched,
    config,
    metric_rows,
    picture_task,
    seeded_random,
    train,
    weights,
    write,
    write_picture,
)
from PIL import Image
from resume_scenarios import InterruptedRun, References
from test_recovery import assert_like_reference, begin, kill_worker, recoveries

from lockstep.config.loader import load_config
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.step_file import read_step_file
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.run.planning.prepare import dry_run

pytestmark = [pytest.mark.timeout(600)]

HELD = {"stage": "train", "seconds": 0.3, "at_end": False}
BOUNDED = {"vision": {"store_gb": 1e-5}}
"""Room for about four small pictures."""


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


@pytest.mark.slow
def test_an_engine_and_a_rank_are_killed(reference: References, tmp_path: Path) -> None:
    """The engine while it generates, the rank while its peer waits for it in a collective."""
    of = reference("pictures-grpo")
    hold = {"stage": "rollout", "seconds": 0.3, "at_end": False}
    launched = begin(of, tmp_path, hold, "pictures-grpo")
    launched.wait_for("rollout", 2)
    kill_worker(launched, "engine-0", seconds=1.0)
    launched.wait_for("train", 4)
    kill_worker(launched, "policy-1")
    assert_like_reference(launched, of)
    assert [each["worker"] for each in recoveries(launched.folder)] == ["engine-0", "policy-1"]


@pytest.mark.slow
def test_a_run_is_resumed_only_with_the_images_that_it_began_with(tmp_path: Path) -> None:
    home = picture_task(tmp_path)
    values = config(home, "pictures-sft", steps=2, batch_size=4, evaluation=None)
    whole = train(home, values | {"name": "whole"})
    run = home / "runs" / "killed"
    launched = Launched.start(run, str(write(home, values | {"name": run.name})), hold=HELD)
    launched.wait_for("train", 1)
    launched.kill()
    picture = home / "data" / "0-0.png"
    before = picture.read_bytes()
    write_picture(picture, seed=99)
    refused = Launched.resume(run)
    assert refused.finish() == 2
    digests = [hashlib.sha256(each).hexdigest()[:32] for each in (before, picture.read_bytes())]
    assert f"row 0: image '{picture}' (was {digests[0]}, is {digests[1]})" in " ".join(refused.printed().split())
    picture.write_bytes(before)
    resumed = Launched.resume(run)
    assert resumed.finish() == 0, resumed.text()
    assert weights(run) == weights(whole)


@pytest.mark.slow
def test_a_resumed_run_prepares_damaged_images_again(tmp_path: Path) -> None:
    """The run ended by them, as its ranks read them."""
    home = picture_task(tmp_path)
    values = config(home, "pictures-sft", steps=3, batch_size=4, evaluation=None)
    whole = train(home, values | {"name": "whole"})
    run = home / "runs" / "damaged"
    hold = {"stage": "train", "seconds": 1.0, "at_end": False}
    launched = Launched.start(run, str(write(home, values | {"name": run.name})), hold=hold)
    launched.wait_for("train", 1)
    for path in (run / "images").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    assert launched.finish() == 1
    assert "is damaged" in launched.text() and "a resumed run prepares the images again" in launched.text()
    resumed = Launched.resume(run)
    assert resumed.finish() == 0, resumed.text()
    assert weights(run) == weights(whole)


@pytest.mark.slow
def test_a_run_is_resumed_only_with_the_videos_that_it_began_with(tmp_path: Path) -> None:
    home = picture_task(tmp_path)
    clip, other = home / "data" / "clip.gif", home / "data" / "other.gif"
    for seed, path in enumerate((clip, other)):
        first, *others = (Image.open(io.BytesIO(picture(10 * seed + number))) for number in range(2))
        first.save(path, save_all=True, append_images=others, duration=500)
    rows = [{"prompt": f"<video>{digit}=", "videos": ["clip.gif"], "completion": str(digit)} for digit in range(8)]
    data = home / "data" / "clips.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = config(home, "pictures-sft", name="clips", steps=2, batch_size=4, evaluation=None)
    run = home / "runs" / "clips"
    launched = Launched.start(run, str(write(home, values | {"data": {"path": str(data)}})), hold=HELD)
    launched.wait_for("train", 1)
    launched.kill()
    before = clip.read_bytes()
    shutil.copyfile(other, clip)
    refused = Launched.resume(run)
    assert refused.finish() == 2
    assert f"row 0: image '{clip}' (was {hashlib.sha256(before).hexdigest()[:32]}" in " ".join(
        refused.printed().split()
    )
    clip.write_bytes(before)
    resumed = Launched.resume(run)
    assert resumed.finish() == 0, resumed.text()
    assert sum(1 for _ in (run / "images").rglob("*.safetensors")) == 2, "each frame is prepared once"


@pytest.mark.slow
def test_rows_of_changed_images_are_left_out_of_a_resumed_run(tmp_path: Path) -> None:
    """One prompt's completions wait for training, without its prepared pixels; another was not submitted yet."""
    home = picture_task(tmp_path)
    values = config(home, "pictures-grpo", name="killed", steps=4, evaluation=None, model=BOUNDED | {
        "path": str(home / "model")
    })  # fmt: skip
    run = home / "runs" / "killed"
    launched = Launched.start(run, str(write(home, values)), hold=HELD)
    launched.wait_for("train", 1)
    launched.kill()
    with Ledger.reader(run) as ledger:
        stored = ledger.rollouts(1)
        assert stored is not None and ledger.collected_steps() == [0, 1]
        used = {prompt.row: prompt for step in (0, 1) for prompt in (g.prompt for g in ledger.rollouts(step).groups)}
    changed = next(group.prompt for group in stored.groups if group.prompt.images)
    coming = next(row for row in range(20) if row not in used and row % 5 != 4)
    write_picture(Path(changed.images[0].source), seed=99)
    (home / "data" / f"{coming}-0.png").unlink()
    shutil.rmtree(run / "images" / changed.images[0].digest[:2])
    resumed = Launched.resume(run, "data.images.on_error=skip")
    assert resumed.finish() == 0, resumed.text()
    with Ledger.reader(run) as ledger:
        left_out = sum(row.values.get("data/left_out", 0.0) for row in ledger.metrics_rows())
        later = {uid for uid, step in ledger.prompts_used().items() if step > 1}
    assert f"0:{coming}" not in later and left_out in (1.0, 2.0), "the last may be of a step that the run has not"
    assert "data/left_out" in metric_rows(run)[1]


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
