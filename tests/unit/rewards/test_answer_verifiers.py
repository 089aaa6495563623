"""The built-in rewards of answers about images, as terms of a config."""

import random
import time
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from reward_samples import batch, prompt

from lockstep.config.reward import RewardTerm
from lockstep.data.samples import PlacedImage
from lockstep.rewards.answer_verifiers import common_subsequence, edit_distance, normalized
from lockstep.rewards.reward_terms import build_term, needs_answers, term_names
from lockstep.rewards.reward_values import BadReward

THOUGHT = "<think>It is [0, 0, 1, 1] or so.</think> <answer>{}</answer>"
IMAGE = PlacedImage("ab" * 16, np.arange(4, dtype=np.int32), "a.png", (200, 100), (100, 80))


def score(answer: Any, *texts: str, images: list[PlacedImage] | None = None, **fields: Any) -> list[float | None]:
    config = TypeAdapter(RewardTerm).validate_python(fields)
    assert needs_answers([config]) == (fields["kind"] != "answer_format")
    term = build_term(config, term_names([config])[0])
    row = prompt(answer=answer)
    row.images = images or []
    return term.score(batch([row], [list(texts)]), lambda count: None).values


def test_iou_of_one_box() -> None:
    texts = ["[0, 0, 10, 10]", "[0, 0, 10, 5]", "[5, 5, 15, 15]", "[20, 20, 30, 30]", "none", "[10, 10, 0, 0]"]
    expected = [1.0, 0.5, 25 / 175, 0.0, 0.0, 0.0]
    assert score([0, 0, 10, 10], *texts, kind="iou") == pytest.approx(expected)
    assert score([0, 0, 10, 10], *texts, kind="iou", threshold=0.5) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_only_the_answer_is_read() -> None:
    box = "[0, 0, 10, 10]"
    thought = THOUGHT.format(box)
    assert score(box, thought, kind="iou") == [1.0]
    assert score(box, thought, kind="iou", extract="whole") == [0.5]  # the box of the thought is one too many
    assert score(box, thought, kind="iou", extract="whole", boxes="first")[0] == pytest.approx(0.01)
    assert score(box, box, f"<answer>{box}", kind="iou", extract="answer") == [0.0, 0.0]
    assert score(box, f"<answer>no</answer><answer>{box}</answer>", kind="iou", extract="answer") == [1.0]


def test_several_boxes_are_matched_in_any_order() -> None:
    answer = [[0, 0, 10, 10], [20, 0, 30, 10]]
    texts = [
        "[[20, 0, 30, 10], [0, 0, 10, 10]]",
        "[0, 0, 10, 10]",
        "[0,0,10,10] [0,0,10,10] [0,0,10,10] [20,0,30,5]",
    ]
    assert score(answer, *texts, kind="iou") == pytest.approx([1.0, 0.5, 1.5 / 4])
    assert score(answer, *texts, kind="iou", threshold=0.6) == pytest.approx([1.0, 0.5, 0.25])
    assert score(answer, *texts, kind="iou", boxes="first") == pytest.approx([0.0, 1.0, 1.0])


def test_thresholds_are_matched_for_their_own_sake() -> None:
    """The largest sum of IoU is 0.9 + 0.51; the other pairs are 0.61 + 0.67, and both reach 0.6."""
    answer, boxes = [[0, 0, 1, 10], [0, 2, 1, 8]], "[[0, 0, 1, 9], [0, 3.9, 1, 10]]"
    assert score(answer, boxes, kind="iou") == pytest.approx([(0.9 + 4.1 / 8) / 2])
    assert score(answer, boxes, kind="iou", threshold=0.6) == [1.0]


def test_map_over_thresholds_and_labels() -> None:
    answer = '[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox_2d": [20, 0, 30, 10], "label": "dog"}]'
    swapped = answer.replace("cat", "x").replace("dog", "Cat").replace('"x"', '"dog"')
    assert score(answer, answer, swapped, kind="iou", boxes="map") == [1.0, 1.0]
    assert score(answer, answer, swapped, kind="iou", boxes="map", labels=True) == [1.0, 0.0]
    assert score(answer, answer, swapped, kind="iou", labels=True) == [1.0, 0.0]
    loose = "[0, 0, 10, 7]"  # IoU 0.7: one of two boxes, at 5 of 10 thresholds
    assert score(answer, loose, kind="iou", boxes="map") == pytest.approx([51 / 101 * 5 / 10])
    assert score(answer, loose, kind="iou", boxes="map", thresholds=[0.5]) == pytest.approx([51 / 101])


@pytest.mark.parametrize(
    ("coordinates", "text"),
    [
        ("original", "[100, 50, 200, 100]"),
        ("resized", "[50, 40, 100, 80]"),
        ("0-1000", "[500, 500, 1000, 1000]"),
        ("0-1", "[0.5, 0.5, 1, 1]"),
    ],
)
def test_coordinates_are_converted(coordinates: str, text: str) -> None:
    assert score([100, 50, 200, 100], text, kind="iou", coordinates=coordinates, images=[IMAGE]) == [1.0]
    both = {"coordinates": coordinates, "answer_coordinates": coordinates}
    assert score(text, text, kind="iou", **both) == [1.0]  # nothing to convert: no image is needed


def test_coordinates_need_their_image() -> None:
    with pytest.raises(BadReward, match="need image 1 of the prompt, which has 1"):
        score([0, 0, 1, 1], "[0, 0, 1, 1]", kind="iou", coordinates="0-1", image=1, images=[IMAGE])


def test_an_answer_without_boxes() -> None:
    assert score([], "none", "[]", "[0, 0, 1, 1]", kind="iou") == [1.0, 1.0, 0.0]
    with pytest.raises(BadReward, match="'cat' has no box"):
        score("cat", "[0, 0, 1, 1]", kind="iou")
    with pytest.raises(BadReward, match="has no area"):
        score([[0, 0, 5, 5], [0, 4, 5, 4]], "[0, 0, 1, 1]", kind="iou")


def test_thousands_of_boxes_take_bounded_time() -> None:
    many = "[0,0,10,10]" * 20_000
    begun = time.process_time()
    answer = [[i, 0, i + 2, 2] for i in range(1000)]
    assert score(answer, many, "NaN", kind="iou")[0] == pytest.approx(0, abs=1e-3)
    assert score([0, 0, 10, 10], many, kind="iou") == [1 / 1000]  # 1000 are read, and all but one are too many
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"boxes": "map", "threshold": 0.5}, "set thresholds instead"),
        ({"thresholds": [0.5]}, "has no effect on boxes: matched"),
        ({"threshold": 1.5}, "less than or equal to 1"),
        ({"coordinates": "pixels"}, "original"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        TypeAdapter(RewardTerm).validate_python({"kind": "iou", **fields})


def test_counts() -> None:
    texts = ["3", "There are 3 cats.", "<answer>3</answer> 4", "2", "3.5", "1 or 1,003", "none", "three"]
    assert score(3, *texts, kind="count") == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert score("4", "3", "8", "9", "x", kind="count", partial=True) == [0.75, 0.0, 0.0, 0.0]
    boxes = [[0, 0, 1, 1], [1, 1, 2, 2]]
    assert score(boxes, "[0,0,1,1] [5,5,6,6]", "[0,0,1,1]", "2", kind="count", of="boxes") == [1.0, 0.0, 0.0]
    assert score(boxes, "2", kind="count") == [1.0]
    with pytest.raises(BadReward, match=r"2\.5 is no whole number"):
        score(2.5, "2", kind="count")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think><answer>1</answer>", True),
        ("\n<think>a\nb</think>\n <answer>\n1\n</answer>\n", True),
        ("<think></think><answer></answer>", True),
        ("x<think>a</think><answer>1</answer>", False),
        ("<think>a</think> so <answer>1</answer>", False),
        ("<think>a</think><answer>1</answer> done", False),
        ("<think>a<answer>1</answer></think>", False),
        ("<think>a</think><think>b</think><answer>1</answer>", False),
        ("<answer>1</answer>", False),
        ("", False),
    ],
)
def test_the_format(text: str, right: bool) -> None:
    assert score(None, text, kind="answer_format") == [float(right)]


def test_the_format_of_the_answer() -> None:
    answers = ["12", "[1, 2, 3, 4]", '{"a": 1}', '```json\n[{"bbox_2d": [1, 2, 3, 4]}]\n```', "box [1, 2, 3, 4]", "{"]
    texts = [THOUGHT.format(each) for each in answers]
    expected = {
        "any": [1, 1, 1, 1, 1, 1],
        "number": [1, 0, 0, 0, 0, 0],
        "box": [0, 1, 0, 1, 1, 0],
        "json": [1, 1, 1, 1, 0, 0],
        "json_boxes": [0, 1, 0, 1, 0, 0],
    }
    assert {name: score(None, *texts, kind="answer_format", content=name) for name in expected} == expected
    assert score(None, "<answer>3</answer>", THOUGHT.format(3), kind="answer_format", think=False) == [1.0, 0.0]


def test_texts() -> None:
    assert score("A red car", "a Red  car.", "red car", kind="text_answer") == [1.0, 1.0]
    assert score("A red car", "A red car ", "a red car", kind="text_answer", compare="exact") == [1.0, 0.0]
    assert score(["two", "2"], THOUGHT.format("Two!"), "3", kind="text_answer") == [1.0, 0.0]
    assert score("<answer> yes </answer>", "Yes", kind="text_answer") == [1.0]
    assert normalized("The  cat\u2019s, an ＡＢＣ") == "cat\u2019s abc"


def table_distance(text: str, other: str, substitution: int) -> int:
    """The cost of turning a text into the other, by the table of Wagner and Fischer."""
    row = list(range(len(other) + 1))
    for i, mine in enumerate(text, 1):
        above, row = row, [i]
        for j, theirs in enumerate(other, 1):
            change = above[j - 1] + substitution * (mine != theirs)
            row.append(min(above[j] + 1, row[j - 1] + 1, change))
    return row[-1]


def test_edit_distances_are_those_of_the_table() -> None:
    draw = random.Random(5)
    texts = ["", *("".join(draw.choices("abc ", k=draw.randrange(100))) for _ in range(20))]
    for text in texts:
        for other in texts:
            assert edit_distance(text, other) == table_distance(text, other, 1)
            indels = len(text) + len(other) - 2 * common_subsequence(text, other)
            assert indels == table_distance(text, other, 2)


def test_texts_by_edit_distance() -> None:
    edits = {"kind": "text_answer", "compare": "edit_distance"}
    assert score("kitten", "sitting", "kitten ", "Kitten", "", **edits) == pytest.approx([4 / 7, 1, 5 / 6, 0])
    assert score(["abc", "xy"], "<answer>xz</answer>", **edits) == [0.5]
    assert score("", "", **edits) == [1.0] and score([], "a", **edits) == [0.0]
    ratio = {"kind": "text_answer", "compare": "ratio"}
    # Levenshtein.ratio("kitten", "sitting") and ("new york", "york") of the package that VLM-R1 uses
    assert score("<answer> Kitten. </answer>", "sitting", "kit\nten", **ratio) == pytest.approx([8 / 13, 12 / 13])
    assert score("New York", "york", "NEW\nYORK.", **ratio) == pytest.approx([2 / 3, 1])


def test_long_texts_are_compared_in_time() -> None:
    text = "a line of a page that was read from an image " * 100
    begun = time.process_time()
    assert score(text, text[:-40] + "x", kind="text_answer", compare="edit_distance")[0] > 0.98
    assert time.process_time() - begun < 5


def test_lists() -> None:
    answer = '["cat", "dog"]'
    texts = ["dog, Cat", '["cat"]', "cat, cat, dog", "bird", ""]
    assert score(answer, *texts, kind="text_answer", compare="list") == pytest.approx([1.0, 2 / 3, 0.8, 0.0, 0.0])
    assert score([], "", kind="text_answer", compare="list") == [1.0]
