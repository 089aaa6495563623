"""Writes the transcripts of docs/explain.md: `python -m benchmarks.explain_transcripts`. A test compares them.

The jobs are those of `benchmarks/cases/development` and `benchmarks/transcripts`; `recovered_run` is the bundle that
`lockstep explain RUN --redact` wrote of a real run whose engine was killed.
"""

import re
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.docs_markers import into_page, markers
from lockstep.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explain.md"
WIDTH = "100"
_CASES = "benchmarks/cases/development/jobs"
TRANSCRIPTS = {
    "healthy": f"{_CASES}/healthy-trl-sft",
    "dead-rank": f"{_CASES}/missing-key",
    "mismatch": "benchmarks/transcripts/mismatch",
    "own-run": "benchmarks/transcripts/recovered_run",
    "issue": "- < benchmarks/transcripts/issue.md",
}
"""The arguments of `lockstep explain` by the name of the transcript."""


def transcript(name: str) -> str:
    """Runs the command and returns it with its output, as a fenced block."""
    path, _, source = TRANSCRIPTS[name].partition(" < ")
    argument = path if path == "-" else str(ROOT / path)
    given = (ROOT / source).read_text(encoding="utf-8") if source else None
    done = CliRunner(env={"COLUMNS": WIDTH}).invoke(app, ["explain", argument], input=given)
    if done.exit_code:
        raise RuntimeError(f"lockstep explain {TRANSCRIPTS[name]} failed: {done.output}")
    shown = re.sub(r"[ \t]+$", "", done.stdout.replace(str(ROOT) + "/", ""), flags=re.MULTILINE).strip()
    return f"```text\n$ lockstep explain {TRANSCRIPTS[name]}\n{shown}\n```\n"


def shown_on_page(name: str) -> str:
    """Returns the transcript that the page shows."""
    begin, end = markers(name)
    return PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()


if __name__ == "__main__":
    for each in TRANSCRIPTS:
        into_page(PAGE, transcript(each), each)
