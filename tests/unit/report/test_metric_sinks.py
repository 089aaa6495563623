import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.ledger.errors import LedgerFull
from lockstep.report.metric_sinks import JsonlSink, TensorBoardSink, open_sinks


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_readable_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(0, {"reward/mean": 0.5}, at=12.0)
    assert rows(path) == [{"step": 0, "time": 12.0, "reward/mean": 0.5}]
    sink.write(1, {"policy/loss": math.nan, "policy/kl": math.inf}, at=13.0)
    assert rows(path)[1] == {"step": 1, "time": 13.0, "policy/loss": None, "policy/kl": None}
    sink.close()
    sink.close()


def test_a_resumed_run_has_one_row_per_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in range(5):
        first.write(step, {"x": step}, at=0.0)
    first.close()
    with path.open("a") as file:
        file.write('{"step": 5, "ti')  # killed in the middle of a line
    again = JsonlSink(path, resume_after=2)
    again.write(3, {"x": 33}, at=0.0)
    again.close()
    assert [(row["step"], row["x"]) for row in rows(path)] == [(0, 0), (1, 1), (2, 2), (3, 33)]


def test_without_resume_after_only_an_incomplete_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "x": 1}\n{"step": 1, "x"')
    JsonlSink(path).close()
    assert path.read_text() == '{"step": 0, "x": 1}\n'


def read_back(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_it_while_it_is_open(tmp_path):
    sink = TensorBoardSink(tmp_path)
    for step in range(3):
        sink.write(step, {"reward/mean": step / 2}, at=100.0 + step)
    assert read_back(tmp_path, "reward/mean") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    sink.close()


def test_tensorboard_forgets_superseded_steps(tmp_path):
    first = TensorBoardSink(tmp_path)
    for step in range(5):
        first.write(step, {"x": step})
    first.close()
    again = TensorBoardSink(tmp_path, resume_after=2)
    again.write(3, {"x": 33})
    again.close()
    (tmp_path / "empty").mkdir()
    assert read_back(tmp_path, "x") == [(0, 0), (1, 1), (2, 2), (3, 33)]


def test_the_sinks_of_a_run(tmp_path):
    sinks = open_sinks(tmp_path, tensorboard=False)
    sinks.write(0, {"x": 1})
    sinks.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    sinks = open_sinks(tmp_path, resume_after=0)
    sinks.write(1, {"x": 2})
    sinks.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1]
    assert read_back(tmp_path / "tensorboard", "x") == [(1, 2)]


def test_a_non_numeric_row_is_rejected(tmp_path):
    with pytest.raises(ValueError):
        JsonlSink(tmp_path / "m.jsonl").write(0, {"x": "many"})  # type: ignore[dict-item]


def test_the_report_imports_no_torch():
    modules = ["metric_sinks", "live_console", "run_summary", "html_report", "top_table", "charts"]
    code = f"import sys; from lockstep.report import {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("make", [lambda folder: JsonlSink(folder / "m.jsonl"), TensorBoardSink], ids=["jsonl", "tb"])
def test_closing_on_a_full_disk_does_not_mask_the_error(tmp_path, make):
    """A row for which there was no space stays in the file's buffer, and closing the file tries to write it again."""
    sink = make(tmp_path)
    descriptor = os.open("/dev/full", os.O_WRONLY)
    os.dup2(descriptor, sink._file.fileno())
    os.close(descriptor)
    with pytest.raises(LedgerFull):
        sink.write(0, {"x": 1.0})
    sink.close()
    assert sink._file.closed
