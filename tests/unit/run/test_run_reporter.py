"""Reports of a run: metrics of a resumed run, stage timers, and the controller's log."""

import io
import json
import logging
import os
import sqlite3
from pathlib import Path

import pytest

from lockstep.base import waits
from lockstep.config.loader import check_config
from lockstep.ledger.ledger import Ledger
from lockstep.report.live_console import LiveConsole
from lockstep.run import run_reporter
from lockstep.run.errors import Interrupted
from lockstep.run.run_reporter import RunReporter, StageTimers, controller_logging

log = logging.getLogger("lockstep.somewhere")


def make_reporter(folder: Path, ledger: Ledger) -> RunReporter:
    quiet = {"console": False, "tensorboard": False, "html": False}
    values = {"recipe": "sft", "name": "x", "steps": 9, "model": {"path": "m"}, "data": {"path": "d"}, "report": quiet}
    return RunReporter(check_config(values, "test"), folder, ledger, "nobody")


def test_a_resumed_run_continues_counts_and_keeps_earlier_times(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "run", {"name": "x"}) as ledger:
        ledger.record_metrics(0, {"tokens/total": 10.0})
        ledger.record_metrics(1, {"tokens/total": 30.0, "time/checkpoint_s": 5.0})
        ledger.record_metrics(2, {"tokens/total": 60.0})  # after the checkpoint from which the run resumes
        resumed = make_reporter(ledger.folder, ledger)
        resumed.begin(2)
        with resumed.stage("checkpoint"):
            pass
        resumed.boundary_ends(2)
        with resumed.stage("train"):
            pass
        resumed.step_ends(2, {"policy/tokens": 7.0})
        with resumed.stage("checkpoint"):
            pass
        resumed.boundary_ends(3)
        resumed.close()
        before, after = ledger.metrics_rows(after=0)
    assert before.values["time/checkpoint_s"] == 5.0
    assert after.values["tokens/total"] == 37.0
    assert "time/checkpoint_s" in after.values


@pytest.mark.parametrize("first", [1, 0])
def test_rows_say_how_many_steps_are_done(tmp_path: Path, first: int) -> None:
    """Those of a run that was begun before this convention continue to count from 0."""
    Ledger.create(tmp_path / "run", {"name": "x"}).close()
    if first == 0:
        with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as index:
            index.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    for begin, end in ((0, 3), (2, 4)):  # killed after the checkpoint of step 2, then resumed from it
        with Ledger.resume(tmp_path / "run") as ledger:
            reporter = make_reporter(ledger.folder, ledger)
            reporter.begin(begin)
            if begin == 0:
                reporter.evaluated(0, {"eval/reward_mean": 0.0})
            for step in range(begin, end):
                reporter.step_ends(step, {"policy/tokens": 1.0})
                reporter.evaluated(step + 1, {"eval/reward_mean": step + 1.0})
            reporter.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "tokens/total" in row] == [first, first + 1, first + 2, first + 3]
    evaluated = [(row["step"], row["eval/reward_mean"]) for row in rows if "eval/reward_mean" in row]
    assert evaluated == [(done - 1 + first, done) for done in range(5)]


def test_times_of_a_stage_add_up_within_a_step() -> None:
    stages = StageTimers()
    for _ in range(2):
        with stages("train"):
            waits.sleep(0.01, "test")
    first = stages.take()
    assert 0.02 <= first["train"] < 1
    assert stages.take() == {}
    with stages("train"):
        pass
    assert stages.totals["train"] >= first["train"]


def test_a_stage_ends_also_when_it_fails() -> None:
    stages = StageTimers()
    with pytest.raises(ValueError, match="boom"), stages("train"):
        raise ValueError("boom")
    assert stages.current == ""
    assert "train" in stages.take()


def test_stages_do_not_nest() -> None:
    stages = StageTimers()
    with stages("train"), pytest.raises(RuntimeError, match="inside stage 'train'"), stages("reward"):
        pass


def make_console(folder: Path) -> tuple[LiveConsole, io.StringIO]:
    stream = io.StringIO()
    return LiveConsole("run", folder, 3, quiet=True, stream=stream), stream


def test_warnings_are_shown_and_everything_is_logged(tmp_path: Path) -> None:
    shown, stream = make_console(tmp_path)
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
    shown, _ = make_console(tmp_path)
    with pytest.raises(Interrupted), controller_logging(tmp_path / "logs" / "controller.log", shown):
        raise Interrupted
    assert not (tmp_path / "logs" / "controller.log").exists()


@pytest.mark.parametrize("full", [True, False], ids=["a full disk", "a link"])
def test_a_log_that_cannot_be_written_does_not_hide_the_error(
    full: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if full:
        monkeypatch.setattr(run_reporter, "open_file", lambda path, flags: os.open("/dev/full", flags))
    else:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "controller.log").symlink_to(tmp_path / "elsewhere")
    shown, stream = make_console(tmp_path)
    with pytest.raises(KeyError), controller_logging(tmp_path / "logs" / "controller.log", shown):
        log.warning("the disk is full")
        raise KeyError("the reason")
    assert stream.getvalue() == "the disk is full\n" and capsys.readouterr().err == ""
    assert not (tmp_path / "elsewhere").exists()
