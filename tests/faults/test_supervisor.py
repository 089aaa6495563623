"""A real agent, a real supervisor and small workers without torch, with faults."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.report.timeline_capture_reader import capture_files, read_timeline
from lockstep.watch.agent.agent_client import AgentClient, start_agent
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.procfs import processes
from lockstep.watch.procfs.exit_causes import read_tail
from lockstep.watch.supervisor.agent_connections import AgentConnection
from lockstep.watch.supervisor.supervisor_client import (
    SupervisorClient,
    SupervisorEvent,
    SupervisorSettings,
    read_supervisor_address,
)

TOKEN = "5f0c2b7be4a8913d6e7f20c1a9d84b36"
PATIENCE = StallThresholds(notice_s=1.0, still_s=4.0)

WORKER = '''
import os, sys, time
from pathlib import Path
from lockstep.watch.beacon.writer import open_beacon
from lockstep.base import waits
from lockstep.train.compile_progress import CompileProgress

run, name, what, go = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
own = open_beacon(run, name, name.rpartition("-")[0], int(name.rpartition("-")[2]))
own.stage("train")


def told():
    return go.exists()


def score():
    time.sleep(1000)


def spin():
    while True:
        pass


def compiles(seconds):  # uses the CPU for that long, then hangs
    progress = CompileProgress()
    progress.begin()
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    time.sleep(1000)


print("password=" + os.environ.get("DB_PASSWORD", ""), flush=True)
if what == "waits":  # for the others, one after the other
    step = 0
    while True:
        step += 1
        mine = go.with_name(f"{name}.step")
        waits.poll(lambda: go.with_name(f"{sys.argv[5]}.{step}").exists() or None, kind="future", waits_for=sys.argv[5],
                   why=f"step {step}", timeout_s=600, notice_after_s=None)
        own.progress("steps", step)
step = 0
while True:
    step += 1
    if told():
        {"sleep": score, "spin": spin, "raise": lambda: 1 / 0, "leave": sys.exit,
         "slow": lambda: None, "compiles": lambda: compiles(6.0)}[what]()
    for _ in range(8 if what == "slow" and told() else 1):
        time.sleep(0.1)
        own.progress("samples", own.progress_count)
    go.with_name(f"{name}.{step}").touch()
    own.progress("steps", step)
'''  # fmt: skip


def until(check: Callable[[], object], seconds: float, what: str) -> float:
    """Waits until `check()` is true; returns how long it took."""
    started = time.monotonic()
    while not check():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


@dataclass
class Site:
    """A run of two workers: `policy-0` waits for `policy-1`, which does `what` when `start_fault` is called."""

    run: str
    folder: Path
    address: ServiceAddress
    client: AgentClient
    supervision: SupervisorClient
    events: list[SupervisorEvent]
    trouble: list[str]
    pids: dict[str, int] = field(default_factory=dict)

    def start(self, what: str) -> None:
        for name, words in (("policy-1", [what]), ("policy-0", ["waits"])):
            argv = [sys.executable, str(self.folder / "worker.py"), self.run, name, *words, str(self.go), "policy-1"]
            self.pids[name] = self.client.spawn(
                name, argv, log_path=self.folder / "logs" / f"{name}.log", cwd=self.folder,
                env={**os.environ, "DB_PASSWORD": "tr0ub4dor-and-3"},
            )  # fmt: skip
        until(lambda: (self.folder / "policy-1.3").exists(), 30, "the workers work")
        until(self.supervision.connected.is_set, 30, "the supervisor is up")
        until(lambda: self.agent_reports(2), 30, "the supervisor hears of both")

    @property
    def go(self) -> Path:
        return self.folder / "go"

    def start_fault(self) -> None:
        self.go.touch()

    def agent_reports(self, count: int) -> bool:
        """Whether the agent has reported so many processes besides the controller."""
        return len([1 for each in read_beacons(self.run) if each.role == "policy"]) >= count

    def about(self, name: str, *levels: str) -> list[SupervisorEvent]:
        rank = int(name.rpartition("-")[2])
        return [
            each
            for each in self.events
            if each.level in levels
            and [(one["role"], one["rank"]) for one in each.verdict["culprits"]] == [("policy", rank)]
        ]

    def until_event(self, name: str, *levels: str, seconds: float = 15.0) -> SupervisorEvent:
        until(lambda: self.about(name, *levels), seconds, f"{levels} of {name}; events: {self.events}")
        return self.about(name, *levels)[0]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "worker.py").write_text(WORKER)
    run = new_run_id("supervised")
    events: list[SupervisorEvent] = []
    trouble: list[str] = []
    address = start_agent(run, TOKEN, tmp_path, kill_grace_s=0.5)
    client = AgentClient(address, TOKEN)
    settings = SupervisorSettings(run, 1, tmp_path, tmp_path / "incidents", [address], os.getpid(), PATIENCE)
    settings = replace(settings, devices=tmp_path / "devices.json")
    supervision = SupervisorClient(settings, TOKEN, events.append, trouble.append)
    made = Site(run, tmp_path, address, client, supervision, events, trouble)
    try:
        yield made
    finally:
        supervision.close()
        made.client.shut_down(0.2)
    assert supervision.pid is None


def test_a_stopped_process_is_named_and_withdrawn_when_it_continues(site: Site) -> None:
    site.start("slow")
    os.kill(site.pids["policy-1"], signal.SIGSTOP)
    began = time.monotonic()
    site.until_event("policy-1", "notice", "confirmed", seconds=10.0)
    first = site.until_event("policy-1", "confirmed", seconds=10.0)
    assert time.monotonic() - began < 12.0
    assert first.verdict["kind"] == "absent" and first.verdict["confidence"] >= 0.8
    assert first.incident is not None and (Path(first.incident) / "verdict.json").is_file()
    os.kill(site.pids["policy-1"], signal.SIGCONT)
    until(lambda: any(each.change == "withdrawn" for each in site.events), 10, "the verdict is withdrawn")


def test_a_killed_process_is_noticed_within_a_second(site: Site) -> None:
    site.start("slow")
    os.kill(site.pids["policy-1"], signal.SIGKILL)
    began = time.time()
    event = site.until_event("policy-1", "confirmed")
    assert event.verdict["kind"] == "dead"
    assert event.wall - began < 1.0 + 1.0, "a second, and one more for a loaded machine"
    assert "SIGKILL" in json.dumps(event.verdict)


def test_an_exception_is_reported_with_its_text(site: Site) -> None:
    site.start("raise")
    site.start_fault()
    event = site.until_event("policy-1", "confirmed")
    assert (event.verdict["kind"], event.verdict["class"]) == ("dead", "rank_exception_masked")
    assert "ZeroDivisionError: division by zero" in json.dumps(event.verdict)


def test_a_sleep_in_user_code_is_noticed_with_its_line_then_confirmed(site: Site) -> None:
    site.start("sleep")
    line = next(i for i, text in enumerate(WORKER.splitlines(), 1) if "time.sleep(1000)" in text)
    site.start_fault()
    where = f"score() at worker.py:{line}"
    until(
        lambda: any(each.verdict["culprits"][0]["where"] == where for each in site.about("policy-1", "notice")),
        10, "a notice names the line",
    )  # fmt: skip
    confirmed = site.until_event("policy-1", "confirmed", seconds=20)
    assert confirmed.verdict["culprits"][0]["where"] == where
    folder = Path(confirmed.incident or "")
    assert "score" in (folder / "stacks" / "policy-1.txt").read_text()
    assert (folder / "stacks" / "policy-0.txt").is_file(), "and the stack of one innocent process"


def test_a_busy_loop_is_noticed_with_its_line(site: Site) -> None:
    site.start("spin")
    site.start_fault()
    until(
        lambda: any("spin()" in each.verdict["culprits"][0]["where"] for each in site.about("policy-1", "notice")),
        15, "a notice names the loop",
    )  # fmt: skip


def test_a_compiler_is_noticed_only_once_it_no_longer_works(site: Site) -> None:
    """The supervisor would notice a busy loop long before: see the test above."""
    site.start("compiles")
    site.start_fault()
    site.until_event("policy-1", "notice", "confirmed", seconds=60.0)
    (state,) = [each for each in read_beacons(site.run) if each.name == "policy-1"]
    assert state.stage == "compile" and state.counters["compiler CPU ms"].value > 5000
    until(
        lambda: any("compiles()" in each.headline for each in site.about("policy-1", "notice", "confirmed")),
        15, "the line is named, on a busy machine after the first notice",
    )  # fmt: skip


def test_slow_progress_is_not_confirmed(site: Site) -> None:
    site.start("slow")
    site.start_fault()
    stepped = len(list(site.folder.glob("policy-1.*")))
    until(lambda: len(list(site.folder.glob("policy-1.*"))) >= stepped + 6, 60, "some slow steps")
    assert [each for each in site.events if each.level != "notice"] == []


def test_a_killed_supervisor_is_restarted_and_still_reports(site: Site) -> None:
    site.start("slow")
    first = site.supervision.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(
        lambda: site.supervision.pid not in (None, first) and site.supervision.connected.is_set(),
        30,
        "another one is up",
    )
    assert any("SIGKILL" in text for text in site.trouble)
    os.kill(site.pids["policy-1"], signal.SIGKILL)
    assert site.until_event("policy-1", "confirmed").verdict["kind"] == "dead"


def test_the_incident_is_complete_and_without_secrets(site: Site) -> None:
    site.start("slow")
    os.kill(site.pids["policy-1"], signal.SIGKILL)
    folder = Path(site.until_event("policy-1", "confirmed").incident or "")
    names = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    assert names >= {
        "verdict.json", "story.txt", "timeline.json", "beacons.json", "processes.json", "environment.json",
        "machine.json", "run.json", "told.json", "logs/policy-0.log", "logs/policy-1.log", "capture.jsonl",
    }  # fmt: skip
    timeline = read_timeline(capture_files(folder))
    assert {each.name for each in timeline.processes} >= {"policy-0", "policy-1"} and len(timeline.notes) == 1
    text = "".join((folder / name).read_text() for name in sorted(names))
    assert "tr0ub4dor-and-3" not in text and TOKEN not in text and "password=" in text
    assert json.loads((folder / "beacons.json").read_text())
    assert [each for each in (site.folder / "incidents").iterdir() if each.name.startswith(".")] == []


def test_no_setting_is_passed_as_an_argument(site: Site) -> None:
    until(lambda: site.supervision.pid and site.supervision.connected.is_set(), 30, "the supervisor is up")
    arguments = Path(f"/proc/{site.supervision.pid}/cmdline").read_bytes().split(b"\0")
    assert arguments[1:] == [b"-P", b"-m", b"lockstep.watch.supervisor.supervisor", b""]


def test_a_process_ended_on_purpose_gives_no_verdict(site: Site) -> None:
    site.start("slow")
    site.client.kill("policy-0", signal.SIGKILL)
    site.client.wait_exit("policy-0", "its end", 10)
    time.sleep(2 * PATIENCE.notice_s)
    assert [each for each in site.events if each.level != "notice"] == []


CONTROLLER = """
import os, signal, sys
from pathlib import Path
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.agent.agent_client import start_agent
from lockstep.watch.supervisor.supervisor_client import SupervisorSettings
from lockstep.watch.supervisor.supervisor_client import SupervisorClient
run, folder = sys.argv[1], Path(sys.argv[2])
address = start_agent(run, "5f0c2b7be4a8913d6e7f20c1a9d84b36", folder, orphan_grace_s=1.0, kill_grace_s=0.5)
client = AgentClient(address, "5f0c2b7be4a8913d6e7f20c1a9d84b36")
settings = SupervisorSettings(run, 1, folder, folder / "incidents", [address], os.getpid())
supervision = SupervisorClient(settings, "5f0c2b7be4a8913d6e7f20c1a9d84b36", lambda said: None)
client.spawn("policy-0", ["sleep", "1000"], log_path=folder / "policy-0.log")
supervision.connected.wait(30)
print(supervision.pid, flush=True)
signal.pause()
"""


def test_the_supervisor_outlives_the_controller_and_exits_after_the_run(tmp_path: Path) -> None:
    run = new_run_id("orphan")
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, run, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    supervisor = int(controller.stdout.readline())
    start = processes.start_ticks(supervisor)
    address = read_supervisor_address(tmp_path)
    assert address is not None and address.pid == supervisor
    agent = ServiceAddress.read(tmp_path)
    controller.kill()
    controller.wait()
    until(lambda: not processes.is_alive(agent.pid, agent.start_ticks), 20, "the agent leaves")
    until(lambda: not processes.is_alive(supervisor, start), 20, "the supervisor leaves")
    assert not (tmp_path / "supervisor.json").exists()
    assert not run_shm_dir(run).exists()


def test_two_agents_are_two_hosts(tmp_path: Path) -> None:
    """Two nodes on loopback, each with an agent, and one supervisor."""
    (tmp_path / "worker.py").write_text(WORKER)
    events: list[SupervisorEvent] = []
    clients, addresses = [], []
    run = new_run_id("two")
    environment = {**os.environ}
    for node in ("a", "b"):
        folder = tmp_path / node
        folder.mkdir()
        environment["LOCKSTEP_BEACONS"] = str(tmp_path / f"shm-{node}")
        agent = subprocess.Popen(
            [sys.executable, "-m", "lockstep.watch.agent.node_agent", "--run", run, "--folder", str(folder),
             "--node", node, "--controller", str(os.getpid()), "--kill-grace", "0.5"],
            env={**environment, "LOCKSTEP_TOKEN": TOKEN}, start_new_session=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(lambda folder=folder: (folder / "agent.json").exists(), 20, "an agent")  # type: ignore[misc]
        addresses.append(ServiceAddress.read(folder))
        clients.append((AgentClient(addresses[-1], TOKEN), dict(environment), agent))
    settings = SupervisorSettings(run, 1, tmp_path, tmp_path / "incidents", addresses, os.getpid(), PATIENCE)
    supervision = SupervisorClient(settings, TOKEN, events.append)
    try:
        pids = {}
        for number, (client, env, _) in enumerate(clients):
            words = ["waits"] if number == 0 else ["slow"]
            argv = [sys.executable, str(tmp_path / "worker.py"), run, f"policy-{number}", *words, str(tmp_path / "go")]
            pids[number] = client.spawn(
                f"policy-{number}", [*argv, "policy-1"], log_path=tmp_path / f"{number}.log", env=env
            )
        until(lambda: (tmp_path / "policy-1.3").exists() and supervision.connected.is_set(), 30, "both work")
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGSTOP)
        until(lambda: any(each.level == "confirmed" for each in events), 15, f"it is confirmed; events: {events}")
        (culprit,) = next(each for each in events if each.level == "confirmed").verdict["culprits"]
        assert (culprit["host"], culprit["rank"]) == ("b", 1)
    finally:
        supervision.close()
        for client, _, agent in clients:
            client.shut_down(0.2)
            agent.wait(10)


BLOCKED = """
import ctypes, json, os, select, socket, sys, threading
from lockstep.watch.beacon.writer import open_beacon
from lockstep.watch.recorder.commands import CommandInbox
from lockstep.watch.beacon.beacon_records import SEPARATOR

run, name = sys.argv[1], sys.argv[2]
own = open_beacon(run, name, "policy", 0)
own.stage("train")
inbox = CommandInbox(run, name)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
epoll = select.epoll()
epoll.register(peer, select.EPOLLIN)
ids, broken = [], threading.Event()


def gloo():
    ctypes.CDLL(None).prctl(15, b"gloo_tcp_loop", 0, 0, 0)
    ids.append(threading.get_native_id())
    epoll.poll()
    broken.set()


threading.Thread(target=gloo, daemon=True).start()
while not ids:
    pass
rings = own.call_rings()
slot = rings.open_slot(11, 22, "0", "fsdp", "gloo", 2, 0, ids[0])
slot.enter(7, 5, 1, rings.text(SEPARATOR.join(["all_reduce", "", "", "", ""])))
print("up", flush=True)
broken.wait()
print("freed:", inbox.stalled(), flush=True)
"""


def test_a_process_in_a_collective_is_released_with_the_verdict(site: Site) -> None:
    """Without torch: a thread that waits like gloo's, and a beacon that publishes the wait."""
    argv = [sys.executable, "-c", BLOCKED, site.run, "policy-0"]
    site.client.spawn("policy-0", argv, log_path=site.folder / "policy-0.log")
    until(lambda: "up" in read_tail(site.folder / "policy-0.log"), 20, "it waits")
    until(site.supervision.connected.is_set, 20, "the supervisor is up")
    asked: list[dict[str, object]] = []
    link = AgentConnection(site.address, TOKEN, 1, lambda link, connection: link.attach(connection))
    until(lambda: link.connection is not None, 10, "connected")
    link.request("forget", lambda reply: None, 10, name="policy-2")
    began = time.monotonic()
    for culprits in (["policy-2"], ["policy-1"]):
        link.request(
            "free", lambda reply: asked.append(reply or {}), 10, names=["policy-0", "policy-1"], culprits=culprits,
            breaks=True, text="policy-1 has not entered", verdict={"kind": "absent"},
        )  # fmt: skip
    until(lambda: list(link.messages()) or len(asked) > 1, 10, "answers")
    assert [each["freed"] for each in asked] == [[], ["policy-0"]], (
        "nothing is released if the culprit has been replaced"
    )
    until(lambda: "freed: policy-1 has not entered" in read_tail(site.folder / "policy-0.log"), 5, "it is freed")
    assert time.monotonic() - began < 2.0
    link.close()


def test_a_replaced_agent_is_connected(site: Site) -> None:
    site.start("slow")
    os.kill(site.address.pid, signal.SIGKILL)
    until(lambda: not processes.is_alive(site.pids["policy-1"]), 10, "its workers end with it")
    site.client.close()
    site.address = start_agent(site.run, TOKEN, site.folder, kill_grace_s=0.5)
    site.client = AgentClient(site.address, TOKEN)
    for path in site.folder.glob("policy-1.*"):
        path.unlink()
    site.events.clear()
    site.start("slow")
    os.kill(site.pids["policy-1"], signal.SIGKILL)
    assert site.until_event("policy-1", "confirmed", seconds=20).verdict["kind"] == "dead"


def test_a_new_supervisor_says_nothing_of_processes_that_were_replaced(site: Site) -> None:
    """The former one has reported their deaths."""
    site.start("slow")
    os.kill(site.pids["policy-1"], signal.SIGKILL)
    site.until_event("policy-1", "confirmed", seconds=20)
    site.client.forget("policy-1")
    first = site.supervision.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(
        lambda: site.supervision.pid not in (None, first) and site.supervision.connected.is_set(),
        30,
        "supervised again",
    )
    site.events.clear()
    time.sleep(3 * PATIENCE.notice_s)
    assert [event.headline for event in site.events if "policy-1" in event.who and event.level == "confirmed"] == []
