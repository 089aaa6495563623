"""The GPUs in a run's report."""

import json
from pathlib import Path
from typing import Any

from report_helpers import make_run

from lockstep.report.device_rows import MOST_ROWS, device_rows, device_spread
from lockstep.report.html_report import render_html


def entry(number: int, busy: float | None = 90.0, **more: Any) -> dict[str, Any]:
    made = {
        "host": "node-a", "device": f"GPU {number}", "name": "H100", "processes": [f"policy-{number}"], "samples": 9,
        "busy": busy, "memory_busy": 41.2, "power_w": 512.3, "power_limit_w": 700.0, "memory_used": 61 << 30,
        "memory_total": 80 << 30, "temperature_c": 71, "throttled": {}, "errors": [],
    }  # fmt: skip
    return {**made, **more}


def written(folder: Path, *entries: Any) -> Path:
    (folder / "devices.json").write_text(json.dumps(entries))
    return folder


def test_the_report_shows_how_evenly_the_gpus_worked(tmp_path: Path) -> None:
    hot = entry(1, 61.0, throttled={"sw_thermal_slowdown": 37.5}, errors=["the driver reported Xid 63"])
    with make_run(tmp_path / "run", steps=3) as ledger:
        assert "<h2>GPUs" not in render_html(ledger)
        written(tmp_path / "run", entry(0), hot, entry(2, processes=[]))
        page = render_html(ledger)
    assert "busiest 90%, least 61%" in page and "GPU 2" not in page, "no process of the run used it"
    assert "37.5% of the time sw_thermal_slowdown; the driver reported Xid 63" in page
    for text in ("policy-1", "61 %", "512 of 700 W", "61.0 of 80 GiB", "71 °C", "width: 61.0%"):
        assert text in page


def test_what_is_unknown_is_empty_and_a_broken_file_is_no_table(tmp_path: Path) -> None:
    bare = entry(0, None, memory_busy=None, power_w=None, power_limit_w=None, memory_used=None, temperature_c=None)
    (row,) = device_rows(written(tmp_path, bare))
    assert (row.busy, row.power, row.memory, row.temperature, row.percent) == ("", "", "", "", 0.0)
    assert device_spread([row]) == ""
    for broken in ([1], {"a": 1}, None):
        assert device_rows(written(tmp_path, broken)) == []
    (tmp_path / "devices.json").unlink()
    assert device_rows(tmp_path) == []


def test_of_many_gpus_those_in_trouble_and_the_idlest_are_shown(tmp_path: Path) -> None:
    many = [entry(number, float(number)) for number in range(100)]
    many[99]["errors"] = ["lost"]
    shown = [row.device for row in device_rows(written(tmp_path, *many))]
    assert shown == [f"GPU {number}" for number in [*range(MOST_ROWS - 1), 99]]
