"""Packed rows with images equal transformers' own forwards of every sequence alone, in log-probabilities and gradients,
for all families of vision-language models."""

import random
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from lockstep.config.model import ModelConfig
from lockstep.data.images.image_errors import AdjacentImages
from lockstep.data.images.image_processor import load_image_processor
from lockstep.data.row_layout import RowLayout
from lockstep.data.samples import PlacedImage
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import SafetensorsCheckpoint, fill_policy, named_weights
from lockstep.models.model_loader import load_policy, load_tokenizer
from lockstep.models.packing_probe import probe_packing
from lockstep.models.vision.image_positions import has_three_axes
from lockstep.models.vision.image_probe import probe_image
from lockstep.models.vision.row_images import ImageFeatures, image_features, row_images
from lockstep.models.vision.tiny_families import VISION_FAMILIES
from lockstep.models.vision.vision_policy import VisionPolicyModel
from lockstep.train.distributed import ParallelContext
from lockstep.train.lazy_weights import LazyWeight
from lockstep.train.model_export import export_model
from tests.contract.vision_samples import SIZES, VisionPrompt, VisionSamples, picture

UNMARKED = ("qwen3_vl", "gemma3")
FAMILIES = [pytest.param(family, marks=() if family in UNMARKED else pytest.mark.slow) for family in VISION_FAMILIES]
Sequence = tuple[VisionPrompt, list[int]]


@dataclass(slots=True)
class Row:
    """A packed row, and the weights of its targets in a loss."""

    tokens: Tensor
    lengths: list[int]
    parents: list[int]
    pairs: Tensor
    placed: list[PlacedImage]
    prepared: list
    weights: Tensor


def pack(groups: list[tuple[VisionPrompt, list[list[int]]]]) -> Row:
    """Packs each prompt once, with its completions below it."""
    row = Row(torch.empty(0), [], [], torch.empty(0), [], [], torch.empty(0))
    tokens: list[int] = []
    pairs = []
    for prompt, completions in groups:
        start, parent = len(tokens), len(row.lengths)
        row.placed += [image.moved(start) for image in prompt.placed]
        row.prepared += prompt.prepared
        tokens += prompt.tokens
        row.lengths.append(len(prompt.tokens))
        row.parents.append(-1)
        for completion in completions:
            places = [start + len(prompt.tokens) - 1, *range(len(tokens), len(tokens) + len(completion))]
            pairs += list(pairwise(places))
            tokens += completion
            row.lengths.append(len(completion))
            row.parents.append(parent)
    row.tokens, row.pairs = torch.tensor(tokens), torch.tensor(pairs)
    row.weights = torch.randn(len(pairs), generator=torch.Generator().manual_seed(1))
    return row


def forest(samples: VisionSamples) -> list[tuple[VisionPrompt, list[list[int]]]]:
    """A prompt with an image and three completions, one of which has placeholder tokens; one with two images; one
    without an image; and a second prompt with the first image."""
    wide, tall = picture(28, 20, 0), picture(14, 30, 1)
    prompts = [samples.prompt(text, images) for text, images in [
        ("what?", [wide]), ("ab", [tall, wide]), ("abc", []), ("de", [wide]),
    ]]  # fmt: skip
    generator = random.Random(0)
    letters = samples.tokenizer.convert_tokens_to_ids(list("abcdefg?"))
    completions = [[generator.choices(letters, k=length) for length in lengths]
                   for lengths in ((9, 5, 7), (6, 4), (8,), (3, 3))]  # fmt: skip
    completions[0][1][1:3] = [samples.image_token] * 2
    completions[2][0][4] = samples.image_token
    return list(zip(prompts, completions, strict=True))


def loaded(samples: VisionSamples, fused: bool) -> VisionPolicyModel:
    policy = load_policy(ModelConfig(path=str(samples.folder)), "cpu")
    assert isinstance(policy, VisionPolicyModel)
    if fused:
        refusal = policy.fuse_layers()
        assert (refusal is None) is (samples.reference.config.model_type != "gemma3"), refusal
    samples.share_embedding(policy.lm)
    samples.share_embedding(samples.reference)
    return policy


def row_logprobs(policy: VisionPolicyModel, row: Row) -> Tensor:
    layout = policy.row_layout(row.lengths, row.parents, row.placed, row.prepared)
    images = row_images(row.prepared, row.placed, "cpu")
    found, _ = policy(row.tokens, layout, row.pairs[:, 0], row.tokens[row.pairs[:, 1]], images=images)
    return found


def gradients(model, samples: VisionSamples) -> dict[str, Tensor]:
    """Gradients by name. The spare token's embedding is the placeholder's, so theirs are added."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
    found[embedding][samples.image_token] += found[embedding][samples.spare]
    found[embedding][samples.spare] = 0
    return found


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference relative to the largest value of each tensor. Gradients that are analytically zero, as
    those of key biases, are compared with the whole model's."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(value.abs().max()) for value in expected.values())
    return max(
        (float((found[name] - value).abs().max()) / max(float(value.abs().max()), floor), name)
        for name, value in expected.items()
    )


@pytest.fixture(params=FAMILIES, scope="module")
def samples(request, tmp_path_factory) -> VisionSamples:
    return VisionSamples(tmp_path_factory.mktemp(request.param) / "m", request.param)


@pytest.mark.parametrize("fused", [True, False])
def test_a_forest_with_images_equals_separate_forwards(samples: VisionSamples, fused: bool) -> None:
    policy, groups = loaded(samples, fused), forest(samples)
    row = pack(groups)
    found = row_logprobs(policy, row)
    expected = torch.cat([samples.own_logprobs(prompt, own) for prompt, group in groups for own in group])
    assert float((found - expected).detach().abs().max()) < 1e-5
    policy.zero_grad(set_to_none=True)
    samples.reference.zero_grad(set_to_none=True)
    (found * row.weights).sum().backward()
    (expected * row.weights).sum().backward()
    error, name = largest_difference(gradients(policy.lm, samples), gradients(samples.reference, samples))
    assert error < 1e-5, name
    tower = [parameter.grad for parameter in policy.tower.parameters() if parameter.grad is not None]
    assert tower and all(bool(grad.abs().max() > 0) for grad in tower)


def test_prompts_with_one_image_and_with_several_in_one_row(tmp_path) -> None:
    """LLaVA-OneVision cuts the images of prompts with one into tiles, and no others."""
    samples = VisionSamples(tmp_path / "m", "llava_onevision")
    images = [picture(28, 20, 0), picture(14, 30, 1), picture(30, 30, 2)]
    counts = (2, 1, 3, 1, 2)
    prompts = [samples.prompt("abc?", images[:count]) for count in counts]
    assert [prompt.prepared[0].inputs["pixel_values"].shape[1] > 1 for prompt in prompts] == [n == 1 for n in counts]
    policy = loaded(samples, fused=True)
    row = pack([(prompt, [samples.tokenizer.convert_tokens_to_ids(list("gfedcb"))]) for prompt in prompts])
    found = row_logprobs(policy, row)
    expected = torch.cat([samples.own_logprobs(each, row.tokens[-6:].tolist()) for each in prompts])
    assert float((found - expected).detach().abs().max()) < 1e-5
    # a row may have a part of a prompt's images, each in any place
    own = [samples.reference.get_image_features(**prompt.inputs).pooler_output for prompt in prompts]
    alone = [(image, rows) for prompt, each in zip(prompts, own, strict=True)
             for image, rows in zip(prompt.prepared, each, strict=True)]  # fmt: skip
    for order in ([0], [1, 2], [2, 0], [1, 2, 4], [0, 2, 5, 6, 7, 2, 8]):
        inputs = row_images([alone[index][0] for index in order], [], "cpu").inputs
        rows = image_features(policy.lm, inputs).rows
        assert float((rows - torch.cat([alone[index][1] for index in order])).detach().abs().max()) < 1e-5


def test_a_row_without_images_is_not_changed_by_the_dummy(samples: VisionSamples) -> None:
    policy = loaded(samples, fused=True)
    groups = forest(samples)
    row = pack(groups[2:3])
    layout = policy.row_layout(row.lengths, row.parents, [], [])
    results = []
    for images in (None, row_images([samples.images.smallest()], [], "cpu")):
        policy.zero_grad(set_to_none=True)
        found, _ = policy(row.tokens, layout, row.pairs[:, 0], row.tokens[row.pairs[:, 1]], images=images)
        (found * row.weights).sum().backward()
        results.append((found.detach(), gradients(policy.lm, samples)))
    (plain, own), (with_dummy, others) = results
    assert torch.equal(plain, with_dummy)
    assert all(torch.equal(own[name], others[name]) for name in own)
    # transformers' own forward of the text agrees
    expected = samples.own_logprobs(*(groups[2][0], groups[2][1][0]))
    assert float((plain - expected).detach().abs().max()) < 1e-5
    reached = [parameter for parameter in policy.tower.parameters() if parameter.grad is not None]
    assert reached and all(not parameter.grad.any() for parameter in reached)


def test_other_images_give_other_results(samples: VisionSamples) -> None:
    """So that the other tests cannot pass with images that have no influence."""
    policy, groups = loaded(samples, fused=False), forest(samples)
    row, other = pack(groups[:1]), pack(groups[:1])
    first = other.prepared[0]
    name = "pixel_values"
    other.prepared[0] = type(first)(
        first.digest, {**first.inputs, name: first.inputs[name][:, ::-1].copy()}, first.features, (1, 1), (1, 1)
    )
    with torch.no_grad():
        assert float((row_logprobs(policy, row) - row_logprobs(policy, other)).abs().max()) > 1e-4


def test_the_probe_finds_that_trees_with_images_are_exact(samples: VisionSamples) -> None:
    image = probe_image(samples.images)
    assert image.features >= 4
    result = probe_packing(loaded(samples, fused=True), image=image)
    assert result.mode == "forest" and "with images, its own forward" in result.reason


def test_the_probe_refuses_a_model_that_computes_images_in_another_way(samples: VisionSamples, monkeypatch) -> None:
    policy, image = loaded(samples, fused=False), forest(samples)[0][0].prepared[0]
    path = "lockstep.models.vision.vision_policy.image_features"

    def without_projector(lm, inputs):
        found = image_features(lm, inputs)
        return ImageFeatures(found.rows * 2, found.deepstack)

    monkeypatch.setattr(path, without_projector)
    with pytest.raises(ModelError, match="after an image differ by"):
        probe_packing(policy, image=image)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "qwen2_5_vl"])
def test_the_probe_refuses_positions_and_masks_of_text(family: str, tmp_path, monkeypatch) -> None:
    """The layout of a text model leaves out what is particular about these families."""
    samples = VisionSamples(tmp_path / "m", family, vision_hidden=64, vision_ffn=64)
    policy = loaded(samples, fused=False)
    with torch.no_grad():  # so that a wrong position changes more than rounding does
        for parameter in policy.lm.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    image = probe_image(samples.images)
    assert probe_packing(policy, image=image).mode == "forest"
    path = "lockstep.models.vision.vision_policy.vision_layout"
    monkeypatch.setattr(path, lambda lm, lengths, parents, *images: RowLayout(list(lengths), list(parents)))
    with pytest.raises(ModelError, match="after an image differ by"):
        probe_packing(policy, image=image)


def test_weights_are_read_into_a_model_on_the_meta_device(samples: VisionSamples) -> None:
    """Several families have other names on disk than in memory."""
    policy = load_policy(ModelConfig(path=str(samples.folder)), "cpu", meta=True)
    report = fill_policy(policy, samples.folder, "cpu")
    assert not report.unexpected
    fresh = load_policy(ModelConfig(path=str(samples.folder)), "cpu")
    found, expected = dict(policy.named_parameters()), dict(fresh.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(not buffer.is_meta for buffer in policy.buffers())
    row = pack(forest(samples))
    with torch.no_grad():
        assert torch.equal(row_logprobs(policy, row), row_logprobs(fresh, row))


def test_the_layers_are_those_of_the_language_model(samples: VisionSamples) -> None:
    """The tower has as many."""
    policy = loaded(samples, fused=False)
    inside = {id(parameter) for parameter in policy.tower.parameters()}
    assert len(policy.layers) == SIZES["layers"]
    assert not inside & {id(parameter) for layer in policy.layers for parameter in layer.parameters()}


def test_images_must_be_separated_where_positions_have_three_axes(samples: VisionSamples) -> None:
    placeholder, sizes = samples.images.placeholder, [(28, 20), (14, 30)]
    assert len(samples.images.expand_text(f"{placeholder}b{placeholder}", sizes).spans) == 2
    refused = (
        pytest.raises(AdjacentImages, match="images 0 and 1") if has_three_axes(samples.reference) else nullcontext()
    )
    with refused:
        samples.images.expand_text(placeholder * 2, sizes)


def test_an_export_is_the_same_model_for_transformers(samples: VisionSamples, tmp_path) -> None:
    """With the names on disk of the original, and with its processor and chat template."""
    model = ModelConfig(path=str(samples.folder))
    policy = load_policy(model, "cpu", meta=True)
    fill_policy(policy, samples.folder, "cpu")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    weights = {name: LazyWeight(tuple(w.shape), lambda w=w: w.detach()) for name, w in named_weights(policy)}
    export_model(tmp_path / "out", policy, weights, model, torch.float32, ParallelContext())
    exported, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert all(torch.equal(value, policy.lm.state_dict()[name]) for name, value in exported.state_dict().items())
    with SafetensorsCheckpoint(samples.folder) as before, SafetensorsCheckpoint(tmp_path / "out") as after:
        assert before.names == after.names
    again = ModelConfig(path=str(tmp_path / "out"))
    images = load_image_processor(again, load_tokenizer(again))
    assert images is not None
    prompt = forest(samples)[0][0]
    image = picture(28, 20, 0)
    assert images.digest(b"x") == samples.images.digest(b"x")
    found = images.prepare(image, prompt.prepared[0].digest)
    assert all((found.inputs[name] == value).all() for name, value in prompt.prepared[0].inputs.items())
    assert load_tokenizer(again).chat_template == samples.tokenizer.chat_template
