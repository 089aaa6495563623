"""Verifiers of answers about images: IoU of boxes, counts, short texts, and the format of the completion.

All are pure functions of a completion and its answer, and take time linear in the length of the text.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.config.terms.answer_terms import AnswerFormatReward, CountReward, IouReward, TextAnswerReward
from lockstep.data.images.boxes import rescale_boxes
from lockstep.data.images.boxes_in_text import (
    FENCED_JSON,
    FoundBoxes,
    answer_part,
    boxes_of,
    expected_boxes,
    find_boxes,
    json_value,
)
from lockstep.data.samples import PlacedImage
from lockstep.rewards.box_overlap import as_boxes, average_precision, iou_matrix, largest_matching

LARGEST_MATCH = 100
"""Boxes of a completion that are matched; further ones count as found nowhere, and lower the reward."""
_LARGEST_COUNT = 10**18
_WHOLE_NUMBER = re.compile(r"(?<![\d.])[+-]?\d{1,18}(?:,\d{3})*(?!\.?\d)")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def box_iou(text: str, answer: Any, term: IouReward, images: Sequence[PlacedImage] = ()) -> float:
    """The reward of the boxes in a completion, from 0 to 1.

    Raises:
        ValueError: the answer has no boxes, or the boxes' coordinates need an image that the prompt does not have.
    """
    expected = expected_boxes(answer)
    part = answer_part(text, term.extract)
    found = FoundBoxes() if part is None else find_boxes(part)
    if not len(expected):
        return float(part is not None and not len(found))
    if not len(found):
        return 0.0
    first, second = _same_coordinates(found, expected, term, images)
    if term.boxes == "first":
        return float(_counted(iou_matrix(first[:1], second[:1]), term.threshold)[0, 0])
    overlaps = iou_matrix(first[:LARGEST_MATCH], second)
    if term.labels:
        same = np.array([[a == b for b in expected.labels] for a in found.labels[:LARGEST_MATCH]])
        overlaps = np.where(same, overlaps, 0.0)
    if term.boxes == "map":
        return _mean_precision(overlaps, found, expected, term)
    gains = _counted(overlaps, term.threshold)
    return largest_matching(gains) / max(len(found), len(expected))


def _counted(overlaps: np.ndarray, threshold: float | None) -> np.ndarray:
    return overlaps if threshold is None else (overlaps >= threshold).astype(np.float64)


def _mean_precision(overlaps: np.ndarray, found: FoundBoxes, expected: FoundBoxes, term: IouReward) -> float:
    """The mean of the average precisions over thresholds, and over the labels of the answer if they count."""
    columns = {label: [i for i, each in enumerate(expected.labels) if each == label] for label in expected.labels}
    groups = list(columns.items()) if term.labels else [(None, list(range(len(expected))))]
    values = []
    for label, places in groups:
        own = [row for row in range(len(overlaps)) if not term.labels or found.labels[row] == label]
        part = overlaps[np.ix_(own, places)]
        values += [average_precision(part, threshold) for threshold in term.thresholds]
    return float(np.mean(values))


def _same_coordinates(
    found: FoundBoxes, expected: FoundBoxes, term: IouReward, images: Sequence[PlacedImage]
) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 `[boxes, 4]` in the same coordinates. Raises ValueError if the image that they refer to is
    missing, or the answer's boxes are none."""
    first, second = as_boxes(found.corners), as_boxes(expected.corners)
    if not (second[:, 2] > second[:, 0]).all():
        bad = expected.corners[int(np.argmin(second[:, 2] > second[:, 0]))]
        raise ValueError(f"the answer's box {list(bad)} has no area: expected x1 < x2 and y1 < y2")
    if term.coordinates != term.answer_coordinates:
        if term.image >= len(images):
            raise ValueError(
                f"boxes in {term.coordinates} coordinates need image {term.image} of the prompt, which has "
                f"{len(images)}: set coordinates and answer_coordinates to the same value, or image to another number"
            )
        image = images[term.image]
        first = rescale_boxes(first, term.coordinates, term.answer_coordinates, image.size, image.resized)
    return first, second


def count_reward(text: str, answer: Any, term: CountReward) -> float:
    """The reward of a number, from 0 to 1. Raises ValueError if the answer is no count."""
    expected, part = _expected_count(answer), answer_part(text, term.extract)
    if part is None:
        return 0.0
    given = len(find_boxes(part)) if term.of == "boxes" else _last_number(part)
    if given == expected:
        return 1.0
    if given is None or not term.partial:
        return 0.0
    return max(0.0, 1.0 - abs(given - expected) / max(expected, 1))


def _expected_count(answer: Any) -> int:
    if isinstance(answer, int | float) and not isinstance(answer, bool) and 0 <= answer < _LARGEST_COUNT:
        if answer != int(answer):
            raise ValueError(f"the answer {answer} is no whole number: kind count compares counts")
        return int(answer)
    if isinstance(answer, str) and (number := _WHOLE_NUMBER.fullmatch(_untagged(answer))) is not None:
        return int(number[0].replace(",", ""))
    return len(expected_boxes(answer))


def _last_number(text: str) -> int | None:
    numbers = _WHOLE_NUMBER.findall(text)
    return int(numbers[-1].replace(",", "")) if numbers else None


def format_reward(text: str, term: AnswerFormatReward) -> float:
    """1 if a completion has the wanted form, else 0."""
    tags = ("<think>", "</think>", "<answer>", "</answer>") if term.think else ("<answer>", "</answer>")
    given = text.strip()
    if not (given.startswith(tags[0]) and given.endswith(tags[-1])) or any(given.count(tag) != 1 for tag in tags):
        return 0.0
    places = [given.index(tag) for tag in tags]
    if places != sorted(places) or (term.think and given[places[1] + len(tags[1]) : places[2]].strip()):
        return 0.0
    return float(_has_content(given[places[-2] + len("<answer>") : places[-1]].strip(), term.content))


def _has_content(answer: str, content: str) -> bool:
    match content:
        case "number":
            return _WHOLE_NUMBER.fullmatch(answer) is not None
        case "box":
            return len(find_boxes(answer)) > 0
        case "json" | "json_boxes":
            fenced = FENCED_JSON.fullmatch(answer)
            try:
                value = parse_json(fenced[1] if fenced else answer, "the completion")
            except MalformedJson:
                return False
            return content == "json" or len(boxes_of(value)) > 0
    return True


def text_reward(text: str, answer: Any, term: TextAnswerReward) -> float:
    """How well a short text agrees with the answer, from 0 to 1."""
    part = answer_part(text, term.extract)
    if part is None:
        return 0.0
    if term.compare == "list":
        return _list_f1(_items(part), _items(answer))
    right = [str(each) for each in answer] if isinstance(answer, list | tuple) else [str(answer)]
    if term.compare == "edit_distance":
        return max((_edit_similarity(part.strip(), _untagged(each)) for each in right), default=0.0)
    if term.compare == "ratio":
        return max((_ratio(_on_one_line(part), _on_one_line(_untagged(each))) for each in right), default=0.0)
    form = str.strip if term.compare == "exact" else normalized
    return float(form(part) in {form(_untagged(each)) for each in right})


def normalized(text: str) -> str:
    """The text in lower case, without punctuation, articles and repeated white space: SQuAD's comparison (Rajpurkar et
    al., arXiv 1606.05250), after Unicode's compatibility form."""
    plain = unicodedata.normalize("NFKC", text).casefold().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _items(value: Any) -> list[str]:
    """Normalized items of a list, of JSON with one, or of a text with commas."""
    if isinstance(value, str):
        found = json_value(_untagged(value))
        value = found if isinstance(found, list) else _untagged(value).split(",")
    listed = value if isinstance(value, list | tuple) else [value]
    return [item for item in (normalized(str(each)) for each in listed) if item]


def _list_f1(given: list[str], expected: list[str]) -> float:
    common = sum((Counter(given) & Counter(expected)).values())
    if not given and not expected:
        return 1.0
    return 2 * common / (len(given) + len(expected))


def _on_one_line(text: str) -> str:
    """What VLM-R1 compares of a text: in lower case, without line breaks and a full stop at the end."""
    return " ".join(text.split()).rstrip(".").lower()


def _edit_similarity(text: str, other: str) -> float:
    """1 - Levenshtein distance / length of the longer text; 1 for two empty texts."""
    return 1 - edit_distance(text, other) / max(len(text), len(other), 1)


def _ratio(text: str, other: str) -> float:
    """1 - (insertions and deletions that turn a text into the other) / length of both; 1 for two empty texts."""
    total = len(text) + len(other)
    return 2 * common_subsequence(text, other) / total if total else 1.0


def edit_distance(text: str, other: str) -> int:
    """Returns the Levenshtein distance of two texts: the fewest insertions, deletions and substitutions of characters.

    A column of the table of distances is two integers, a bit for each character of `text`: where it is one more than
    above, and where one less (Myers 1999, https://doi.org/10.1145/316542.316550, as in Hyyroe 2003).
    """
    if not text:
        return len(other)
    places, every, last = _places(text), (1 << len(text)) - 1, 1 << (len(text) - 1)
    more, less, distance = every, 0, len(text)
    for character in other:
        equal = places.get(character, 0)
        diagonal = (((equal & more) + more) ^ more) | equal | less
        right_more, right_less = (less | ~(diagonal | more)) & every, more & diagonal
        distance += bool(right_more & last) - bool(right_less & last)
        right_more, right_less = (right_more << 1) | 1, right_less << 1
        more, less = (right_less | ~(diagonal | right_more)) & every, right_more & diagonal & every
    return distance


def common_subsequence(text: str, other: str) -> int:
    """Returns the length of the longest common subsequence of two texts, with a bit for each character of `text`
    (Crochemore et al. 2001, https://doi.org/10.1016/S0020-0190(00)00214-X)."""
    places, every = _places(text), (1 << len(text)) - 1
    unmatched = every
    for character in other:
        found = unmatched & places.get(character, 0)
        unmatched = ((unmatched + found) | (unmatched - found)) & every
    return len(text) - unmatched.bit_count()


def _places(text: str) -> dict[str, int]:
    """A bit for each place of each character."""
    found: dict[str, int] = {}
    for place, character in enumerate(text):
        found[character] = found.get(character, 0) | (1 << place)
    return found


def _untagged(answer: str) -> str:
    """An answer without the tags that VLM-R1 puts around it."""
    return answer.strip().removeprefix("<answer>").removesuffix("</answer>").strip()
