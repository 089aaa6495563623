"""What is said of the environment of an incident's processes."""

import json
from pathlib import Path

from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.doctor.environment.incidents import FILE, findings_of, in_words, newest, note, note_of
from lockstep.report.incidents import odd_environment
from lockstep.watch.incident import Contents, write
from lockstep.watch.verdict import Kind, Level, Verdict


def an_incident(root: Path) -> Path:
    bundles = {
        "a": {"environment": {"NCCL_TIMEOUT": "3600", "NCCL_IB_HCA": "mlx5_0", "WANDB_API_KEY": "0123456789abcdef"}},
        "b": {"environment": {"NCCL_TIMEOUT": "3600", "NCCL_IB_DISABLE": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "[hidden]"}},
    }
    facts = {"versions": {"torch": "2.13.0"}}
    written = write(root, Contents(Verdict(Kind.ABSENT, Level.CONFIRMED), 0.0, 0, bundles, facts=facts))
    assert written is not None
    return written


def test_findings_are_written_into_the_folder_and_shown_by_the_report(tmp_path: Path) -> None:
    folder = an_incident(tmp_path)
    found = note(folder)
    assert {each.id for each in found} == {"env-unread", "env-left-on", "env-differs"}
    assert [each.host for each in found if each.id == "env-unread"] == ["a, b"]
    assert "NCCL_IB_DISABLE" in in_words(found) and f"2 more in {FILE}" in in_words(found)
    text = (folder / FILE).read_text()
    assert len(json.loads(text)["environment"]) == len(found) and "0123456789abcdef" not in text
    odd = odd_environment(folder)
    assert len(odd) == len(found) and odd[0].startswith("NCCL_IB_DISABLE differs")
    assert findings_of(folder) == found
    assert newest([str(tmp_path)]) == newest([str(folder)]) == folder and newest(["/nowhere", "-"]) is None
    assert next(line.split()[0] for line in note_of(folder)) == "NCCL_IB_DISABLE" and len(note_of(folder)) == 3
    told = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert told.exit_code == 0 and "environment: NCCL_TIMEOUT=3600 is read by nobody" in " ".join(told.output.split())


def test_a_folder_without_an_environment_disturbs_nobody(tmp_path: Path) -> None:
    assert note(tmp_path) == [] and in_words([]) == "" and odd_environment(tmp_path) == []
    for text in ("{", "[]", '{"a": 1}', '{"a": {"NCCL_DEBUG": null}}'):
        (tmp_path / "environment.json").write_text(text)
        note(tmp_path)
    for text in ("{", "[]", '{"environment": [1]}', '{"environment": [{"severity": "x", "seen": 1, "why": 2}]}'):
        (tmp_path / FILE).write_text(text)
        assert odd_environment(tmp_path) == []
