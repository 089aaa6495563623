"""How many images the samples of a dataset have, and how many tokens these take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class ImageUsage:
    """The images of samples, as far as their sizes tell. Two are added up, such as those of two datasets."""

    samples: int = 0
    """Number of samples, with those without images."""
    images: int = 0
    """Number of images of all samples."""
    tokens: int = 0
    """Number of the tokens that all images take."""
    most_images: int = 0
    """Number of images of the sample that has most."""
    most_tokens: int = 0
    """Number of tokens of all images of one sample, at most."""
    largest: int = 0
    """Number of tokens of the largest image."""
    largest_size: tuple[int, int] = (0, 0)
    """Width and height of that image in the data, in pixels."""

    def __add__(self, other: "ImageUsage") -> "ImageUsage":
        largest = max(self, other, key=lambda each: each.largest)
        return ImageUsage(
            self.samples + other.samples,
            self.images + other.images,
            self.tokens + other.tokens,
            max(self.most_images, other.most_images),
            max(self.most_tokens, other.most_tokens),
            largest.largest,
            largest.largest_size,
        )


class ImageTally:
    """Notes the images of each row of a dataset, so that the usage of any of its rows is known.

    Args:
        rows: number of rows.
    """

    def __init__(self, rows: int) -> None:
        self._images, self._tokens, self._largest = (np.zeros(rows, np.int32) for _ in range(3))
        self._sizes = np.zeros((rows, 2), np.int32)

    def note(self, row: int, images: Sequence[tuple[tuple[int, int], int]]) -> None:
        """Notes the images of a row that has some: width and height of each in pixels, and its tokens."""
        size, largest = max(images, key=lambda each: each[1])
        self._images[row], self._tokens[row] = len(images), sum(tokens for _, tokens in images)
        self._largest[row], self._sizes[row] = largest, size

    def usage(self, rows: np.ndarray) -> ImageUsage:
        """Returns the usage of rows, int64 `[rows]`."""
        if not rows.size:
            return ImageUsage()
        first = rows[np.argmax(self._largest[rows])]
        images, tokens = self._images[rows], self._tokens[rows]
        return ImageUsage(
            int(rows.size),
            int(images.sum(dtype=np.int64)),
            int(tokens.sum(dtype=np.int64)),
            int(images.max()),
            int(tokens.max()),
            int(self._largest[first]),
            (int(self._sizes[first, 0]), int(self._sizes[first, 1])),
        )


def usage_of_samples(samples: Iterable[Any]) -> ImageUsage:
    """Returns the usage of samples that were taken: prompts, documents or pairs."""
    taken = list(samples)
    tally = ImageTally(len(taken))
    for row, sample in enumerate(taken):
        if sample.images:
            tally.note(row, [(image.size, len(image.places)) for image in sample.images])
    return tally.usage(np.arange(len(taken)))
