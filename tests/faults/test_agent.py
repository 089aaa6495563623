"""The node agent with real processes: they exit, crash, stop, and their controller or fork server is killed."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from lockstep.base import waits
from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import HandshakeRefused, WireError
from lockstep.watch.agent.agent_client import AgentClient, AgentError, AgentGone, WorkerExit, start_agent
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.procfs import processes

TOKEN = "5f0c2b7be4a8913d6e7f20c1a9d84b36"

WORKER = """
import atexit, ctypes, json, os, random, signal, subprocess, sys, threading, time
import numpy
what = sys.argv[1]
if what == "facts":
    kinds = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            kinds[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass
    print(json.dumps({
        "pid": os.getpid(), "sid": os.getsid(0), "pgid": os.getpgid(0), "ppid": os.getppid(), "argv": sys.argv,
        "env": dict(os.environ), "cwd": os.getcwd(), "path0": sys.path[0], "main": __name__, "fds": kinds,
        "sigint": int(signal.getsignal(signal.SIGINT)), "sigterm": int(signal.getsignal(signal.SIGTERM)),
        "mask": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "random": [random.random(), float(numpy.random.random())], "threads": threading.active_count(),
        "child": subprocess.run(["sh", "-c", "echo $MARK"], capture_output=True, text=True).stdout,
        "package": __package__, "spec": __spec__.name if __spec__ else None,
    }))
elif what == "exit":
    sys.exit(int(sys.argv[2]))
elif what == "message":
    sys.exit("a last word")
elif what == "raise":
    raise ValueError("the reason")
elif what == "segfault":
    ctypes.string_at(0)
elif what == "abort":
    os.abort()
elif what == "hard":
    print("before the end"); os._exit(9)
elif what == "atexit":
    atexit.register(print, "the exit function ran", end="")
elif what == "thread":
    threading.Thread(target=lambda: (time.sleep(0.2), print("the thread ended"))).start()
elif what == "sleep":
    print("up", flush=True); time.sleep(600)
elif what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
                     start_new_session=True)
    print("up", flush=True)
    while True: time.sleep(600)
elif what == "polite":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(41))
    print("up", flush=True)
    while True: time.sleep(600)
elif what == "straggler":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
"""

CONTROLLER = """
import signal, sys, time
from pathlib import Path
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.agent.agent_client import start_agent
run, folder, grace = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
token = "5f0c2b7be4a8913d6e7f20c1a9d84b36"
client = AgentClient(start_agent(run, token, folder, orphan_grace_s=grace, kill_grace_s=0.5), token)
for name, preload in (("stubborn", ()), ("sleep", ("json",)), ("polite", ())):
    argv = [sys.executable, str(folder / "pkg" / "work.py"), name]
    client.spawn(name, argv, log_path=folder / f"{name}.log", preload=preload)
print("up", flush=True)
signal.pause()
"""


def until(check: Callable[[], object], seconds: float, what: str) -> float:
    """Waits until `check()` is true; returns how long it took."""
    started = time.monotonic()
    while not check():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - started


@dataclass
class Site:
    """A run with its agent, for one test."""

    run: str
    folder: Path
    client: AgentClient
    exits: list[WorkerExit] = field(default_factory=list)

    def spawn(self, name: str, *words: str, preload: Sequence[str] = (), module: bool = False, **more: object) -> int:
        script = ["-m", "pkg.work"] if module else [str(self.folder / "pkg" / "work.py")]
        arguments: dict = {"env": None, "cwd": self.folder} | more
        return self.client.spawn(
            name, [sys.executable, *script, *words], log_path=self.log(name), preload=preload, **arguments
        )

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def text(self, name: str) -> str:
        return self.log(name).read_text() if self.log(name).exists() else ""

    def up(self, name: str) -> None:
        until(lambda: self.text(name), 20, f"{name} prints")

    def agent_log(self) -> str:
        return (self.folder / "agent.log").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "work.py").write_text(WORKER)
    return tmp_path


@pytest.fixture
def site(folder: Path) -> Iterator[Site]:
    run = new_run_id("agent-test")
    exits: list[WorkerExit] = []
    address = start_agent(run, TOKEN, folder, kill_grace_s=0.5)
    client = AgentClient(address, TOKEN, on_exit=exits.append)
    yield Site(run, folder, client, exits)
    client.shut_down(0.2)
    assert not processes.is_alive(address.pid, address.start_ticks)
    assert not run_shm_dir(run).exists()


WARM = pytest.mark.parametrize("preload", [(), ("json", "numpy")], ids=["plain", "warm"])
ENDS = {
    "exit 0": (0, ""), "exit 7": (7, ""), "message": (1, "a last word"), "raise": (1, "ValueError: the reason"),
    "segfault": (-11, "work.py"), "abort": (-6, "work.py"), "hard": (9, "before the end"),
    "thread": (0, "the thread ended"), "atexit": (0, "the exit function ran"),
}  # fmt: skip


@WARM
def test_ends_are_reported_with_exit_codes_and_last_output(site: Site, preload: tuple[str, ...]) -> None:
    for how, (code, last_output) in ENDS.items():
        name = how.replace(" ", "-")
        pid = site.spawn(name, *how.split(), preload=preload)
        end = site.client.wait_exit(name, "the test", 30)
        assert (end.name, end.pid, end.exit_code) == (name, pid, code), site.text(name)
        assert last_output in site.text(name)
        if how == "raise":
            assert site.text(name).count("Traceback") == 1
    assert [end.name for end in site.exits] == [how.replace(" ", "-") for how in ENDS]
    assert [end.number for end in site.exits] == list(range(1, len(ENDS) + 1))
    facts = site.client.list()
    assert {(f.name, f.alive, f.exit_code, f.warm) for f in facts} == {
        (how.replace(" ", "-"), False, code, bool(preload)) for how, (code, _) in ENDS.items()
    }


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_request_waits_for_a_client_whose_thread_has_failed(site: Site) -> None:
    client = AgentClient(site.client.address, TOKEN, on_exit=lambda end: print(1 / 0))
    site.spawn("ends", "exit", "0")
    waits.poll(lambda: not client.alive or None, kind="test", waits_for="client", why="its end", timeout_s=30)
    with pytest.raises(AgentGone, match="its thread ended unexpectedly"):
        client.list()
    client.close()
    assert [each.exit_code for each in site.client.list()] == [0], "the agent is well"


@WARM
def test_a_worker_is_like_a_fresh_process(site: Site, preload: tuple[str, ...]) -> None:
    elsewhere = site.folder / "elsewhere"
    elsewhere.mkdir()
    environment = {"PATH": os.environ["PATH"], "MARK": "new", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site.folder)}
    by_worker = []
    for name in ("one", "two"):
        pid = site.spawn(
            name, "facts", "-x", "a b", preload=preload, module=True, env=environment, cwd=elsewhere
        )  # fmt: skip
        assert site.client.wait_exit(name, "facts", 30).exit_code == 0, site.text(name)
        facts = json.loads(site.text(name))
        by_worker.append(facts)
        assert facts["pid"] == facts["sid"] == facts["pgid"] == pid
        assert facts["ppid"] == site.client.address.pid
        assert facts["argv"] == [str(site.folder / "pkg" / "work.py"), "facts", "-x", "a b"]
        assert (facts["cwd"], facts["path0"]) == (str(elsewhere), str(elsewhere))
        assert (facts["main"], facts["package"], facts["spec"]) == ("__main__", "pkg", "pkg.work")
        added = {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "LC_CTYPE", "OPENBLAS_NUM_THREADS", "KMP_INIT_AT_FORK",
                 "KMP_DUPLICATE_LIB_OK"}  # fmt: skip
        assert {k: v for k, v in facts["env"].items() if k not in added} == environment
        assert facts["child"] == "new\n"
        assert (facts["sigint"], facts["sigterm"], facts["mask"]) == (signal.SIG_IGN, signal.SIG_DFL, [])
        assert facts["threads"] == 1
        assert facts["fds"]["0"] == os.devnull
        assert facts["fds"]["1"] == facts["fds"]["2"] == str(site.log(name))
        assert not [link for link in facts["fds"].values() if link.startswith(("socket:", "pipe:"))]
    assert by_worker[0]["random"][0] != by_worker[1]["random"][0]
    assert by_worker[0]["random"][1] != by_worker[1]["random"][1]


@WARM
def test_signals_reach_workers_and_are_reported_fast(site: Site, preload: tuple[str, ...]) -> None:
    for name, number in (("killed", signal.SIGKILL), ("asked", signal.SIGTERM)):
        pid = site.spawn(name, "sleep", preload=preload)
        site.up(name)
        os.kill(pid, signal.SIGINT)  # as Ctrl-C would in a terminal
        assert site.client.kill(name, number) is True
        sent = time.time()
        assert site.client.wait_exit(name, "the signal", 20).exit_code == -number
        assert time.time() - sent < 1.0
    assert site.client.kill("asked") is False
    with pytest.raises(AgentError, match="no worker is named 'nobody'"):
        site.client.kill("nobody")


def test_a_worker_handles_sigterm_itself_and_its_children_end_with_it(site: Site) -> None:
    site.spawn("polite", "polite")
    site.up("polite")
    site.client.kill("polite", signal.SIGTERM)
    assert site.client.wait_exit("polite", "it leaves", 20).exit_code == 41
    site.spawn("straggler", "straggler")
    assert site.client.wait_exit("straggler", "it leaves", 20).exit_code == 0
    until(lambda: not processes.is_alive(int(site.text("straggler"))), 5, "the straggler is killed")


def test_names_are_unique_among_the_living_and_free_after_death(site: Site) -> None:
    first = site.spawn("w", "sleep")
    with pytest.raises(AgentError, match="running already"):
        site.spawn("w", "sleep")
    site.client.kill("w")
    assert site.client.wait_exit("w", "killed", 20).pid == first
    second = site.spawn("w", "sleep")
    assert second != first
    assert site.client.exit_of("w") is None
    assert [facts.pid for facts in site.client.list()] == [second]


def test_many_workers_are_forked_at_once(site: Site) -> None:
    argv = [sys.executable, str(site.folder / "pkg" / "work.py"), "exit", "3"]
    started = [
        site.client.submit_spawn(f"w{i}", argv, log_path=site.log(f"w{i}"), preload=("json", "numpy"))
        for i in range(12)
    ]
    assert len({future.result(60) for future in started}) == 12
    for i in range(12):
        assert site.client.wait_exit(f"w{i}", "end", 30).exit_code == 3
    assert site.agent_log().count("INFO fork server") == 1


def test_a_command_that_cannot_run_is_an_error(site: Site) -> None:
    site.client.spawn("missing", ["/no/such/program"], log_path=site.log("missing"))
    assert site.client.wait_exit("missing", "end", 20).exit_code == 127
    assert "cannot run /no/such/program" in site.text("missing")
    site.spawn("nowhere", "exit", "0", cwd=site.folder / "nowhere")
    assert site.client.wait_exit("nowhere", "end", 20).exit_code == 1
    assert "FileNotFoundError" in site.text("nowhere")


def test_a_preload_that_fails_falls_back_to_a_plain_start(site: Site) -> None:
    (site.folder / "broken_module.py").write_text("raise RuntimeError('cannot be imported')")
    (site.folder / "threaded_module.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    environment = {**os.environ, "PYTHONPATH": str(site.folder)}
    for module, why in (("broken_module", "cannot be imported"), ("threaded_module", "run threads")):
        site.spawn(module, "exit", "5", preload=(module,), env=environment)
        assert site.client.wait_exit(module, "end", 30).exit_code == 5
        assert why in site.agent_log()
    assert not any(facts.warm for facts in site.client.list())


def fork_servers(site: Site) -> list[psutil.Process]:
    children = psutil.Process(site.client.address.pid).children()
    known = {facts.pid for facts in site.client.list()}
    return [child for child in children if child.pid not in known]


def test_a_killed_fork_server_is_replaced_and_its_workers_survive(site: Site) -> None:
    survivor = site.spawn("survivor", "sleep", preload=("json", "numpy"))
    (fork_server,) = fork_servers(site)
    fork_server.kill()
    site.spawn("next", "exit", "4", preload=("json", "numpy"))
    assert site.client.wait_exit("next", "end", 30).exit_code == 4
    assert processes.is_alive(survivor)
    assert [facts.warm for facts in site.client.list()] == [True, True]


def test_a_fork_server_killed_while_it_imports_loses_no_request(site: Site) -> None:
    (site.folder / "slow_module.py").write_text("import time; time.sleep(1.5)")
    environment = {**os.environ, "PYTHONPATH": str(site.folder)}
    argv = [sys.executable, str(site.folder / "pkg" / "work.py"), "exit", "6"]
    pending = [
        site.client.submit_spawn(f"w{i}", argv, log_path=site.log(f"w{i}"), env=environment, preload=("slow_module",))
        for i in range(3)
    ]
    until(lambda: fork_servers(site), 10, "the fork server starts")
    fork_servers(site)[0].kill()
    assert len({future.result(60) for future in pending}) == 3
    for i in range(3):
        assert site.client.wait_exit(f"w{i}", "end", 30).exit_code == 6


def test_a_fork_server_that_always_dies_is_given_up(site: Site) -> None:
    (site.folder / "deadly_module.py").write_text("import os; os.kill(os.getpid(), 9)")
    environment = {**os.environ, "PYTHONPATH": str(site.folder)}
    site.spawn("w", "exit", "8", preload=("deadly_module",), env=environment)
    assert site.client.wait_exit("w", "end", 30).exit_code == 8
    assert [facts.warm for facts in site.client.list()] == [False]


def test_shutdown_kills_stopped_workers_and_those_that_ignore_sigterm(folder: Path) -> None:
    run = new_run_id("agent-test")
    client = AgentClient(start_agent(run, TOKEN, folder), TOKEN)
    here = Site(run, folder, client)
    pids = [here.spawn("stopped", "sleep", preload=("json",)), here.spawn("stubborn", "stubborn")]
    here.up("stopped")
    here.up("stubborn")
    everybody = psutil.Process(client.address.pid).children(recursive=True)
    assert len(everybody) >= 5  # two workers, one's child in a session of its own, two fork servers
    client.kill("stopped", signal.SIGSTOP)
    started = time.monotonic()
    assert client.shut_down(0.3) == []
    assert time.monotonic() - started < 5
    assert not [process.pid for process in everybody if processes.is_alive(process.pid)]
    assert not any(map(processes.is_alive, pids))
    assert not run_shm_dir(run).exists()
    assert not (folder / "agent.json").exists()
    assert client.shut_down() == []
    with pytest.raises(AgentGone):
        here.spawn("late", "sleep")


@contextlib.contextmanager
def controller(run: str, folder: Path, grace: float) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A controller in a process of its own with three workers; yields the pids of all below it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, run, str(folder), str(grace)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids: list[int] = []
    try:
        assert process.stdout.readline() == "up\n"
        for name in ("stubborn", "sleep", "polite"):
            until(lambda log=folder / f"{name}.log": log.exists() and log.read_text(), 20, name)  # type: ignore[misc]
        agent = ServiceAddress.read(folder).pid
        pids += [agent, *(child.pid for child in psutil.Process(agent).children(recursive=True))]
        yield process, pids
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(run_shm_dir(run), ignore_errors=True)


def test_no_orphans_remain_after_kill_9_of_the_controller(folder: Path) -> None:
    run = new_run_id("agent-test")
    with controller(run, folder, 0.0) as (process, pids):
        assert len(pids) >= 6
        assert run_shm_dir(run).exists()
        process.kill()
        until(lambda: not any(map(processes.is_alive, pids)), 5, "all workers and the agent have ended")
        until(lambda: not run_shm_dir(run).exists(), 1, "the beacons are removed")


def test_orphans_survive_for_the_grace_period_only(folder: Path) -> None:
    run = new_run_id("agent-test")
    with controller(run, folder, 3.0) as (process, pids):
        process.kill()
        killed = time.monotonic()
        while time.monotonic() - killed < 2.7:
            assert all(map(processes.is_alive, pids))
            time.sleep(0.05)
        until(lambda: not any(map(processes.is_alive, pids)), 5, "all have ended after the grace period")


def test_a_stopped_controller_does_not_count_as_dead(folder: Path) -> None:
    run = new_run_id("agent-test")
    with controller(run, folder, 0.0) as (process, pids):
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        assert all(map(processes.is_alive, pids))


def test_a_successor_takes_over_and_the_stale_one_is_refused(folder: Path) -> None:
    run = new_run_id("agent-test")
    with controller(run, folder, 20.0) as (process, pids):
        process.kill()
        process.wait(10)
        exits: list[WorkerExit] = []
        successor = AgentClient(ServiceAddress.read(folder), TOKEN, generation=2, on_exit=exits.append)
        assert {facts.name for facts in successor.list() if facts.alive} == {"stubborn", "sleep", "polite"}
        with pytest.raises(HandshakeRefused) as refused:
            AgentClient(ServiceAddress.read(folder), TOKEN, generation=1)
        assert refused.value.code == "generation"
        successor.kill("sleep")
        successor.wait_exit("sleep", "killed", 10)
        successor.close()
        third = AgentClient(ServiceAddress.read(folder), TOKEN, generation=2, on_exit=exits.append)
        until(lambda: len(exits) == 2, 5, "a client that comes later hears of earlier ends")
        assert exits[0] == exits[1]
        assert third.shut_down(0.3) == []
        until(lambda: not any(map(processes.is_alive, pids)), 5, "all left")


def test_a_broken_connection_is_restored_and_nothing_is_lost_or_repeated(site: Site) -> None:
    pid = site.spawn("w", "sleep")
    for round_ in range(3):
        site.client._connection._socket.shutdown(socket.SHUT_RDWR)
        site.spawn(f"n{round_}", "exit", "0")
    site.client._connection._socket.shutdown(socket.SHUT_RDWR)
    os.kill(pid, signal.SIGKILL)
    assert site.client.wait_exit("w", "killed meanwhile", 20).exit_code == -9
    until(lambda: len(site.exits) == 4, 10, "all ends are reported")
    assert sorted(end.name for end in site.exits) == ["n0", "n1", "n2", "w"]
    assert len(site.client.list()) == 4


def test_unknown_connections_are_refused_and_garbage_does_no_harm(site: Site) -> None:
    where = site.client.address
    with pytest.raises(HandshakeRefused) as refused:
        AgentClient(where, "another token")
    assert refused.value.code == "token"
    with socket.create_connection((where.host, where.port)) as unknown:
        unknown.sendall(b"GET / HTTP/1.1\r\n\r\n")
    known = auth_handshake.connect(where.host, where.port, token=TOKEN, run=site.run, generation=1, name="odd")
    for frame in (b"no json", b"[]", b'{"id": 1}', b'{"id": 1, "op": "spawn"}', b'{"id": 2, "op": "dance"}'):
        with contextlib.suppress(WireError):
            known.send(frame)
            known.recv(0.2)
        if known.closed:
            known = auth_handshake.connect(where.host, where.port, token=TOKEN, run=site.run, generation=1, name="odd")
    known.close()
    site.spawn("w", "exit", "0")
    assert site.client.wait_exit("w", "end", 20).exit_code == 0


def test_if_the_agent_is_killed_the_kernel_kills_the_workers_and_the_client_reports_it(folder: Path) -> None:
    run = new_run_id("agent-test")
    client = AgentClient(start_agent(run, TOKEN, folder), TOKEN)
    here = Site(run, folder, client)
    try:
        pids = [here.spawn("warm", "sleep", preload=("json",)), here.spawn("cold", "sleep")]
        pids += [fork_server.pid for fork_server in fork_servers(here)]
        assert len(pids) == 4
        os.kill(client.address.pid, signal.SIGSTOP)
        argv = [sys.executable, "-c", ""]
        waiting = client.submit_spawn("waiting", argv, log_path=folder / "waiting.log")
        os.kill(client.address.pid, signal.SIGKILL)
        until(lambda: not any(map(processes.is_alive, pids)), 20, "no worker outlives the agent")
        with pytest.raises(AgentGone, match=rf"the agent \(pid {client.address.pid}\) has ended"):
            waits.future(waiting, waits_for="agent", why="its end is noticed", timeout_s=20)
        with pytest.raises(AgentGone):
            until(lambda: client.list(), 10, "the client notices")
        assert not client.alive
        assert client.shut_down() == []
    finally:
        run_shm_dir(run).joinpath("agent.beacon").unlink(missing_ok=True)
        run_shm_dir(run).rmdir()


def test_the_agent_survives_ctrl_c_and_has_a_beacon(site: Site) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
        os.kill(site.client.address.pid, number)
    site.spawn("w", "sleep")
    (own,) = [state for state in read_beacons(site.run) if state.name == "agent"]
    assert (own.role, own.stage, own.pid) == ("agent", "serving", site.client.address.pid)
    until(lambda: read_beacons(site.run)[0].counters["workers"].value == 1, 5, "it counts its workers")


def test_sigterm_ends_the_agent_and_its_processes(folder: Path) -> None:
    run = new_run_id("agent-test")
    client = AgentClient(start_agent(run, TOKEN, folder, kill_grace_s=0.3), TOKEN)
    pid = Site(run, folder, client).spawn("w", "stubborn")
    os.kill(client.address.pid, signal.SIGTERM)
    until(lambda: not processes.is_alive(pid) and not client.alive, 10, "all have ended")
    assert not run_shm_dir(run).exists()


def test_an_agent_that_cannot_start_reports_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgentError, match="LOCKSTEP_TOKEN is not set"):
        start_agent(new_run_id("agent-test"), "", folder)


def test_a_broken_connection_ends_no_worker_of_a_controller_on_another_host(folder: Path) -> None:
    address = start_agent(new_run_id("agent-test"), TOKEN, folder, kill_grace_s=0.5, controller=None)
    client = AgentClient(address, TOKEN, lost_after_s=60.0)
    try:
        log = folder / "w.log"
        pid = client.spawn("w", [sys.executable, "-c", "import time; time.sleep(600)"], log_path=log)
    finally:
        client.close()
    time.sleep(2.0)  # ten checks of the agent for its controller
    again = AgentClient(address, TOKEN, lost_after_s=1.0)
    try:
        assert [(worker.pid, worker.alive) for worker in again.list()] == [(pid, True)]
    finally:
        again.close()
    until(lambda: not processes.is_alive(pid), 20, "the worker ends after the controller's grace period")
