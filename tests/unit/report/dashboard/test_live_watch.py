"""The processes of a run on this host: their graph of waits, their stages, the figures of the host."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dashboard_helpers import ask, make_run, run_id, server_of

from lockstep.base.wait_state import track_wait
from lockstep.report.dashboard import live_watch
from lockstep.report.dashboard.host_figures import HostHistory, gpu_figures, run_hosts
from lockstep.report.dashboard.live_watch import LiveWatch, wait_graph_edges, wait_graph_nodes, without_replaced
from lockstep.watch.beacon.beacon_table import ProcessRow, WaitRow
from lockstep.watch.beacon.writer import Beacon, close_beacon, open_beacon
from lockstep.watch.devices.device_samples import DeviceFault, DeviceSample, DeviceState
from lockstep.watch.diagnosis.verdict import Culprit, Verdict, VerdictKind, VerdictLevel, WaitLink


@pytest.fixture
def beacon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beacon]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "beacons"))
    yield open_beacon("run-1", "policy-0", "policy", 0)
    close_beacon()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run", 3)
    (folder / "run-id").write_text("run-1\n")
    return folder


def process(name: str, rank: int, *waits: WaitRow) -> ProcessRow:
    return ProcessRow(name, "policy", rank, 100 + rank, True, "sleeping", "train", 3.0, None, (), waits)


def test_a_living_process_is_on_the_graph_with_its_wait_and_stages(folder: Path, beacon: Beacon) -> None:
    server = server_of(folder)
    name = run_id(server)
    beacon.stage("rollout")
    beacon.stage("train")
    with track_wait("future", "reward-0", "scores of step 4", timeout_s=60):
        found = ask(server, f"/api/runs/{name}/waits").json()
        chart = ask(server, f"/api/runs/{name}/stages").json()
        hosts = ask(server, f"/api/runs/{name}/hosts").json()
    assert found["live"] is True and found["message"] == ""
    nodes = {node["name"]: node for node in found["nodes"]}
    assert (nodes["policy-0"]["role"], nodes["policy-0"]["rank"], nodes["policy-0"]["stage"]) == ("policy", 0, "train")
    assert nodes["reward-0"]["state"] == "other"
    (edge,) = [each for each in found["edges"] if each["to"] == "reward-0"]  # this process waits for its dashboard, too
    assert (edge["from"], edge["why"]) == ("policy-0", "scores of step 4")
    row = chart["rows"].index({"role": "policy", "name": "policy-0", "rank": 0})
    mine = [(span["stage"], span["state"], span["step"]) for span in chart["spans"] if span["row"] == row]
    assert mine == [("rollout", "done", 4), ("train", "running", 4)]
    (host,) = hosts["hosts"]
    assert host["live"] is True and 0 < host["memory_used"] < host["memory_total"] and 0 <= host["cpu"] <= 1
    assert len(hosts["history"][host["name"]]["times"]) >= 1
    server.close()


def test_the_watching_ends_when_nobody_asks(folder: Path, beacon: Beacon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_watch, "IDLE_S", 0.05)
    monkeypatch.setattr(live_watch, "TICK_S", 0.05)
    watch = LiveWatch(folder)
    assert watch.view().live
    deadline = time.monotonic() + 10
    while watch._thread is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert watch._thread is None
    assert watch.view().live, "and begins again with the next question"
    watch.close()
    assert not watch.view().live


def test_a_run_without_processes_here_is_not_watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(folder))
    watch = LiveWatch(folder)
    assert not watch.view().live and watch._thread is None
    (folder / "run-id").write_text("../../etc\n")
    assert not watch.view().live and watch._thread is None


def test_the_chain_of_the_verdict_is_on_the_graph() -> None:
    waiting = WaitRow("future", "trainer ranks", "a step", 9.0, 9.0, None, "MainThread")
    rows = [process("policy-0", 0, waiting), process("policy-1", 1)]
    link = WaitLink("policy-0", "policy-1", "all_reduce #7", 8.0)
    verdict = Verdict(
        VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (Culprit(1, "policy", name="policy-1"),), waiting=(link,)
    )
    edges = wait_graph_edges(rows, verdict)
    assert [(each["from"], each["to"], each["seconds"]) for each in edges] == [
        ("policy-0", "trainer ranks", 9.0), ("policy-0", "policy-1", 8.0)
    ]  # fmt: skip
    nodes = {each["name"]: each for each in wait_graph_nodes(rows, edges, verdict)}
    assert nodes["policy-1"]["culprit"] and not nodes["policy-0"]["culprit"]
    assert (nodes["trainer ranks"]["state"], nodes["trainer ranks"]["role"]) == ("group", "policy")


def test_ranks_and_lists_of_processes_are_the_processes_themselves() -> None:
    waiting = WaitRow("event", "policy-0.1, policy-1.1", "optimizer step", 9.0, 9.0, None, "MainThread")
    controller = replace(process("controller", 0, waiting), role="controller")
    rows = [controller, process("policy-0.1", 0), process("policy-1.1", 1)]
    chain = (WaitLink("controller", "rank 0", "optimizer step", 8.0), WaitLink("rank 0", "rank 1", "all_gather #7"))
    culprit = Culprit(1, "policy", name="policy-1.1")
    edges = wait_graph_edges(rows, Verdict(VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (culprit,), waiting=chain))
    assert sorted((each["from"], each["to"], each["why"]) for each in edges) == [
        ("controller", "policy-0.1", "optimizer step"), ("controller", "policy-1.1", "optimizer step"),
        ("policy-0.1", "policy-1.1", "all_gather #7"),
    ]  # fmt: skip
    assert {each["name"] for each in wait_graph_nodes(rows, edges, None)} == {row.name for row in rows}


def test_a_process_that_was_replaced_is_left_out_and_one_that_was_not_stays() -> None:
    ended = [replace(process(f"policy-{rank}", rank), alive=False, state="gone") for rank in range(2)]
    assert [row.name for row in without_replaced([*ended, process("policy-1.1", 1)])] == ["policy-0", "policy-1.1"]


def test_a_thousand_ranks_make_a_graph_at_once() -> None:
    waiting = WaitRow("collective", "policy-999", "all_reduce", 9.0, 9.0, None, "MainThread")
    rows = [process(f"policy-{rank}", rank, waiting) for rank in range(1000)]
    began = time.process_time()
    edges = wait_graph_edges(rows, None)
    assert len(wait_graph_nodes(rows, edges, None)) == 1000 and len(edges) == 1000
    assert time.process_time() - began < 0.5


def test_figures_of_a_gpu_are_shares_and_errors() -> None:
    sample = DeviceSample("u", 3, "H100", busy=98, memory_used=1 << 30, memory_total=80 << 30, power_w=612.0,
                          temperature_c=60, sm_mhz=1700, throttled=("hw_slowdown",))  # fmt: skip
    found = gpu_figures(DeviceState(sample, faults=(DeviceFault("xid", "the driver reported Xid 79", code=79),)))
    assert (found["index"], found["utilisation"], found["clock"], found["power"]) == (3, 0.98, 1700, 612.0)
    assert found["errors"] == ["the driver reported Xid 79"] and found["throttled"] == ["hw_slowdown"]
    part = gpu_figures(DeviceState(replace(sample, instance=1, busy=None, lost="fell off the bus")))
    assert (part["index"], part["utilisation"], part["errors"]) == ("3.1", None, ["fell off the bus"])


def test_hosts_that_are_not_watched_show_their_means(tmp_path: Path) -> None:
    entry = (
        '{"host": "node1", "device": "GPU 0", "name": "H100", "processes": [], "busy": 91.5, "memory_used": 5,'
        '"memory_total": 8, "power_w": 600, "temperature_c": 70, "throttled": {"sw": 3.0}, "errors": ["Xid 48"]}'
    )
    (tmp_path / "devices.json").write_text(f"[{entry}, {entry.replace('GPU 0', 'GPU 1')}]")
    live = {"name": "node0", "live": True, "cpu": 0.5, "memory_used": 1, "memory_total": 2, "gpus": []}
    here, there = run_hosts(tmp_path, [live])
    assert here is live and not there["live"] and there["name"] == "node1"
    assert [(gpu["index"], gpu["utilisation"], gpu["errors"]) for gpu in there["gpus"]] == [
        (0, 0.915, ["Xid 48"]), (1, 0.915, ["Xid 48"])
    ]  # fmt: skip
    (tmp_path / "devices.json").write_text("[[")
    assert run_hosts(tmp_path, []) == []


def test_the_history_is_bounded_and_thinned() -> None:
    history = HostHistory()
    for second in range(2000):
        gpu = {"index": 0, "utilisation": second / 2000}
        history.add(float(second), [{"name": "node", "cpu": 0.1, "memory_used": 1, "gpus": [gpu]}])
    found = history.json(points=100)["node"]
    assert len(found["times"]) == 100 and found["times"][-1] == 1999.0 and found["times"][0] >= 1100
    assert found["gpus"]["0"]["utilisation"][-1] == 1999 / 2000 and found["gpus"]["0"]["power"] == [None] * 100
