"""Replaces measured tables in the pages of docs, between two markers."""

import re
from pathlib import Path


def into_page(page: Path, text: str, name: str = "measured") -> None:
    """Replace what is between the two markers of that name. ValueError if the page has no such markers."""
    begin, end = markers(name)
    old = page.read_text()
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(old):
        raise ValueError(f"{page} has no {begin} and {end}")
    page.write_text(pattern.sub(lambda _: f"{begin}\n\n{text}\n{end}", old))


def markers(name: str = "measured") -> tuple[str, str]:
    """The two markers around a table."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
