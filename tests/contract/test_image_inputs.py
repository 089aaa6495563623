"""The images of a rank's rows: constant features are computed once, with bounded memory, and equal those of the row."""

from pathlib import Path

import numpy as np
import pytest
import torch
import trainer_ranks as tr
import vision_ranks as vr

from lockstep.data.forest_builder import forest_from_documents
from lockstep.data.mini_batches import pack
from lockstep.models.errors import ModelError
from lockstep.models.model_loader import load_policy
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.models.vision.vision_policy import VisionPolicyModel
from lockstep.train.forward import image_inputs
from lockstep.train.forward.image_inputs import ImageInputs
from lockstep.train.forward.target_values import ForwardSettings, evaluate_each

FAMILIES = ("qwen3_vl", "llava_onevision", "idefics3", "gemma3")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("images")
    for family in FAMILIES:
        make_tiny_vision(made / family, family=family, **vr.SIZES)
        torch.save(vr._prompts(made, family), made / f"{family}.prompts")
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_constant_features_are_computed_once_and_change_nothing(
    family: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(tr.config(folder, family, "sft").model, CPU)
    assert isinstance(policy, VisionPolicyModel)
    cfg = tr.config(folder, family, "sft")
    batch = pack(forest_from_documents(vr.documents(folder, family)), 1, 150)
    rows = next(iter(batch.minibatches(1, None, cfg.policy.objective))).by_rank[0]
    assert any(len(row.images or ()) > 1 for row in rows)

    def logprobs(inputs: ImageInputs) -> list[np.ndarray]:
        settings = ForwardSettings(CPU, 1.0, 64, inputs)
        return [each["logprobs"] for each in evaluate_each(policy, rows, ["logprobs"], settings)]

    called = ImageInputs(vr.images_of(folder), cfg.model, policy, CPU)
    assert not called.constant
    expected = logprobs(called)
    policy.requires_grad_(False)
    kept = ImageInputs(vr.images_of(folder), cfg.model, policy, CPU)
    small = ImageInputs(vr.images_of(folder), cfg.model, policy, CPU, kept_bytes=1)
    assert kept.constant
    count, original = 0, image_inputs.image_features

    def counted(*args: object) -> object:
        nonlocal count
        count += 1
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(image_inputs, "image_features", counted)
    for again in (0, 1):
        for found, value in zip(logprobs(kept), expected, strict=True):
            np.testing.assert_allclose(found, value, atol=2e-6)
        assert count == 2, f"pass {again}: once for each prompt with images"
    for found, value in zip(logprobs(small), expected, strict=True):
        np.testing.assert_allclose(found, value, atol=2e-6)
    assert len(small._known) == 1


def test_a_language_model_is_refused(folder: Path) -> None:
    make_tiny(folder / "text")
    cfg = tr.config(folder, "text", "sft").model
    with pytest.raises(ModelError, match="the data has images, and this model reads none"):
        ImageInputs(vr.images_of(folder), cfg, load_policy(cfg, CPU), CPU)


def test_rows_with_images_need_their_folder(folder: Path) -> None:
    cfg = tr.config(folder, "qwen3_vl", "sft")
    batch = pack(forest_from_documents(vr.documents(folder, "qwen3_vl")), 1, 150)
    rows = next(iter(batch.minibatches(1, None, cfg.policy.objective))).by_rank[0]
    with pytest.raises(RuntimeError, match="without the folder of the run's images"):
        tr.create(cfg.policy).evaluate(rows, ["logprobs"])
