"""Conversations whose environments answer with images: packed rows of each kind equal transformers' own forward of
every conversation alone, in log-probabilities and gradients, for all families of vision-language models."""

import inspect

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.images.image_store import PreparedImage
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Completion, Group, PlacedImage, Prompt, Rollouts
from lockstep.models.vision.row_images import row_images
from lockstep.models.vision.tiny_families import VISION_FAMILIES
from lockstep.models.vision.vision_policy import VisionPolicyModel
from tests.contract.test_vision_models import gradients, largest_difference, loaded
from tests.contract.vision_samples import VisionSamples, picture

UNMARKED = ("qwen3_vl", "gemma3")
FAMILIES = [pytest.param(family, marks=() if family in UNMARKED else pytest.mark.slow) for family in VISION_FAMILIES]
GROUP = 4


@pytest.fixture(params=FAMILIES, scope="module")
def samples(request, tmp_path_factory) -> VisionSamples:
    return VisionSamples(tmp_path_factory.mktemp(request.param) / "m", request.param)


class Conversations:
    """Two groups of conversations with images in the prompt, in answers, in both and in neither."""

    def __init__(self, samples: VisionSamples) -> None:
        self.samples, self.prepared = samples, dict[str, PreparedImage]()
        wide, other, tall = picture(28, 20, 0), picture(28, 20, 1), picture(14, 30, 2)
        first, second = self._words("abc"), self._words("ga")
        with_wide, with_other = self._answer("c*d?", wide), self._answer("c*d?", other)
        assert with_wide[0].tolist() == with_other[0].tolist()  # the same tokens of another picture
        two, none = self._answer("a*b*?", tall, wide), self._answer("no?")
        pictured = samples.prompt("what?", [tall])
        self.prepared |= {image.digest: image for image in pictured.prepared}
        prompts = [Prompt("0:0", 0, np.array(pictured.tokens, np.int32), "", images=pictured.placed)]
        prompts.append(Prompt("0:1", 1, np.array(samples.prompt("abc", []).tokens, np.int32), ""))
        self.completions = [
            [first, with_wide, second, none, self._words("fg")],
            [first, with_wide, self._words("gd?", placeholder=True)],
            [first, with_other, second],
            [first, none, second],
            [two, self._words("ab"), with_wide, self._words("c")],
            [two, self._words("ab"), none, self._words("dd")],
            [none, first, two, second],
            [none, second],
        ]
        made = [self._completion(number, parts) for number, parts in enumerate(self.completions)]
        groups = [Group(prompt, made[GROUP * n : GROUP * (n + 1)]) for n, prompt in enumerate(prompts)]
        self.rollouts = Rollouts(0, 0, groups)
        self.forest = forest_from_rollouts(self.rollouts)

    def _words(self, text: str, placeholder: bool = False) -> tuple[np.ndarray, list[PlacedImage] | None]:
        """A turn of the model, which may have written the placeholder token."""
        tokens = self.samples.tokenizer.convert_tokens_to_ids(list(text))
        return np.array([*tokens, *[self.samples.image_token] * placeholder, tokens[0]], np.int32), None

    def _answer(self, text: str, *pictures) -> tuple[np.ndarray, list[PlacedImage] | None]:
        images = self.samples.images
        digests = [images.digest(each.tobytes(), len(pictures)) for each in pictures]
        prepared = [images.prepare(each, d, len(pictures)) for each, d in zip(pictures, digests, strict=True)]
        self.prepared |= {image.digest: image for image in prepared}
        return images.expand(text.replace("*", images.placeholder), prepared)

    def _completion(self, number: int, parts: list[tuple[np.ndarray, list[PlacedImage] | None]]) -> Completion:
        starts = np.cumsum([0, *(tokens.size for tokens, _ in parts)]).tolist()
        placed = [
            image.moved(start) for (_, images), start in zip(parts, starts, strict=False) for image in images or []
        ]
        tokens = np.concatenate([tokens for tokens, _ in parts])
        mask = np.concatenate([np.full(tokens.size, images is None) for tokens, images in parts])
        nothing = np.zeros(tokens.size, np.float32)
        return Completion(str(number), tokens, nothing, nothing.astype(np.int32), "stop", "", mask, images=placed)

    def row_logprobs(self, policy: VisionPolicyModel, mode: str) -> tuple[Tensor, list[int]]:
        """Log-probabilities of all targets in the order of the forest, and how many images each row has."""
        longest = max(
            each.tokens.size + group.prompt.tokens.size for group in self.rollouts.groups for each in group.completions
        )
        batch = pack(self.forest, 1, 3 * longest, mode)
        found, counts = torch.zeros(len(batch.everything().columns.index)), []
        for row in batch.everything().by_rank[0]:
            prepared = [self.prepared[image.digest] for image in row.images]
            layout = policy.row_layout(row.lengths.tolist(), row.parents.tolist(), row.images, prepared)
            images = row_images(prepared or [self.samples.images.smallest()], row.images, "cpu")
            sources, targets = (torch.from_numpy(each.astype(np.int64)) for each in (row.sources, row.targets))
            tokens = torch.from_numpy(row.tokens.astype(np.int64))
            values, _ = policy(tokens, layout, sources, targets, images=images)
            found = found.index_copy(0, torch.from_numpy(row.index), values)
            counts.append(len(prepared))
        return found, counts

    def own_logprobs(self) -> Tensor:
        """The same by transformers' own forward of each conversation."""
        found = torch.zeros(len(self.forest.sequences))
        completions = [(group.prompt, each) for group in self.rollouts.groups for each in group.completions]
        for sequence, (prompt, completion) in enumerate(completions):
            values = self._own(prompt, completion)[torch.from_numpy(completion.mask)]
            found = found.index_copy(0, torch.from_numpy(np.flatnonzero(self.forest.sequences == sequence)), values)
        return found

    def _own(self, prompt: Prompt, completion: Completion) -> Tensor:
        """Log-probabilities of a completion's tokens. All images are given to one forward."""
        reference, after = self.samples.reference, prompt.tokens.size
        placed = [*prompt.images, *(image.moved(after) for image in completion.images)]
        shown = np.where(completion.mask & (completion.tokens == self.samples.image_token), self.samples.spare, 0)
        tokens = np.concatenate([prompt.tokens, np.where(shown > 0, shown, completion.tokens)]).astype(np.int64)
        types = torch.zeros(1, tokens.size, dtype=torch.int64)
        for image in placed:
            types[0, torch.from_numpy(image.places.astype(np.int64))] = 1
        accepted = inspect.signature(inspect.unwrap(reference.forward)).parameters
        inputs = {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in accepted}
        if placed:
            inputs |= row_images([self.prepared[image.digest] for image in placed], placed, "cpu").inputs
        counts = inputs.get("batch_num_images")  # one for each image; the model reads one for each turn
        if counts is not None:
            inputs["batch_num_images"] = turn_sizes(counts)
        logits = reference(input_ids=torch.from_numpy(tokens)[None], **inputs).logits[0, after - 1 : -1]
        written = torch.from_numpy(completion.tokens.astype(np.int64))
        return torch.log_softmax(logits, -1).gather(-1, written[:, None]).squeeze(-1)


def turn_sizes(counts: Tensor) -> Tensor:
    """The numbers of images in each turn, from that of the turn of each image."""
    sizes: list[int] = []
    while sum(sizes) < len(counts):
        sizes.append(int(counts[sum(sizes)]))
    return torch.tensor(sizes)


@pytest.mark.parametrize("mode", ["forest", "block", "single"])
def test_rows_with_images_in_answers_equal_separate_forwards(samples: VisionSamples, mode: str) -> None:
    policy, made = loaded(samples, fused=True), Conversations(samples)
    found, counts = made.row_logprobs(policy, mode)
    expected = made.own_logprobs()
    assert float((found - expected).detach().abs().max()) < 1e-5
    if mode == "forest":  # the prompt's, and one for each answer: conversations that begin alike share them
        assert sum(counts) == 1 + 2 + (2 + 1 + 2)
    policy.zero_grad(set_to_none=True)
    samples.reference.zero_grad(set_to_none=True)
    weights = torch.randn(len(found), generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    error, name = largest_difference(gradients(policy.lm, samples), gradients(samples.reference, samples))
    assert error < 1e-5, name


def test_another_picture_at_the_same_tokens_matters(samples: VisionSamples) -> None:
    """So that the comparison could fail: the third conversation differs from the first only in its picture."""
    policy, made = loaded(samples, fused=False), Conversations(samples)
    with torch.no_grad():
        found, _ = made.row_logprobs(policy, "forest")
    one, other = (found[torch.from_numpy(np.flatnonzero(made.forest.sequences == each))] for each in (0, 2))
    assert float((one[: len(other)] - other).abs()[-3:].max()) > 1e-5
