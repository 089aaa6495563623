"""The startup status shows which workers the run waits for: real workers, one of which waits for another process."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_services import Plain

from lockstep.base.folders import new_run_id
from lockstep.base.wait_state import WaitRecord
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.rpc.futures import gather_results
from lockstep.cluster.rpc.remote_worker import worker_and_node
from lockstep.config.cluster import LocalClusterConfig as Config
from lockstep.config.loader import check_config
from lockstep.models.tiny_model import make_tiny
from lockstep.run.run_reporter import format_wait, startup_status
from lockstep.train.trainer_api import TrainerAPI
from lockstep.watch.beacon.writer import close_beacon, open_beacon


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    run = new_run_id("awaited")
    open_beacon(run, "controller", "controller", 0)
    with LocalCluster(Config(device="cpu"), run, tmp_path / "run", 1) as made:
        yield made
    close_beacon()


def test_awaited_workers_are_shown_with_what_they_wait_for(cluster: LocalCluster) -> None:
    one, two = cluster.start([WorkerSpec(f"w-{n}", "tester", n, "cluster_services:Plain") for n in range(2)])
    lines: list[str] = []
    alone = threading.Event()

    def show(text: str) -> None:
        lines.append(text)
        if text.startswith("w-1 (load) for") and "w-1 is in stage collecting, waits for w-9 (its scores)" in text:
            alone.set()

    with startup_status(show, cluster.describe_worker):
        waiting = [one.submit(Plain.sleep, 1.5), two.submit(Plain.wait_for, "w-9", 4.0)]
        gather_results(waiting, why="load")
    assert any(text.startswith("w-0, w-1 (load) for") for text in lines), lines
    assert alone.is_set(), f"w-0 had come: {lines}"
    assert lines[-1] == "", "no worker is awaited any more"
    assert cluster.describe_worker("w-9") == ""


@pytest.mark.slow
def test_ranks_missing_from_the_rendezvous_are_shown_while_the_run_waits_for_the_trainer(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    make_tiny(tmp_path / "model", hidden=16, layers=1, heads=2, kv_heads=1, ffn=32, max_length=32)
    values = {
        "recipe": "sft", "name": "x", "steps": 1, "model": {"path": str(tmp_path / "model")}, "data": {"path": "d"},
        "trainer": {"ranks": 2, "threads": 1}, "token_budget": 32,
    }  # fmt: skip
    arguments = {"role": check_config(values, "test").policy.model_dump(mode="json"), "world": 2, "device": "cpu"}
    arguments |= {"store": cluster.store()}
    specs = [
        WorkerSpec(f"policy-{n}", "policy", n, "lockstep.train.trainer_service:TrainerService", arguments | {"rank": n})
        for n in range(2)
    ]
    ranks = cluster.start(specs)
    names = [worker_and_node(rank) for rank in ranks]
    first = ranks[0].submit(TrainerAPI.setup, names)
    there, lines = threading.Event(), []

    def show(text: str) -> None:
        lines.append(text)
        if "policy-0 is in stage setup, waits for policy-1 (all ranks have joined)" in text and not there.is_set():
            there.set()
            ranks[1].submit(TrainerAPI.setup, names)

    with startup_status(show, cluster.describe_worker):
        gather_results([first], why="load the model")
    assert there.is_set(), lines


def test_the_line_names_three_workers_and_a_reason() -> None:
    wait = WaitRecord("event", "a, b, c and 5 more", "start", 1_000_000_000, None, 0, 1, "MainThread")
    text = format_wait(wait, lambda name: {"b": "is stopped"}.get(name, ""), 13_000_000_000)
    assert text == "a, b, c and 5 more (start) for 12s: b is stopped"
    assert format_wait(None, lambda name: "", 0) == ""
