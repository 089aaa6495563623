"""Compares rows that have an image with the model's own forward of each sequence, at load."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.data.images.image_processor import ImageProcessor
from lockstep.data.images.image_store import PreparedImage
from lockstep.data.samples import PlacedImage
from lockstep.models.vision.row_images import row_images
from lockstep.models.vision.vision_policy import VisionPolicyModel

_LENGTH = 12
"""Number of tokens of text around the image, and of each completion."""
_ENOUGH = 6
"""Number of tokens of two rows and three columns."""


def probe_image(processor: ImageProcessor) -> PreparedImage:
    """Returns an image of few tokens, but if possible of several rows and columns, so that its positions matter."""
    import PIL.Image

    sizes = [(32 * width, 32 * height) for width, height in ((1, 2), (2, 3), (3, 2), (4, 6), (6, 9))]
    features = {size: processor.expansion(size).features for size in sizes}
    size = min(sizes, key=lambda each: (features[each] < _ENOUGH, features[each]))
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return processor.prepare(PIL.Image.fromarray(noise), processor.digest(noise.tobytes()))


@dataclass(frozen=True, slots=True)
class ImageComparison:
    """Largest differences of log-probabilities from the model's own forward."""

    alone: float
    """Of a row with one sequence, with one image or two."""
    block: float
    """Of a row with two sequences, each with the image."""
    tree: float
    """Of a row with the image and its prompt once, for two completions: one of text, and one of text and another image,
    as an environment answers, before it."""


@torch.no_grad()
def compare_image(policy: VisionPolicyModel, image: PreparedImage) -> ImageComparison:
    """Compares a prompt with an image and two completions. With FSDP, every rank must call it.

    Raises:
        ValueError: the image has another number of features than its places.
    """
    probe = _Probe(policy, image)
    prompt, left, right = probe.prompt, probe.completion(0), probe.completion(1)
    expected = torch.cat([probe.logprobs([prompt, side], [-1, 0], True) for side in (left, right)])
    first, second = expected.chunk(2)
    alone = probe.logprobs([torch.cat([prompt, left])], [-1])
    block = probe.logprobs([torch.cat([prompt, left]), torch.cat([prompt, right])], [-1, -1])
    tree = probe.logprobs([prompt, left, right], [-1, 0, 0])
    # As an environment would answer: with the prompt once more.
    whole, answered = torch.cat([prompt, prompt, right]), torch.cat([prompt, right])
    again = probe.logprobs([whole], [-1], True, [2])
    turns = probe.logprobs([prompt, left, answered], [-1, 0, 0], prompts=[1, 0, 1])
    return ImageComparison(
        alone=max(_max_difference(alone, first), _max_difference(probe.logprobs([whole], [-1], prompts=[2]), again)),
        block=max(_max_difference(block[: len(first)], first), _max_difference(block[len(first) :], second)),
        tree=max(_max_difference(tree, expected), _max_difference(turns, torch.cat([first, again]))),
    )


class _Probe:
    """A random prompt with an image, and random completions, the same on every rank."""

    def __init__(self, policy: VisionPolicyModel, image: PreparedImage) -> None:
        self.policy, self.image = policy, image
        self.device = next(policy.parameters()).device
        generator = torch.Generator().manual_seed(0)
        vocabulary = policy.config.get_text_config().vocab_size
        text = torch.randint(0, vocabulary, (3, _LENGTH), generator=generator)
        # The model's own forward takes every placeholder for an image.
        self._text = torch.where(text == policy.image_token, (text + 1) % vocabulary, text)
        half = _LENGTH // 2
        placeholders = torch.full((image.features,), policy.image_token)
        self.prompt = torch.cat([self._text[0, :half], placeholders, self._text[0, half:]])
        self._places = np.arange(half, half + image.features, dtype=np.int32)

    def completion(self, index: int) -> Tensor:
        return self._text[1 + index]

    def logprobs(
        self, segments: list[Tensor], parents: list[int], own_forward: bool = False, prompts: Sequence[int] = ()
    ) -> Tensor:
        """Returns the log-probabilities of the completions' tokens.

        Args:
            prompts: how often the prompt is at the beginning of each segment; once for roots when absent.
        """
        lengths = [len(segment) for segment in segments]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        counts = prompts or [int(parent < 0) for parent in parents]
        images_at = [
            start + number * len(self.prompt) for start, n in zip(starts, counts, strict=True) for number in range(n)
        ]
        placed = [PlacedImage(self.image.digest, self._places).moved(start) for start in images_at]
        prepared = [self.image] * len(placed)
        layout = self.policy.row_layout(lengths, parents, placed, prepared)
        tokens = torch.cat(segments).to(self.device)
        pairs = torch.tensor(
            [pair for each in zip(starts, lengths, counts, strict=True) for pair in self._pairs(*each)]
        )
        sources, targets = pairs.to(self.device).unbind(1)
        images = row_images(prepared, placed, self.device)
        found, _ = self.policy(tokens, layout, sources, tokens[targets], images=images, own_forward=own_forward)
        assert isinstance(found, Tensor)
        return found

    def _pairs(self, start: int, length: int, prompts: int) -> list[tuple[int, int]]:
        """Returns (source, target) of each token of a segment after its prompts. The parent of a segment without any is
        the prompt at the beginning of the row."""
        found = [(place - 1, place) for place in range(start + prompts * len(self.prompt), start + length)]
        return found if prompts else [(len(self.prompt) - 1, start), *found[1:]]


def _max_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
