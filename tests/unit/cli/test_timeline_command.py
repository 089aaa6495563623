"""`lockstep timeline` says why there is no trace: no capture, another version, no folder for it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.watch.beacon.beacon_records import VERSION
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.supervisor.timeline_capture import header_line

RUN = "grpo-0a1b2c"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that has ended."""
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "shm"))
    folder = tmp_path / "grpo"
    folder.mkdir()
    (folder / "run-id").write_text(RUN)
    return folder


def refused(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["timeline", *map(str, arguments)])
    assert result.exit_code == 2
    return " ".join(result.output.split())


def test_a_run_without_captures_is_refused(run: Path) -> None:
    text = refused(run)
    assert "no captured timeline and no incident" in text and "version" not in text
    assert "no process on this host" in refused(run, "--seconds", "1")


def test_beacons_of_another_version_are_named(run: Path) -> None:
    beacon = open_beacon(RUN, "supervisor", "supervisor", 0)
    try:
        with beacon.path.open("r+b") as file:
            file.seek(8)
            file.write((VERSION - 1).to_bytes(4, "little"))
        expected = f"Its beacons have version {VERSION - 1}: use the Lockstep that started the run"
        assert expected in refused(run) and expected in refused(run, "--steps", "2")
    finally:
        close_beacon(remove=True)


def test_a_trace_in_a_folder_that_does_not_exist_is_refused(run: Path) -> None:
    capture = run / "timeline" / "1.jsonl"
    capture.parent.mkdir()
    capture.write_text(header_line(RUN, 1.0, 1, 0) + json.dumps({"end": "complete", "at_ns": 2}) + "\n")
    output = run / "missing" / "trace.json"
    assert f"--output {output}: {output.parent} is not a folder" in refused(run, "--output", output)
