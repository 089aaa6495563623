"""docs/environment-lint.md is the page generated from the data files."""

import re
from pathlib import Path

from lockstep.doctor.environment.variable_reference import reference_page
from lockstep.doctor.environment.variable_table import load_variables

PAGE = Path(__file__).parents[4] / "docs" / "environment-lint.md"


def test_the_page_is_up_to_date() -> None:
    page = reference_page()
    assert PAGE.read_text() == page, (
        "run: python -m lockstep.doctor.environment.variable_reference > docs/environment-lint.md"
    )


def test_every_variable_and_launcher_is_on_it() -> None:
    text, table = reference_page(), load_variables()
    assert all(f"\n### `{name}`\n" in text for name in table.known)
    assert all(f"\n**`{name}`** forwards " in text for name in table.launchers)


def test_the_page_is_well_formed_markdown() -> None:
    lines = reference_page().splitlines()
    assert all(len(line) <= 120 for line in lines if "http" not in line and not line.startswith("|"))
    assert not [line for line in lines if re.match(r" +([-+*#]|\d+\.) ", line)], "a wrapped line that begins a list"
    assert max(line.count(" | ") for line in lines) == 1, "tables of short cells only"
