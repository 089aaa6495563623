"""What of an error's message is told in one line."""

import pytest

from lockstep.base.text import first_line, last_line


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
def test_the_point_of_a_message(text: str, first: str, last: str) -> None:
    """However long it is, and whether it says anything."""
    assert (first_line(RuntimeError(text)), last_line(RuntimeError(text))) == (first, last)
