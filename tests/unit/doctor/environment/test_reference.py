"""The page about variables is the one the data files make."""

from pathlib import Path

from lockstep.doctor.environment.reference import reference
from lockstep.doctor.environment.variables import load

PAGE = Path(__file__).parents[4] / "docs" / "environment-lint.md"


def test_the_page_is_up_to_date() -> None:
    made = reference()
    assert PAGE.read_text() == made, "run: python -m lockstep.doctor.environment.reference > docs/environment-lint.md"


def test_every_variable_and_launcher_is_on_it() -> None:
    text, table = reference(), load()
    assert all(f"| `{name}` |" in text for name in [*table.known, *table.launchers])
    assert all(row.count(" | ") in (1, 3, 4) for row in text.splitlines() if row.startswith("| "))
