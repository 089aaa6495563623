"""Boxes in completions and answers, in all the forms that models and datasets write, and in hostile ones."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.images.boxes_in_text import LARGEST_COUNT, boxes_of, expected_boxes, find_boxes

BOX = (10.0, 20.0, 30.0, 40.0)


@pytest.mark.parametrize(
    "text",
    [
        "[10, 20, 30, 40]",
        "10,20,30,40",
        " 10 , 20,30, 40\n",
        "(10, 20, 30, 40)",
        "The box is [10,20,30,40].",
        '{"bbox_2d": [10, 20, 30, 40]}',
        '[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]',
        '```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]\n```',
        'Here: {"answer": {"box": [10.0, 20.0, 30.0, 40.0]}} is it',
        '{"bbox": [10, 20, 30, 40]',  # cut off: the numbers can be read
        "[[10, 20, 30, 40]]",
    ],
)
def test_a_box_in_every_form(text: str) -> None:
    assert find_boxes(text).corners == [BOX]


def test_several_boxes_with_labels() -> None:
    text = '[{"bbox_2d": [1, 2, 3, 4], "label": " Cat"}, {"bbox": [5, 6, 7, 8]}, {"box_2d": [0, 0, 1, 1], "label": 7}]'
    found = find_boxes(text)
    assert found.corners == [(1, 2, 3, 4), (5, 6, 7, 8), (0, 0, 1, 1)]
    assert found.labels == ["cat", None, "7"] and found.from_json
    assert not find_boxes("[1,2,3,4] and [5,6,7,8]").from_json


@pytest.mark.parametrize(
    "text", ["", "no box", "[1, 2, 3]", "[1, 2, 3, 4, 5]", "1,2,3", "[true, 1, 2, 3]", '["1", 2, 3, 4]', "{}", "[]"]
)
def test_no_box(text: str) -> None:
    assert find_boxes(text).corners == []


@given(st.text(alphabet="[](){},.0123456789 `jsonNa\"':-+e\n\\", max_size=300))
def test_any_text_is_read(text: str) -> None:
    find_boxes(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[1," * 100_000,
        "[1, 2, 3, " * 50_000,
        "```json " * 50_000,
        "9" * 300_000,
        "[" + "9" * 300_000 + ", 1, 2, 3]",
        "[" + " " * 300_000,
        '{"a":' * 100_000,
        "[1,2,3,4]" * 50_000,
        "[" + "[1,2,3,4]," * 50_000 + "[1,2,3,4]]",
    ],
)
def test_hostile_texts_take_bounded_time_and_memory(text: str) -> None:
    begun = time.process_time()
    assert len(find_boxes(text)) <= LARGEST_COUNT
    assert time.process_time() - begun < 5


def test_numbers_that_no_float_holds() -> None:
    assert find_boxes('{"bbox": [1' + "0" * 400 + ", -1" + "0" * 400 + ", NaN, Infinity]}").corners[0][0] == float(
        "inf"
    )


@pytest.mark.parametrize(
    "answer",
    [
        [10, 20, 30, 40],
        [[10, 20, 30, 40]],
        {"bbox_2d": [10, 20, 30, 40]},
        "<answer> [10, 20, 30, 40] </answer>",
        json.dumps([{"bbox_2d": [10, 20, 30, 40], "label": "x"}]),
    ],
)
def test_answers(answer: object) -> None:
    assert expected_boxes(answer).corners == [BOX]


@pytest.mark.parametrize("answer", ["[]", "None", "", [], "<answer>[]</answer>"])
def test_answers_that_expect_no_box(answer: object) -> None:
    assert len(expected_boxes(answer)) == 0


@pytest.mark.parametrize("answer", ["a cat", 7, [1, 2, 3], "[1, 2]"])
def test_answers_without_boxes_are_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="has no box"):
        expected_boxes(answer)


def test_boxes_of_a_dataset_row() -> None:
    assert boxes_of({"objects": [{"box": [0, 0, 1, 1], "label": "A"}], "size": [4, 4]}).labels == ["a"]
