"""The answer of `lockstep explain`: alternatives with what distinguishes them, issue texts, progress, options."""

import io
import json
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.doctor.knowledge.knowledge_base import load_knowledge
from lockstep.doctor.output.explanation import render_answer
from lockstep.doctor.output.job_answer import answer_job, other_causes
from lockstep.watch.diagnosis.verdict import Alternative, Verdict, VerdictKind, VerdictLevel
from tests.unit.doctor.job_logs import raised, steps, waited, write

MISMATCH = {
    "rank_0": [*steps(0, 10), *waited(0, "all_reduce", line=54, function="reduce_grads")],
    "rank_1": [*steps(1, 10), *waited(1, "barrier", line=12, function="save")],
    "rank_2": [*steps(2, 10), *waited(2, "all_reduce", line=54, function="reduce_grads")],
}


def test_each_alternative_says_what_would_distinguish_it(tmp_path: Path) -> None:
    answer = answer_job([write(tmp_path, **MISMATCH)])
    assert answer.others, "ranks at different places may have different data, or took different branches"
    found = answer.json()["distinguish"]
    assert [each["class"] for each in found] == [each["class"] for each in answer.json()["alternatives"]]
    assert all(each["collect"] and each["title"] for each in found)
    output = io.StringIO()
    Console(file=output, width=300).print(render_answer(answer))
    assert f"To tell: {found[0]['collect'][0]}" in output.getvalue()


def test_what_the_verdict_asks_for_anyway_distinguishes_nothing() -> None:
    rules = load_knowledge()
    about = rules.about["host_oom"]
    verdict = Verdict(
        VerdictKind.DEAD, VerdictLevel.NOTICE, cause="external_kill", collect=about.collect[:1],
        alternatives=(Alternative("host_oom", 0.3), Alternative("benign", 0.1), Alternative("in_flight", 0.1)),
    )  # fmt: skip
    first, healthy, wait = other_causes(verdict, rules)
    assert about.collect[0] not in first.distinguish and first.distinguish
    assert "further steps" in healthy.distinguish[0]
    assert wait.title == "", "a kind of wait has no knowledge file"


def test_a_pasted_issue_is_read_from_standard_input() -> None:
    log = "\n".join(raised(1, "IndexError: list index out of range"))
    issue = (
        f"### Describe the bug\nIt stops, maybe CUDA out of memory?\n### Logs\n```\n{log}\n```\nThanks for any help.\n"
    )
    done = CliRunner().invoke(app, ["explain", "-", "--json"], input=issue)
    found = json.loads(done.stdout)
    assert found["class"] == "rank_exception_masked" and found["culprits"][0]["rank"] == 1
    assert found["evidence"][0]["line"] == 8


def test_progress_counts_every_file(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    answer_job([write(tmp_path, **MISMATCH)], progress=lambda *each: seen.append(each))
    assert [each[:2] for each in seen] == [(1, 3), (2, 3), (3, 3)] and seen[-1][2] > 0


def test_the_options_for_sharing_are_checked(tmp_path: Path) -> None:
    logs = write(tmp_path / "logs", **MISMATCH)
    done = CliRunner().invoke(app, ["explain", logs, "--class", "uneven_data"])
    assert done.exit_code == 2 and "--share-case" in done.stderr
    bundle = str(tmp_path / "bundle.zip")
    assert "wrote" in CliRunner().invoke(app, ["explain", logs, "--redact", bundle]).stderr
    again = CliRunner().invoke(app, ["explain", logs, "--redact", bundle])
    assert again.exit_code == 2 and "exists" in again.stderr
    done = CliRunner().invoke(app, ["explain", "-", "--redact", str(tmp_path / "b")], input="[rank0]: KeyError: 'a'\n")
    assert done.exit_code == 2 and "save it to a file" in done.stderr


def test_empty_logs_are_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").touch()
    (tmp_path / "rank_1.log").touch()
    for arguments, given in ([str(tmp_path)], None), (["-"], ""):
        found = CliRunner().invoke(app, ["explain", *arguments], input=given)
        assert found.exit_code == 2 and "found no log with lines in it" in " ".join(found.output.split())
    (tmp_path / "rank_1.log").write_text("RuntimeError: CUDA error: device-side assert triggered\n")
    assert CliRunner().invoke(app, ["explain", str(tmp_path)]).exit_code == 0
