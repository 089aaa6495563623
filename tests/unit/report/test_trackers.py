"""W&B (offline, and without a reachable server), MLflow (a folder) and Prometheus (a real scrape)."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.recipes import SFTConfig
from lockstep.config.run_config import MLflowConfig, PrometheusConfig, WandBConfig
from lockstep.ledger import CompletionSample
from lockstep.report import metric_sinks, trackers
from lockstep.report.metric_sinks import BackgroundSink
from lockstep.report.trackers import (
    SAMPLE_COLUMNS,
    PrometheusExporter,
    TrackingError,
    check_trackers,
    open_trackers,
    prometheus_name,
)

KEY = "a1b2c3d4e5" * 4
"""A key in the format of W&B's keys."""
OTHER = "plain words, still secret"
SAMPLES = [
    CompletionSample("<b>", "\x1b[2J", "a", 1.0, {"length": 2.0}),
    CompletionSample("q", "", messages=[{"role": "assistant", "content": "x"}]),
]
CONFIG = {"name": "mine", "steps": 3, "arguments": {"password": OTHER, "note": f"uses {KEY}"}, "eos_token": "</s>"}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("LOCKSTEP_SERVICE_TOKEN", OTHER)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def unspoken(folder: Path) -> bool:
    """Asserts that no file contains a secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return not [path for path in files if any(each.encode() in path.read_bytes() for each in (KEY, OTHER))]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Rows in the newest offline file of W&B: a LevelDB log of records (github.com/google/leveldb, log_format.md)."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    (*_, newest) = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    data, at, joined, rows = newest.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        joined += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(joined)
            joined = b""
            if record.WhichOneof("record_type") == "history":
                items = [("/".join(item.nested_key) or item.key, item.value_json) for item in record.history.item]
                rows.append({name: json.loads(value) for name, value in items})
    return rows


def written(folder: Path, count: int) -> list[dict[str, Any]]:
    """Waits for W&B's own process, which writes asynchronously."""
    until = time.monotonic() + 30
    while len(rows := rows_of(folder)) < count and time.monotonic() < until:
        time.sleep(0.1)
    return rows


def offline(folder: Path, steps: range, reason: str) -> None:
    (sink,) = open_trackers([WandBConfig(project="p", mode="offline", tags=("a",))], folder, CONFIG, {"python": "3"})
    for step in steps:
        sink.write(step, {"reward/mean": step / 2})
    if reason == "finished":
        sink.write_samples(3, SAMPLES)
    sink.close(reason)
    sink.close(reason)


def test_wandb_offline_and_resumed(tmp_path: Path, secrets: None) -> None:
    pytest.importorskip("wandb")
    offline(tmp_path, range(3), "interrupted")
    id = json.loads((tmp_path / "tracking.json").read_text())["wandb"]
    rows = [{name: row[name] for name in ("step", "reward/mean")} for row in written(tmp_path, 3)]
    assert rows == [{"step": step, "reward/mean": step / 2} for step in range(3)]
    time.sleep(1.1)  # folders are named by the second
    offline(tmp_path, range(2, 4), "finished")
    assert [row["step"] for row in written(tmp_path, 3)] == [2, 3, 3], "the last has the samples"
    folders = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(folders) == 2 and all(folder.name.endswith(f"-{id}") for folder in folders), "the same run continues"
    assert unspoken(tmp_path)
    (table,) = {path.read_text() for path in tmp_path.glob("wandb/*/files/media/table/samples*.json")}
    assert json.loads(table)["columns"] == list(SAMPLE_COLUMNS)
    assert [row[:4] for row in json.loads(table)["data"]] == [[3, "<b>", "\x1b[2J", 1.0], [3, "q", "", None]]
    content = b"".join(path.read_bytes() for path in tmp_path.glob("wandb/*/run-*.wandb"))
    assert b"[hidden]" in content and b"eos_token" in content and b"OMP_NUM_THREADS" in content


ALONE = """
import logging, sys, time
from pathlib import Path
from lockstep.config.run_config import WandBConfig
from lockstep.report import metric_sinks, trackers
logging.basicConfig(format="%(message)s")
metric_sinks.CLOSE_S, trackers.CLOSE_S, trackers.INIT_S = 20.0, 5.0, 1.0
began = time.monotonic()
(sink,) = trackers.open_trackers([WandBConfig()], Path(sys.argv[1]), {"name": "x"}, {})
for step in range(3):
    sink.write(step, {"a": 1.0})
assert time.monotonic() - began < 0.5
sink.close("finished")
"""


@pytest.mark.slow
def test_wandb_without_its_server_writes_to_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with socket.socket() as silent:  # takes connections, and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, timeout=60,
            env={**os.environ, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": url},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cannot reach the wandb server" in done.stderr and KEY not in done.stderr
    assert [row["a"] for row in rows_of(tmp_path)] == [1.0] * 3
    assert KEY.encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_mlflow_in_a_folder_and_resumed(tmp_path: Path, secrets: None) -> None:
    mlflow = pytest.importorskip("mlflow")
    cfg = MLflowConfig(uri=str(tmp_path / "mlruns"), experiment="e")
    for steps, reason in ((range(2), "failed: x"), (range(1, 3), "finished")):
        (sink,) = open_trackers([cfg], tmp_path, CONFIG, {"python": "3"})
        for step in steps:
            sink.write(
                step, {"reward/mean": step / 2, "reward/a<b>": 1.0, "policy/loss": float("nan")}, at=100.0 + step
            )
        if reason == "finished":
            sink.write_samples(3, SAMPLES)
        sink.close(reason)
    id = json.loads((tmp_path / "tracking.json").read_text())["mlflow"]
    client = mlflow.MlflowClient(tracking_uri=cfg.uri)
    run = client.get_run(id)
    assert run.info.status == "FINISHED" and run.info.run_name == "mine"
    assert len(client.search_runs([run.info.experiment_id])) == 1
    history = [(each.step, each.value) for each in client.get_metric_history(id, "reward/mean")]
    assert sorted(set(history)) == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert set(run.data.metrics) == {"reward/mean", "reward/a_b_"}
    found = json.loads(Path(client.download_artifacts(id, "samples/00000003.json", str(tmp_path))).read_text())
    assert found["step"] == 3 and found["samples"][0]["terms"] == {"length": 2.0}
    assert found["samples"][1]["messages"] == [{"role": "assistant", "content": "x"}]
    assert run.data.params["config.arguments.password"] == "[hidden]" and run.data.params["config.steps"] == "3"
    assert run.data.params["environment.OMP_NUM_THREADS"] == "1"
    assert unspoken(tmp_path)


def scrape(exporter: PrometheusExporter) -> dict[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_prometheus_scrapes_the_last_values() -> None:
    pytest.importorskip("prometheus_client")
    exporter = PrometheusExporter(PrometheusConfig(port=0), "mine")
    try:
        assert scrape(exporter) == {}
        exporter.write(0, {"reward/mean": 0.25, "eval/exact_match": 0.5})
        exporter.write(1, {"reward/mean": 0.75, "policy/loss": float("nan"), "a/b": 1.0, "a_b": 2.0})
        assert scrape(exporter) == {
            'lockstep_reward_mean{run="mine"}': "0.75",
            'lockstep_eval_exact_match{run="mine"}': "0.5",
            'lockstep_policy_loss{run="mine"}': "NaN",
            'lockstep_a_b{run="mine"}': "2.0",
            'lockstep_step{run="mine"}': "1.0",
        }
        exporter.write(2, {"a/b": 3.0})
        assert scrape(exporter)['lockstep_a_b{run="mine"}'] == "3.0"
    finally:
        exporter.close()
        exporter.close()
    with pytest.raises(OSError):
        scrape(exporter)


def test_a_taken_port_does_not_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        exporter = PrometheusExporter(PrometheusConfig(port=taken.getsockname()[1]), "x")
        exporter.write(0, {"a": 1.0})
        exporter.close()
    assert "the run continues" in caplog.text
    assert prometheus_name("reward/x.y/mean") == "lockstep_reward_x_y_mean"


class Stubborn:
    """A sink that raises, or never returns."""

    def __init__(self, raises: int = 0, slow_s: float = 0.0) -> None:
        self.raises, self.slow_s = raises, slow_s
        self.rows: list[int] = []
        self.ended = ""

    def write(self, step: int, values: Any, at: float | None = None) -> None:
        time.sleep(self.slow_s)
        if step < self.raises:
            raise ConnectionError(f"no route with {KEY}")
        self.rows.append(step)

    def write_samples(self, step: int, samples: Any) -> None:
        self.write(step, {})

    def close(self, reason: str = "") -> None:
        self.ended = reason


def test_a_failing_tracker_is_logged_once_and_gets_later_rows(caplog: pytest.LogCaptureFixture) -> None:
    sink = Stubborn(raises=3)
    behind = BackgroundSink("wandb", lambda: sink, (KEY,))
    for step in range(5):
        behind.write(step, {"a": 1.0})
    behind.close("finished")
    behind.write(9, {"a": 1.0})
    assert sink.rows == [3, 4] and sink.ended == "finished"
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("wandb failed (ConnectionError: no route with [hidden]); the run continues")
    assert last.startswith("wandb is missing 3 rows")


def test_a_tracker_that_cannot_be_opened(caplog: pytest.LogCaptureFixture) -> None:
    behind = BackgroundSink("mlflow", lambda: (_ for _ in ()).throw(OSError("no such host")), ())
    for step in range(4):
        behind.write(step, {"a": 1.0})
        time.sleep(0.01)
    behind.close()
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("mlflow cannot be used (OSError: no such host)") and "4 rows" in last


def test_a_tracker_that_hangs_slows_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(metric_sinks, "MAX_QUEUED_ROWS", 50)
    monkeypatch.setattr(metric_sinks, "CLOSE_S", 0.3)
    behind = BackgroundSink("wandb", lambda: Stubborn(slow_s=60.0), ())
    began = time.monotonic()
    for step in range(1000):
        behind.write(step, {"a": 1.0})
    assert time.monotonic() - began < 0.5
    assert len(behind._waiting) <= 50
    behind.close()
    assert time.monotonic() - began < 2
    assert "did not accept the last metrics within 0.3 s" in caplog.text and "rows of metrics" in caplog.text


def test_missing_packages_and_keys_are_rejected_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        trackers, "_PACKAGES", {"wandb": "no_such_package_here", "mlflow": "json", "prometheus": "json"}
    )
    with pytest.raises(TrackingError, match=r"tracking wandb: needs the package.*lockstep-rl\[tracking\]"):
        check_trackers([PrometheusConfig(), WandBConfig()])
    monkeypatch.setattr(trackers, "_PACKAGES", {"wandb": "json", "mlflow": "json", "prometheus": "json"})
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(TrackingError, match=r"no API key.*WANDB_API_KEY.*mode: offline"):
        check_trackers([WandBConfig()], {})
    check_trackers([WandBConfig(mode="offline")], {})
    check_trackers([WandBConfig()], {"WANDB_API_KEY": KEY})
    (tmp_path / ".netrc").write_text(f"machine wandb.mine\n  login user\n  password {KEY}\n")
    check_trackers([WandBConfig()], {"WANDB_BASE_URL": "https://wandb.mine"})
    with pytest.raises(TrackingError, match="no API key"):
        check_trackers([WandBConfig()], {})


def test_a_database_needs_all_of_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None if name == "sqlalchemy" else object())
    with pytest.raises(TrackingError, match=r"database \(sqlite\) needs the full mlflow package"):
        check_trackers([MLflowConfig(uri="sqlite:///m.db")], {})
    check_trackers(
        [
            MLflowConfig(uri="http://mlflow.internal:5000"),
        ],
        {},
    )


def test_one_of_each_kind() -> None:
    base = {"recipe": "sft", "name": "x", "steps": 1, "model": {"path": "m"}, "data": {"path": "d"}}
    made = SFTConfig.model_validate(base | {"tracking": [{"kind": "wandb"}, {"kind": "prometheus", "port": 0}]})
    assert [each.kind for each in made.tracking] == ["wandb", "prometheus"]
    with pytest.raises(ValueError, match="mlflow is listed more than once"):
        SFTConfig.model_validate(base | {"tracking": [{"kind": "mlflow"}, {"kind": "mlflow"}]})
