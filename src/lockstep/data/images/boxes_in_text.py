"""Finds boxes in completions and answers: in JSON, in fenced blocks, as lists of four numbers in text.

Completions come from a model: whatever they contain, reading takes time that grows with their length only.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.config.terms.answer_terms import AnswerPart

BOX_KEYS = ("bbox_2d", "bbox", "box_2d", "box")
LARGEST_COUNT = 1000
"""Further boxes of a text are not read."""
_NUMBER = r"[+-]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})"
_FOUR = rf"\s{{0,9}}({_NUMBER})" + rf"\s{{0,9}},\s{{0,9}}({_NUMBER})" * 3 + r"\s{0,9}"
_BRACKETED = re.compile(rf"[\[(]{_FOUR}[\])]")
_BARE = re.compile(_FOUR)
FENCED_JSON = re.compile(r"```(?:json|JSON)?\s(.*?)```", re.DOTALL)
_NO_BOX = ("", "[]", "{}", "none")


@dataclass(frozen=True, slots=True)
class FoundBoxes:
    """Boxes in the order of the text."""

    corners: list[tuple[float, float, float, float]] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    """The `label` of each, in lower case; None without one."""
    from_json: bool = False
    """Whether the text, or a fenced block in it, is JSON."""

    def __len__(self) -> int:
        return len(self.corners)


def answer_part(text: str, part: AnswerPart) -> str | None:
    """The text in the last `<answer>...</answer>`, or the whole text; None if the former is wanted and missing."""
    if part == "whole":
        return text
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start >= 0:
        return text[start + len("<answer>") : end].strip()
    return text if part == "auto" else None


def find_boxes(text: str) -> FoundBoxes:
    """The boxes in a text: of its JSON if it has any (the whole text, its last fenced block, or what its outermost
    brackets enclose), else lists of four numbers in brackets, else the text itself if it is four numbers."""
    value = json_value(text)
    if value is not None:
        found = boxes_of(value)
        if len(found):
            return found
    corners = [_corners(match) for match, _ in zip(_BRACKETED.finditer(text), range(LARGEST_COUNT), strict=False)]
    if not corners and (bare := _BARE.fullmatch(text)) is not None:
        corners = [_corners(bare)]
    return FoundBoxes(corners, [None] * len(corners), value is not None)


def boxes_of(value: Any) -> FoundBoxes:
    """The boxes in a value that JSON or a dataset has: a box, an object with one, or nested lists of those."""
    found = list(zip(_walk(value), range(LARGEST_COUNT), strict=False))
    return FoundBoxes([corners for (corners, _), _ in found], [label for (_, label), _ in found], True)


def expected_boxes(answer: Any) -> FoundBoxes:
    """The boxes of an answer. Raises ValueError if it has none and does not say so (`[]`, `none`, an empty text)."""
    if isinstance(answer, str):
        text = answer.replace("<answer>", "").replace("</answer>", "").strip()
        found, empty = find_boxes(text), text.casefold() in _NO_BOX
    else:
        value = answer.tolist() if hasattr(answer, "tolist") else answer
        found, empty = boxes_of(value), isinstance(value, list | tuple | dict) and not value
    if not len(found) and not empty:
        shown = str(answer)[:80]
        raise ValueError(
            f"the answer {shown!r} has no box: expected [x1, y1, x2, y2], JSON with {', '.join(BOX_KEYS)}, or []"
        )
    return found


def json_value(text: str) -> Any:
    """The JSON in a text: the whole, the last fenced block, or from the first bracket to the last; None without any."""
    fenced = FENCED_JSON.findall(text)
    starts = [place for place in (text.find("["), text.find("{")) if place >= 0]
    end = max(text.rfind("]"), text.rfind("}")) + 1
    candidates = [text, *fenced[-1:], *([text[min(starts) : end]] if starts else [])]
    for candidate in candidates:
        try:
            value = parse_json(candidate, "the completion")
        except MalformedJson:
            continue
        if isinstance(value, list | dict):
            return value
    return None


def _walk(value: Any) -> Iterator[tuple[tuple[float, float, float, float], str | None]]:
    corners = _four_numbers(value)
    if corners is not None:
        yield corners, None
    elif isinstance(value, dict):
        own = next((corners for key in BOX_KEYS if (corners := _four_numbers(value.get(key))) is not None), None)
        if own is not None:
            label = value.get("label")
            yield own, None if label is None else str(label).strip().casefold()
        else:
            for each in value.values():
                yield from _walk(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _walk(each)


def _four_numbers(value: Any) -> tuple[float, float, float, float] | None:
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in value):
        return None
    x1, y1, x2, y2 = (_float(each) for each in value)
    return x1, y1, x2, y2


def _float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _corners(match: re.Match[str]) -> tuple[float, float, float, float]:
    return float(match[1]), float(match[2]), float(match[3]), float(match[4])
