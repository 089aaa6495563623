"""Shortened lists, and single lines of error messages."""

import pytest

from lockstep.base.text import content_text, count_noun, first_line, last_line, summarize_list


@pytest.mark.parametrize(
    ("many", "text"),
    [(0, ""), (1, "r0"), (3, "r0, r1, r2"), (4, "r0, r1, r2 and 1 more"), (9, "r0, r1, r2 and 6 more")],
)
def test_the_first_items_are_listed_and_the_others_counted(many: int, text: str) -> None:
    assert summarize_list([f"r{rank}" for rank in range(many)], 3) == text
    assert summarize_list(range(many), 3, lambda rank: f"r{rank}") == text


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("no such place", "no such place", "no such place"),
        ("\n  no such place \n\nadvice\n", "no such place", "advice"),
        ("the actor died:\n\n  out of memory\nadvice", "the actor died: out of memory", "advice"),
        ("the actor died:", "the actor died:", "the actor died:"),
        (" \n", "RuntimeError", "RuntimeError"),
        ("", "RuntimeError", "RuntimeError"),
    ],
)
def test_first_and_last_line_of_an_error(text: str, first: str, last: str) -> None:
    assert (first_line(RuntimeError(text)), last_line(RuntimeError(text))) == (first, last)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "variable", "1 variable"),
        (0, "row", "0 rows"),
        (1204, "row", "1,204 rows"),
        (1.0, "CPU", "1 CPU"),
        (0.5, "GPU", "0.5 GPUs"),
        (2, "process", "2 processes"),
        (3, "entry", "3 entries"),
        (2, "key", "2 keys"),
        (1, "more file", "1 more file"),
    ],
)
def test_things_are_counted_in_singular_or_plural(count: float, noun: str, text: str) -> None:
    assert count_noun(count, noun) == text


def test_the_content_of_a_message_as_text() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": " where?"}, "here"]
    assert content_text(parts) == "<image> where?here"
    assert content_text("a") == "a" and content_text(None) == ""
    assert content_text([{"type": "video"}]) is None and content_text({"a": 1}) is None
