"""Writes the tables of the pages for users of other frameworks, from the tables of the converter:
`python -m lockstep.convert.migration_page docs`."""

import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lockstep.convert.inference_stages import split_stage
from lockstep.convert.option_mapping import MappedOption, mapping_table
from lockstep.convert.source_command import FRAMEWORKS

BEGIN, END = "<!-- converter's table: begin -->", "<!-- converter's table: end -->"
_FLAGS = ("openrlhf", "vlm-r1")
"""The frameworks of which the options are shown as flags."""


def migration_table(framework: str) -> str:
    """The table of a framework in Markdown: every option, what it becomes here, and a remark."""
    lines = [f"| {FRAMEWORKS[framework]} | here | remark |", "|---|---|---|"]
    table = mapping_table(framework)
    others = [row for name in table.shown if (row := table.row(name, "")) is not None]
    for _, group in groupby([*table.rows, *others], key=lambda row: (row in others, row.group)):
        entries = list(group)
        lines.append(f"| {_options(entries, framework)} | {_fields(entries[0])} | {_remark(entries[0])} |")
    return "\n".join(lines)


def _options(rows: Sequence[MappedOption], framework: str) -> str:
    dashes = "--" if framework in _FLAGS else ""
    shown = []
    for row in rows:
        newest, *older = (_option(name, dashes) for name in row.names)
        shown.append(f"{newest} ({', '.join(older)})" if older else newest)
    programs = f" of {', '.join(rows[0].programs)}" if rows[0].programs else ""
    return f"{', '.join(shown)}{programs}"


def _option(name: str, dashes: str) -> str:
    """A name as it is written, after the stage of the script that it belongs to."""
    stage, plain = split_stage(name)
    shown = f"`{dashes}{plain.removeprefix('actor_rollout_ref.')}`"
    return f"{stage} {shown}" if stage else shown


def _fields(row: MappedOption) -> str:
    if row.to:
        return ", ".join(f"`{each}`" for each in row.to)
    return "none needed" if row.unneeded else "none"


def _remark(row: MappedOption) -> str:
    return (row.unneeded or row.unsupported or row.remark).replace("|", "\\|")


def updated_page(text: str, framework: str) -> str:
    """The page with the table between its two markers replaced. ValueError if it has no markers."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{migration_table(framework)}\n\n{END}", text)


def update_pages(docs: Path) -> None:
    """Writes the tables of all pages in a folder."""
    for framework in FRAMEWORKS:
        page = docs / f"from-{framework}.md"
        page.write_text(updated_page(page.read_text(encoding="utf-8"), framework), encoding="utf-8")


if __name__ == "__main__":
    update_pages(Path(sys.argv[1]))
