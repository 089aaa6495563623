"""The metrics of a resumed run."""

from pathlib import Path

from lockstep.config.loader import check_config
from lockstep.ledger.ledger import Ledger
from lockstep.run.telemetry.run_reporter import RunReporter


def monitor(folder: Path, ledger: Ledger) -> RunReporter:
    quiet = {"console": False, "tensorboard": False, "html": False}
    values = {"recipe": "sft", "name": "x", "steps": 9, "model": {"path": "m"}, "data": {"path": "d"}, "report": quiet}
    return RunReporter(check_config(values, "test"), folder, ledger, "nobody")


def test_a_resumed_run_continues_counts_and_keeps_earlier_times(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "run", {"name": "x"}) as ledger:
        ledger.metrics(0, {"tokens/total": 10.0})
        ledger.metrics(1, {"tokens/total": 30.0, "time/checkpoint_s": 5.0})
        ledger.metrics(2, {"tokens/total": 60.0})  # done after the checkpoint that the run goes on from
        resumed = monitor(ledger.folder, ledger)
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
