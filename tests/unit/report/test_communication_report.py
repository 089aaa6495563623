"""The communication of a run in its report and on the terminal."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_helpers import make_run

from lockstep.ledger.rank_loads import RankLoads
from lockstep.ledger.run_folder import INDEX_FILE
from lockstep.report.communication.communication_summary import MOST_STEPS, communication_summary
from lockstep.report.communication.communication_table import communication_view, render_text, report_view
from lockstep.report.html_report import render_html
from lockstep.watch.communication.arrival_totals import ArrivalTotals, Entry

HOSTILE = "<img src=x onerror=alert(1)>"


def write_totals(folder: Path, names: tuple[str, ...] = ("policy-0", "policy-1"), on_device: bool = False) -> None:
    totals = ArrivalTotals(folder / "communication.json", "r")
    totals.describe({1: ("all_reduce", 4 << 20)})
    for call in range(50):
        for rank, name in enumerate(names):
            entered = call * 10**9 + rank * 10**8  # the last rank is late
            entry = Entry("h", entered, 10**9 - rank * 10**8, 1, 0, on_device)
            entry = entry._replace(took_ns=-1) if on_device else entry
            totals.add("k", "fsdp", "gloo", len(names), (0, call), rank, name, entry, on_device)
    totals.write(0.0, last=True)


def test_the_report_has_the_heat_map_loads_and_the_remark(tmp_path: Path) -> None:
    with make_run(tmp_path / "run", steps=30) as ledger:
        write_totals(ledger.folder, (HOSTILE, "policy-1"))
        for step in range(30):
            loads = RankLoads([1.0, 2.0], [1.2, 0.2], [2.0**30, 2.0**30], [500, 500], [500.0, 500.0])
            ledger.record_rank_loads(step, {"policy": loads})
        page = render_html(ledger)
        summary = communication_summary(ledger.folder)
    assert "policy rank 1 takes 2.00 times as long as the other ranks" in page
    assert "Late arrival" in page and "5.0 s" in page and "--level: 100%" in page
    assert HOSTILE not in page and "&lt;img src=x" in page
    assert json.loads(json.dumps(summary)) == summary
    assert summary["matrix"]["seconds"] == [[0.0, 0.0], [pytest.approx(5.0), 0.0]]
    (nobody, wait), others = summary["matrix"]["wait_ms"][1][::-1], summary["matrix"]["wait_ms"][0]
    assert others == [None, None] and nobody is None
    assert wait == {"p50": pytest.approx(100, rel=0.05), "p99": pytest.approx(100, rel=0.05)}
    assert "waited 5.0 s for policy-1: p50 " in page
    (first, second) = summary["ranks"]
    assert (first["tokens"], first["work_s"], second["work_s"]) == (15_000, 30.0, 60.0)
    assert second["pace"] / first["pace"] == pytest.approx(2.0)
    text = render_text(summary)
    assert "all_reduce" in text and "remark: policy rank 1" in text and "15,000" in text


def test_a_run_without_any_has_no_section(tmp_path: Path) -> None:
    with make_run(tmp_path / "run", steps=3) as ledger:
        page = render_html(ledger)
        assert "Late arrival" not in page and 'id="communication"' not in page
        assert communication_view(communication_summary(ledger.folder)) is None
        assert "no collectives" in render_text(communication_summary(ledger.folder))


def test_damaged_totals_do_not_prevent_a_report(tmp_path: Path) -> None:
    with make_run(tmp_path / "run", steps=3) as ledger:
        for damaged in ("", "[]", '{"format": 1}', '{"format": 1, "written": 0, "communicators": [{}], "windows": []}'):
            (ledger.folder / "communication.json").write_text(damaged)
            assert report_view(ledger.folder) is None
            assert "<html" in render_html(ledger)


def test_damaged_loads_do_not_prevent_a_report(tmp_path: Path) -> None:
    with make_run(tmp_path / "run", steps=3) as ledger:
        write_totals(ledger.folder)
        ledger.record_rank_loads(1, {"policy": RankLoads([1.0], [1.0], [1.0], [1], [1.0])})
        with sqlite3.connect(ledger.folder / INDEX_FILE) as index:
            index.execute("UPDATE loads SET load = '{\"work\": 1}'")
        index.close()
        assert report_view(ledger.folder) is None
        assert "<html" in render_html(ledger)


WINDOW = {"began": 0, "ended": 1, "waited_ns": {}, "caused_ns": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"windows": [WINDOW | {"waited_ns": [1]}]},
        {"windows": [WINDOW | {"caused_ns": {"policy-0": "much"}}]},
        {"operations": {"spread": [1]}},
        {"operations": {"calls": "many"}},
        {"pairs": [[0, 7, 1, 1, {}]]},
        {"ranks": [[1, 1, 1, [3]], [1, 1, 1, {}]]},
    ],
)
def test_totals_of_other_types_are_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    """A report leaves them out, and a supervisor writes them anew."""
    path = tmp_path / "communication.json"
    write_totals(tmp_path)
    values = json.loads(path.read_text())
    values |= {name: each for name, each in change.items() if name in values}
    communicator = values["communicators"][0]
    communicator["operations"][0] |= change.get("operations", {})
    communicator |= {name: each for name, each in change.items() if name in ("pairs", "ranks")}
    path.write_text(json.dumps(values))
    assert report_view(tmp_path) is None
    assert ArrivalTotals(path, "r").to_json()["communicators"] == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["communication.json", "check.json", "devices.json"])
def test_a_pipe_is_no_file_of_a_run(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    summary = communication_summary(tmp_path)
    assert (summary["source"], summary["communicators"], summary["devices"]) == (None, [], [])
    assert ArrivalTotals(tmp_path / "communication.json", "r").to_json()["communicators"] == []


def test_bandwidth_is_compared_with_that_of_the_check(tmp_path: Path) -> None:
    write_totals(tmp_path)
    (communicator,) = communication_summary(tmp_path)["communicators"]
    assert communicator["operations"][0]["checked_gb_s"] is None
    for size, expected in ((4 << 20, 1.5), (1 << 30, None)):
        measured = {"communicator": "policy", "members": 2, "bytes": size, "bus_mb_per_s": {"all_reduce": 1500.0}}
        (tmp_path / "check.json").write_text(json.dumps({"findings": [{"id": "x"}, {"measured": measured}]}))
        (communicator,) = communication_summary(tmp_path)["communicators"]
        assert communicator["operations"][0]["checked_gb_s"] == expected
    assert communicator["operations"][0]["bus_gb_s"] == pytest.approx((4 << 20) / 0.9e9)


def test_moving_is_unknown_where_calls_do_not_block(tmp_path: Path) -> None:
    write_totals(tmp_path, on_device=True)
    summary = communication_summary(tmp_path)
    (operation,) = summary["communicators"][0]["operations"]
    assert operation["moving_s"] is operation["bus_gb_s"] is operation["waiting_share"] is None
    assert operation["waiting_s"] == pytest.approx(5.0)
    assert "lateness is that of issuing" in render_text(summary)


def test_many_steps_are_thinned_and_the_last_one_is_kept(tmp_path: Path) -> None:
    with make_run(tmp_path / "run", steps=3) as ledger:
        for step in range(MOST_STEPS * 2 + 7):
            work = np.full(2, 1.0 + step).tolist()
            ledger.record_rank_loads(step, {"policy": RankLoads(work, work, work, [1, 1], [1.0, 1.0])})
        loads = communication_summary(ledger.folder)["loads"]
        assert len(loads) <= MOST_STEPS and loads[-1]["step"] == MOST_STEPS * 2 + 7
        summary, text = communication_summary(ledger.folder), render_text(communication_summary(ledger.folder))
        assert summary["thinned_steps"] == 0 and "of the first" not in text
        for step in (MOST_STEPS * 2 + 4, MOST_STEPS * 2 + 6):
            ledger.record_checkpoint(step, Path(f"/checkpoints/{step}"))
        ledger.compact()
        thinned = communication_summary(ledger.folder)
        assert thinned["thinned_steps"] == 300 and thinned["ranks"] == summary["ranks"], "sums and paces are the same"
        steps = [each["step"] for each in thinned["loads"]]
        assert steps == [*range(1, 407, 10), MOST_STEPS * 2 + 7], "none of the kept steps is far from the next"
        note = "of the first 300 steps the loads of every tenth are kept; the table sums up all steps"
        assert f"note: {note}" in render_text(thinned) and note in render_html(ledger)
