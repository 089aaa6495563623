"""Who is awaited is told while it is: with real workers, one of which waits for somebody itself."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_services import Plain

from lockstep.cluster.calls import gather
from lockstep.cluster.local import LocalCluster
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.cluster import LocalCluster as Config
from lockstep.run.awaited import awaited, line
from lockstep.watch import beacon
from lockstep.watch.records import WaitRecord


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    run = beacon.new_run_id("awaited")
    beacon.open_beacon(run, "controller", "controller", 0)
    with LocalCluster(Config(device="cpu"), run, tmp_path / "run", 1) as made:
        yield made
    beacon.close_beacon()


def test_who_is_awaited_and_what_they_wait_for(cluster: LocalCluster) -> None:
    one, two = cluster.start([WorkerSpec(f"w-{n}", "tester", n, "cluster_services:Plain") for n in range(2)])
    told: list[str] = []
    alone = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        if text.startswith("w-1 (load) for") and "w-1 is in stage collecting, waits for w-9 (its scores)" in text:
            alone.set()

    with awaited(tell, cluster.doing):
        waiting = [one.submit(Plain.sleep, 1.5), two.submit(Plain.wait_for, "w-9", 4.0)]
        gather(waiting, why="load")
    assert any(text.startswith("w-0, w-1 (load) for") for text in told), told
    assert alone.is_set(), f"w-0 had come: {told}"
    assert told[-1] == "", "nobody is awaited any more"
    assert cluster.doing("w-9") == ""


def test_the_line_says_what_two_of_them_do() -> None:
    wait = WaitRecord("event", "a, b, c and 5 more", "start", 1_000_000_000, None, 0, 1, "MainThread")
    said = line(wait, lambda name: {"b": "is stopped"}.get(name, ""), 13_000_000_000)
    assert said == "a, b, c and 5 more (start) for 12s: b is stopped"
    assert line(None, lambda name: "", 0) == ""
