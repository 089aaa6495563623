"""Reward terms for answers about images: boxes, counts, short texts, and the format that they are given in."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.terms.reward_term import RewardTermSection
from lockstep.config.vision import BoxCoordinates

AnswerPart = Literal["auto", "answer", "whole"]
COCO_THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
Threshold = Annotated[float, Field(gt=0, le=1)]


class _AnswerTerm(RewardTermSection):
    """Terms that read a part of the completion."""

    extract: AnswerPart = "auto"
    """What is read: the text in the last `<answer>...</answer>` (`answer`; without one, the reward is 0), the `whole`
    completion, or the one where there is one, else the other (`auto`)."""


class IouReward(_AnswerTerm):
    """How well boxes in the completion cover the boxes of the answer: intersection over union.

    Boxes are `[x1, y1, x2, y2]`, in JSON (objects with `bbox_2d`, `bbox`, `box_2d` or `box`, or lists) or in text."""

    kind: Literal["iou"] = "iou"
    boxes: Literal["first", "matched", "map"] = "matched"
    """`first`: the IoU of the first box with the answer's first box. `matched`: boxes are matched one to one so that
    the sum of their IoU is largest, and it is divided by the number of boxes in the completion or in the answer,
    whichever is larger. `map`: COCO's average precision, a mean over `thresholds` and labels."""
    threshold: Threshold | None = None
    """A pair of boxes counts 1 where its IoU is at least this, else 0; the IoU itself when absent. Not for `map`."""
    thresholds: tuple[Threshold, ...] = Field(COCO_THRESHOLDS, min_length=1)
    """The IoUs from which a box is found, for `map`."""
    labels: bool = False
    """Match only boxes with the same `label`, not regarding upper and lower case."""
    coordinates: BoxCoordinates = "original"
    """What the completion's coordinates count: pixels of the image in the data (`original`), pixels of the image as the
    model gets it (`resized`: Qwen2.5-VL), or equal parts of width and height: thousandths (`0-1000`: Qwen2-VL,
    Qwen3-VL, InternVL), N parts (`0-N`), fractions (`0-1`)."""
    answer_coordinates: BoxCoordinates = "original"
    """What the answer's coordinates count. Where it is the same as `coordinates`, no image is needed."""
    image: int = Field(0, ge=0)
    """Which of the prompt's images the boxes are in, from 0."""

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if self.boxes == "map" and self.threshold is not None:
            raise ValueError("boxes: map has a list of thresholds: set thresholds instead of threshold")
        if self.boxes != "map" and "thresholds" in self.model_fields_set and self.thresholds != COCO_THRESHOLDS:
            raise ValueError(f"thresholds has no effect on boxes: {self.boxes}: set threshold, or boxes: map")
        return self


class CountReward(_AnswerTerm):
    """Whether the number of things is right."""

    kind: Literal["count"] = "count"
    of: Literal["number", "boxes"] = "number"
    """What is counted in the completion: `number` reads its last whole number, `boxes` counts its boxes. The answer is
    a number, or a list of boxes."""
    partial: bool = False
    """Give 1 - |difference| / answer, at least 0, instead of 0 for a wrong number."""


class AnswerFormatReward(RewardTermSection):
    """1 if the completion is `<think>...</think> <answer>...</answer>` with nothing before, between or after, each tag
    once, and the answer has the wanted content."""

    kind: Literal["answer_format"] = "answer_format"
    think: bool = True
    """Whether there must be `<think>...</think>` before the answer."""
    content: Literal["any", "number", "box", "json", "json_boxes"] = "any"
    """What the answer must have: `number` is one whole number, `box` at least one box, `json` only JSON (maybe in a
    fenced block), `json_boxes` JSON with at least one box."""


class TextAnswerReward(_AnswerTerm):
    """How well a short text agrees with the answer; a list as answer has several right texts."""

    kind: Literal["text_answer"] = "text_answer"
    compare: Literal["exact", "normalized", "list", "edit_distance", "ratio"] = "normalized"
    """`exact`: equal after stripping. `normalized`: equal without upper case, punctuation, the articles a, an and the,
    and repeated white space, as SQuAD compares. `list`: both are lists (JSON, or separated by commas); the reward is
    the F1 of their normalized items, in any order. `edit_distance`: 1 - Levenshtein distance / length of the longer
    text, as for text that is read from images; upper and lower case differ. `ratio`: VLM-R1's similarity, which is
    1 - insertions and deletions / length of both texts (`ratio` of the package Levenshtein), without upper case, line
    breaks and a full stop at the end. With several right texts, the most similar counts."""


AnswerTerm = IouReward | CountReward | AnswerFormatReward | TextAnswerReward
