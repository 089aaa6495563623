"""The places in the pages of docs that measured tables go to."""

import re
from pathlib import Path


def into_page(page: Path, text: str, name: str = "measured") -> None:
    """Puts the text between the two markers of that name. ValueError where the page has none."""
    begin, end = markers(name)
    old = page.read_text()
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(old):
        raise ValueError(f"{page} has no {begin} and {end}")
    page.write_text(pattern.sub(lambda _: f"{begin}\n\n{text}\n{end}", old))


def markers(name: str = "measured") -> tuple[str, str]:
    """Where a table begins and ends."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
