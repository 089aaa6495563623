"""The controller's log: everything in the file, warnings on the console."""

import io
import logging
from pathlib import Path

import pytest

from lockstep.report.live_console import LiveConsole
from lockstep.run.errors import Interrupted
from lockstep.run.telemetry.controller_log import controller_logging

log = logging.getLogger("lockstep.somewhere")


def console(folder: Path) -> tuple[LiveConsole, io.StringIO]:
    stream = io.StringIO()
    return LiveConsole("run", folder, 3, quiet=True, stream=stream), stream


def test_warnings_are_shown_and_everything_is_logged(tmp_path: Path) -> None:
    shown, stream = console(tmp_path)
    file = tmp_path / "logs" / "controller.log"
    before = list(logging.getLogger("lockstep").handlers)
    with pytest.raises(ZeroDivisionError), controller_logging(file, shown):
        log.debug("a trifle")
        log.info("packing %s", "forest")
        log.warning("no progress for %d s [x]", 12)
        _ = 1 / 0
    text = file.read_text()
    assert stream.getvalue() == "no progress for 12 s [x]\n", "tracebacks are not for the console"
    assert "I lockstep.somewhere: packing forest" in text and "W lockstep.somewhere: no progress" in text
    assert "the run failed\nTraceback" in text and "ZeroDivisionError" in text and "trifle" not in text
    assert logging.getLogger("lockstep").handlers == before


def test_an_interruption_is_not_logged_as_a_failure(tmp_path: Path) -> None:
    shown, _ = console(tmp_path)
    with pytest.raises(Interrupted), controller_logging(tmp_path / "logs" / "controller.log", shown):
        raise Interrupted
    assert not (tmp_path / "logs" / "controller.log").exists()


def test_a_full_disk_does_not_hide_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "controller.log").symlink_to("/dev/full")
    shown, stream = console(tmp_path)
    with pytest.raises(KeyError), controller_logging(tmp_path / "logs" / "controller.log", shown):
        log.warning("the disk is full")
        raise KeyError("the reason")
    assert stream.getvalue() == "the disk is full\n" and capsys.readouterr().err == ""
