"""Names in sentences for people."""

import pytest

from lockstep.base.text import summarize_list


@pytest.mark.parametrize(
    ("many", "text"),
    [(0, ""), (1, "r0"), (3, "r0, r1, r2"), (4, "r0, r1, r2 and 1 more"), (9, "r0, r1, r2 and 6 more")],
)
def test_the_first_few_are_named_and_the_others_counted(many: int, text: str) -> None:
    assert summarize_list([f"r{rank}" for rank in range(many)], 3) == text
    assert summarize_list(range(many), 3, lambda rank: f"r{rank}") == text
