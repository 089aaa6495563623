"""Two hosts (network namespaces) whose link goes down and recovers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from needed_systems import needs_namespaces

from benchmarks.faults.network_namespaces import Cable
from lockstep.base.folders import new_run_id
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorEvent, SupervisorSettings

pytestmark = needs_namespaces

TOKEN = "5f0c2b7be4a8913d6e7f20c1a9d84b36"
PATIENCE = StallThresholds(notice_s=1.0, still_s=60.0, host_s=2.0)

WORKER = """
import sys, time
from pathlib import Path
from lockstep.watch.beacon.writer import open_beacon
from lockstep.base import waits
run, name, other, folder = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
own = open_beacon(run, name, "policy", int(name[-1]))
own.stage("train")
step = 0
while True:
    step += 1
    (folder / f"{name}.{step}").touch()
    if other:
        waits.poll(lambda: (folder / f"{other}.{step}").exists() or None, kind="future", waits_for=other,
                   why=f"step {step}", timeout_s=600, notice_after_s=None)
    else:
        time.sleep(0.1)
        while (folder / "hold").exists():
            time.sleep(0.05)
    own.progress("steps", step)
"""


@pytest.fixture
def link() -> Iterator[Cable]:
    with Cable.any("lk", "10.77") as made:
        yield made


def until(check: Callable[[], object], seconds: float, what: str) -> None:
    started = time.monotonic()
    while not check():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def start(run: str, folder: Path, node: str, namespace: str | None, host: str) -> "subprocess.Popen[bytes]":
    folder.mkdir()
    environment = {**os.environ, "LOCKSTEP_BEACONS": str(folder / "shm"), "LOCKSTEP_TOKEN": TOKEN}
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    agent = subprocess.Popen(
        [*inside, sys.executable, "-m", "lockstep.watch.agent.node_agent", "--run", run, "--folder", str(folder),
         "--node", node, "--controller", str(os.getpid()), "--kill-grace", "0.5", "--host", host],
        env=environment, start_new_session=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: (folder / "agent.json").exists(), 20, f"agent {node}")
    return agent


@contextmanager
def two_hosts(folder: Path, link: Cable, patience: StallThresholds) -> Iterator[list[SupervisorEvent]]:
    """Runs a worker on each host, which waits for the other in every step, until the link goes down. Yields the
    supervisor's events."""
    run, events = new_run_id("cut"), list[SupervisorEvent]()
    agents = [start(run, folder / "a", "a", None, "127.0.0.1"), start(run, folder / "b", "b", link.name, link.there)]
    addresses = [ServiceAddress.read(folder / node) for node in ("a", "b")]
    clients = [AgentClient(each, TOKEN) for each in addresses]
    (folder / "worker.py").write_text(WORKER)
    supervision = SupervisorClient(
        SupervisorSettings(run, 1, folder, folder / "incidents", addresses, os.getpid(), patience), TOKEN, events.append
    )
    try:
        for node, client, name, other in zip("ab", clients, ("policy-0", "policy-1"), ("policy-1", ""), strict=True):
            argv = [sys.executable, str(folder / "worker.py"), run, name, other, str(folder)]
            environment = {**os.environ, "LOCKSTEP_BEACONS": str(folder / node / "shm")}
            client.spawn(name, argv, log_path=folder / f"{name}.log", env=environment)
        until(lambda: (folder / "policy-1.5").exists() and supervision.connected.is_set(), 30, "both work")
        time.sleep(1.5)
        assert [each.headline for each in events if each.level != "notice"] == []
        link.cut()
        (folder / "hold").touch()  # over a network, this would not reach the other host either
        yield events
    finally:
        link.mend()
        supervision.close()
        for client, agent in zip(clients, agents, strict=True):
            client.shut_down(0.2)
            agent.send_signal(signal.SIGTERM)
            agent.wait(10)


def test_a_disconnected_host_is_reported_and_withdrawn_when_the_link_recovers(tmp_path: Path, link: Cable) -> None:
    with two_hosts(tmp_path, link, PATIENCE) as events:
        until(lambda: any("b" in _hosts(each) for each in events), 15, f"host b is reported; events: {events}")
        event = next(each for each in events if "b" in _hosts(each))
        assert [each["rank"] for each in event.verdict["culprits"]] == [1]
        link.mend()
        (tmp_path / "hold").unlink()
        until(lambda: any(each.change == "withdrawn" for each in events), 30, "the verdict is withdrawn")
        assert not any("a" in _hosts(each) and each.level != "notice" for each in events), "the other is no culprit"


def test_a_host_that_stays_disconnected_is_confirmed(tmp_path: Path, link: Cable) -> None:
    """The host may have lost its power or its cable: the verdict names both, and does not blame the remaining host."""
    with two_hosts(tmp_path, link, replace(PATIENCE, still_s=4.0)) as events:
        until(lambda: any(each.level == "confirmed" for each in events), 40, f"it is confirmed; events: {events}")
        event = next(each for each in events if each.level == "confirmed")
        assert _hosts(event) == {"b"} and event.verdict["kind"] == "absent"
        assert [each["class"] for each in event.verdict["alternatives"]] == ["network_blocked", "external_kill"]
        assert event.verdict["confidence"] < 0.8, "no process is restarted because of a cable"


def _hosts(event: SupervisorEvent) -> set[str]:
    return {each["host"] for each in event.verdict["culprits"]}
