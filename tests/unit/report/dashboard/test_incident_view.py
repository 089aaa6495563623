"""Incidents with their evidence, and only the files that are really in their folders."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from dashboard_helpers import ask, make_run, run_id, server_of

from lockstep.ledger import Ledger
from lockstep.report.dashboard.dashboard_server import DashboardServer

NAME = "20261128-000000-absent-policy-1"
SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123"


def report(ledger: Ledger, change: str, at: float, **fields: Any) -> None:
    facts = {
        "number": 1, "change": change, "level": "confirmed", "verdict": "absent", "cause": "unknown",
        "who": ["policy-1"], "text": "policy-1 is stopped", "since_s": 5.0, "said_at": at, "waited_s": 4.0,
        "incident": f"/elsewhere/incidents/{NAME}", "done": "",
    }  # fmt: skip
    ledger.record_event("stall", **{**facts, **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run", 3)
    incident = folder / "incidents" / NAME
    (incident / "stacks").mkdir(parents=True)
    verdict = {
        "kind": "absent", "level": "confirmed", "explanation": f"policy-1 is stopped; {SECRET}", "fix": "kill -CONT 1",
        "evidence": [{"source": "procfs", "text": "state T"}], "culprits": [],
    }  # fmt: skip
    (incident / "verdict.json").write_text(json.dumps(verdict))
    (incident / "story.txt").write_text(f"<script>x</script> token {SECRET}")
    (incident / "stacks" / "policy-1.txt").write_text("x" * (600 << 10))
    return folder


@pytest.fixture
def server(folder: Path) -> DashboardServer:
    with Ledger.resume(folder) as ledger:
        report(ledger, "told", 1000.0)
        report(ledger, "withdrawn", 1020.0)
    incident, outside = folder / "incidents" / NAME, folder.parent / "outside.txt"
    outside.write_text("not of this incident")
    (incident / "link.txt").symlink_to(outside)
    (incident / "folder").symlink_to(outside.parent)
    os.mkfifo(incident / "pipe")
    return server_of(folder)


def incident(server: DashboardServer) -> Any:
    (found,) = ask(server, f"/api/runs/{run_id(server)}/incidents").json()["incidents"]
    return found


def test_an_incident_has_its_evidence_without_secrets(server: DashboardServer) -> None:
    found = incident(server)
    assert (found["kind"], found["level"], found["culprits"]) == ("absent", "confirmed", ["policy-1"])
    assert found["text"] == "policy-1 is stopped; [hidden]" and found["fix"] == "kill -CONT 1"
    assert found["evidence"] == ["state T"] and found["time"] == 996.0 and found["ended"] == 1020.0
    assert [each["what"] for each in found["moments"]] == ["confirmed", "over"]
    assert found["outcome"] == "passed" and found["recovery"] == "passed after 24s"
    assert found["files"] == ["stacks/policy-1.txt", "story.txt", "verdict.json"], "no link, and nothing behind one"


def test_a_file_is_shown_as_text_without_secrets(server: DashboardServer) -> None:
    path = f"/api/runs/{run_id(server)}/incidents/{incident(server)['id']}/file?name="
    assert ask(server, path + "story.txt").json() == {
        "name": "story.txt", "text": "<script>x</script> token [hidden]", "cut": 0
    }  # fmt: skip
    stack = ask(server, path + "stacks/policy-1.txt")
    assert stack.json()["cut"] == 88 << 10 and stack.headers["content-type"] == "application/json"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["devices.json", "run-id", "lock", "metrics.jsonl", "verdict", "findings", "capture"])
def test_a_pipe_in_the_place_of_a_file_blocks_nothing(server: DashboardServer, folder: Path, file: str) -> None:
    inside = {"verdict": "verdict.json", "findings": "findings.json", "capture": "capture.jsonl"}
    path = folder / "incidents" / NAME / inside[file] if file in inside else folder / file
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    name = run_id(server)
    views = ("waits", "hosts", "stages", "incidents", "samples", "config", "metrics")
    assert [each.status_code for each in ask(server, [f"/api/runs/{name}/{view}" for view in views])] == [200] * 7


@pytest.mark.parametrize(
    "name",
    [
        "link.txt",
        "folder/outside.txt",
        "pipe",
        "../../../outside.txt",
        "/etc/passwd",
        "",
        "stacks",
        "stacks/../story.txt",
    ],
)
def test_only_listed_files_are_read(server: DashboardServer, name: str) -> None:
    path = f"/api/runs/{run_id(server)}/incidents/{incident(server)['id']}/file"
    found = ask(server, f"{path}?name={name}")
    assert found.status_code == 404 and found.json()["error"]["remedy"] == "take one of its `files`"


@pytest.mark.parametrize("written", ["..", "/elsewhere/..", "/", "/elsewhere/.", f"../{NAME}/.."])
def test_a_ledger_cannot_lead_out_of_the_folder_of_incidents(folder: Path, written: str) -> None:
    with Ledger.resume(folder) as ledger:
        report(ledger, "told", 1000.0, incident=written)
    assert incident(server_of(folder))["files"] == []


def test_a_folder_that_is_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    with Ledger.resume(folder) as ledger:
        report(ledger, "told", 1000.0, incident="/elsewhere/incidents/linked")
    (folder / "incidents" / "linked").symlink_to(tmp_path)
    assert incident(server_of(folder))["files"] == []


def test_a_folder_of_incidents_that_is_a_link_is_not_followed(server: DashboardServer, folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    (folder / "incidents").rename(elsewhere)
    (folder / "incidents").symlink_to(elsewhere)
    found = incident(server)
    assert found["files"] == [] and found["text"] == "policy-1 is stopped" and found["evidence"] == []


def test_a_verdict_that_is_no_verdict_is_left_out(server: DashboardServer, folder: Path) -> None:
    (folder / "incidents" / NAME / "verdict.json").write_text('{"evidence": ["text", 5], "explanation": 7}')
    assert incident(server)["evidence"] == [] and incident(server)["text"] == "7"
    (folder / "incidents" / NAME / "verdict.json").write_text("[" * 5000)
    assert incident(server)["text"] == "policy-1 is stopped"


def test_the_open_verdict_of_a_running_run_is_on_its_graph(folder: Path) -> None:
    server = server_of(folder)
    path = f"/api/runs/{run_id(server)}/waits"
    with Ledger.resume(folder) as ledger:
        report(ledger, "told", 1000.0, level="notice", text="policy-1 is late")
        assert ask(server, path).json()["verdict"]["text"] == "policy-1 is late"
        report(ledger, "told", 1001.0, number=2, text=f"engine-0 ended {SECRET}", who=["engine-0"])
        report(ledger, "updated", 1003.0, level="notice", text="policy-1 is later")
        found = ask(server, path).json()
        assert (found["verdict"]["level"], found["verdict"]["culprits"]) == ("confirmed", ["engine-0"])
        assert found["verdict"]["text"] == "engine-0 ended [hidden]" and found["live"] is False
        report(ledger, "withdrawn", 1004.0, number=2)
        report(ledger, "withdrawn", 1005.0)
        assert ask(server, path).json()["verdict"] is None
