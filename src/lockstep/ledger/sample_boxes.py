"""The boxes of a sample, in pixels of the image's file, for people to look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.config.vision import BoxCoordinates
from lockstep.data.images.boxes import rescale_boxes
from lockstep.data.images.boxes_in_text import FoundBoxes, answer_part, expected_boxes, find_boxes
from lockstep.ledger.sqlite_index import CompletionSample

Corners = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class BoxReading:
    """How boxes are written, as the reward reads them."""

    coordinates: BoxCoordinates = "original"
    answer_coordinates: BoxCoordinates = "original"
    extract: Any = "auto"
    image: int = 0


@dataclass(frozen=True, slots=True)
class SampleBoxes:
    """Boxes in one image."""

    found: list[Corners] = field(default_factory=list)
    """Those of the completion."""
    expected: list[Corners] = field(default_factory=list)
    """Those of the answer."""


def box_reading(config: Mapping[str, Any]) -> BoxReading | None:
    """How a run's reward reads boxes: as its first term of kind `iou` does, or as VLM-R1 does for its functions; None
    if no term is about boxes."""
    terms = (config.get("reward") or {}).get("terms") or ()
    for term in terms:
        if term.get("kind") == "iou":
            names = BoxReading.__slots__
            return BoxReading(**{name: term[name] for name in names if name in term})
    vlm_r1 = any(term.get("kind") == "function" and term.get("signature") == "vlm_r1" for term in terms)
    return BoxReading(coordinates="resized") if vlm_r1 else None


def sample_boxes(sample: CompletionSample, reading: BoxReading, most: int) -> SampleBoxes:
    """The boxes of a sample in the image that the reward looks at; at most `most` of the completion and of the answer.
    What cannot be read or drawn is left out."""
    part = answer_part(sample.completion, reading.extract)
    found = FoundBoxes() if part is None else find_boxes(part)
    try:
        expected = expected_boxes(sample.answer)
    except ValueError:
        expected = FoundBoxes()
    image = sample.images[reading.image]
    return SampleBoxes(
        _in_file(found.corners[:most], reading.coordinates, image),
        _in_file(expected.corners[:most], reading.answer_coordinates, image),
    )


def _in_file(corners: Sequence[Corners], coordinates: BoxCoordinates, image: Mapping[str, Any]) -> list[Corners]:
    boxes = np.array(corners, np.float64).reshape(-1, 4)
    try:
        boxes = rescale_boxes(boxes, coordinates, "original", tuple(image["size"]), tuple(image["resized"]))
    except ValueError:  # the data has no such size
        return []
    drawn = np.isfinite(boxes).all(axis=1) & (boxes[:, 0] < boxes[:, 2]) & (boxes[:, 1] < boxes[:, 3])
    return [(x1, y1, x2, y2) for x1, y1, x2, y2 in boxes[drawn].tolist()]
