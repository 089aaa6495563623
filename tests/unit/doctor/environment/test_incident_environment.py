"""Findings about the environments of an incident's processes."""

import json
from pathlib import Path

from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.doctor.environment.incident_environment import (
    FINDINGS_FILE,
    findings_sentence,
    incident_finding_lines,
    incident_findings,
    newest_incident,
    write_incident_findings,
)
from lockstep.ledger.run_incidents import environment_findings
from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind, VerdictLevel
from lockstep.watch.supervisor.incident import IncidentContents, write_incident


def an_incident(root: Path) -> Path:
    bundles = {
        "a": {"environment": {"NCCL_TIMEOUT": "3600", "NCCL_IB_HCA": "mlx5_0", "WANDB_API_KEY": "0123456789abcdef"}},
        "b": {"environment": {"NCCL_TIMEOUT": "3600", "NCCL_IB_DISABLE": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "[hidden]"}},
    }
    facts = {"versions": {"torch": "2.13.0"}}
    written = write_incident(
        root, IncidentContents(Verdict(VerdictKind.ABSENT, VerdictLevel.CONFIRMED), 0.0, 0, bundles, facts=facts)
    )
    assert written is not None
    return written


def test_findings_are_written_into_the_folder_and_shown_by_the_report(tmp_path: Path) -> None:
    folder = an_incident(tmp_path)
    found = write_incident_findings(folder)
    assert {each.id for each in found} == {"env-unread", "env-left-on", "env-differs"}
    assert [each.host for each in found if each.id == "env-unread"] == ["a, b"]
    assert "NCCL_IB_DISABLE" in findings_sentence(found) and f"2 more in {FINDINGS_FILE}" in findings_sentence(found)
    text = (folder / FINDINGS_FILE).read_text()
    assert len(json.loads(text)["environment"]) == len(found) and "0123456789abcdef" not in text
    odd = environment_findings(folder)
    assert len(odd) == len(found) and odd[0].startswith("NCCL_IB_DISABLE differs")
    assert incident_findings(folder) == found
    assert (
        newest_incident([str(tmp_path)]) == newest_incident([str(folder)]) == folder
        and newest_incident(["/nowhere", "-"]) is None
    )
    assert (
        next(line.split()[0] for line in incident_finding_lines(folder)) == "NCCL_IB_DISABLE"
        and len(incident_finding_lines(folder)) == 3
    )
    told = CliRunner().invoke(app, ["explain", str(tmp_path)])
    assert told.exit_code == 0 and "environment: nothing reads NCCL_TIMEOUT=3600" in " ".join(told.output.split())


def test_a_folder_without_an_environment_has_no_findings(tmp_path: Path) -> None:
    assert (
        write_incident_findings(tmp_path) == [] and findings_sentence([]) == "" and environment_findings(tmp_path) == []
    )
    for text in ("{", "[]", '{"a": 1}', '{"a": {"NCCL_DEBUG": null}}'):
        (tmp_path / "environment.json").write_text(text)
        write_incident_findings(tmp_path)
    for text in ("{", "[]", '{"environment": [1]}', '{"environment": [{"severity": "x", "seen": 1, "why": 2}]}'):
        (tmp_path / FINDINGS_FILE).write_text(text)
        assert environment_findings(tmp_path) == []
