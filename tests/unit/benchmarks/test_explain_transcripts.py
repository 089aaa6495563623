"""The transcripts of docs/explain.md are what the commands print: `python -m benchmarks.explain_transcripts`."""

import pytest

from benchmarks.explain_transcripts import TRANSCRIPTS, shown_on_page, transcript


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_page_shows_what_the_command_prints(name: str) -> None:
    assert shown_on_page(name) == transcript(name).strip()
