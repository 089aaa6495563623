"""The page of an answer is complete, self-contained and parses strictly."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

from lockstep.doctor.output.answer_page import answer_page
from lockstep.doctor.output.job_answer import answer_job
from tests.unit.doctor.job_logs import raised, steps, watchdog, write

_VOID = {"meta", "link", "br"}


class StrictParser(HTMLParser):
    """Fails at an end tag that does not close the innermost open element."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(folder: Path, ranks: int = 3) -> str:
    others = {f"rank_{rank}": [*steps(rank, 60), *watchdog(rank, 7)] for rank in range(ranks) if rank != 1}
    return answer_page(answer_job([write(folder, **others, rank_1=[*steps(1, 60), *raised(1, "KeyError: '<b>'")])]))


def test_the_page_has_verdict_culprit_evidence_and_a_line_per_rank(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    parser = StrictParser()
    parser.feed(page)
    assert not parser.open
    text = re.sub(r"\s+", " ", " ".join(parser.texts))
    for part in ("A rank raised an exception", "rank 1", "rank_1.log:64", "Fix", "Time per rank", "KeyError: '<b>'"):
        assert part in text, part
    assert page.count("<svg") == 3 and 'aria-label="rank 0: 20m00s, 60 steps, 1 error' in page
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(drawing)


def test_the_page_loads_nothing_and_follows_theme_and_width(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert "default-src 'none'" in page and not re.search(r"https?://\S+\.(?:js|css)|<script|@import", page)
    assert "prefers-color-scheme: dark" in page and "max-width: 44rem" in page and 'name="viewport"' in page
    assert 'tabindex="0"' in page and ":focus-visible" in page


def test_the_rows_of_many_ranks_are_folded_and_the_page_stays_small(tmp_path: Path) -> None:
    page = page_of(tmp_path, ranks=200)
    assert page.count("<details>") == 1 and page.count("<svg") == 200 and len(page) < 600_000
