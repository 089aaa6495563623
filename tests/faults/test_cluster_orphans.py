"""However the controller ends, nothing of its run remains: no worker, agent, fork server or shared memory."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.base.folders import run_shm_dir

SERVICES = os.pathsep.join([str(Path(__file__).parent.parent / "contract"), os.environ.get("PYTHONPATH", "")])

CONTROLLER = """
import signal, sys, time
from pathlib import Path
from cluster_services import Plain
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.cluster import LocalClusterConfig as Config
run, folder, mode = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
def spec(name, **arguments):
    return WorkerSpec(name, "tester", 0, "cluster_services:Plain", arguments, preload=("numpy",))
with LocalCluster(Config(), run, Path(folder), 1) as cluster:
    if mode == "starting":
        print("ready", flush=True)
        cluster.start([spec("a"), spec("b", fail="sleep")])
    workers = cluster.start([spec("idle"), spec("busy"), spec("deaf"), spec("stopped")])
    pending = workers[1].submit(Plain.sleep, 600.0)
    workers[2].submit(Plain.deaf, 600.0)
    time.sleep(0.3)
    import os
    os.kill(workers[3].pid, signal.SIGSTOP)
    print("ready", flush=True)
    if mode == "raising":
        raise ValueError("as recipes do")
    if mode == "exiting":
        os.dup2(2, 1)
        cluster.__class__.__exit__ = lambda *a: None
        sys.exit(0)
    pending.result("for ever")
"""


def processes_of(run: str) -> dict[int, str]:
    """Every process whose environment or command line names the run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
                if run.encode() in words + (entry / "environ").read_bytes():
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found[int(entry.name)] = words.replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


@contextmanager
def controller(tmp_path: Path, mode: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    run = f"orphans-{secrets.token_hex(4)}"
    folder = tmp_path / run  # the workers' environment names it
    environment = {**os.environ, "PYTHONPATH": SERVICES, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, run, str(folder), mode],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready == "ready\n", process.communicate(timeout=20)
        yield run, process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def remaining(run: str, within_s: float) -> dict[int, str]:
    """The processes of the run that remain after that time."""
    deadline = time.monotonic() + within_s
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_the_search_finds_all_processes_of_a_run(tmp_path: Path) -> None:
    with controller(tmp_path, "waiting") as (run, process):
        found = processes_of(run)
        assert process.pid in found
        assert len(found) >= 6, "the controller, the agent, four workers"
        assert run_shm_dir(run).is_dir()
        assert (Path("/proc") / str(process.pid)).exists()


@pytest.mark.parametrize("mode", ["waiting", "starting"])
def test_kill_9_of_the_controller(tmp_path: Path, mode: str) -> None:
    with controller(tmp_path, mode) as (run, process):
        time.sleep(0.5)
        process.kill()
        process.wait(10)
        assert remaining(run, 8.0) == {}
        assert not run_shm_dir(run).exists()


@pytest.mark.parametrize("mode", ["waiting", "starting"])
@pytest.mark.parametrize("group", [False, True])
def test_ctrl_c(tmp_path: Path, mode: str, group: bool) -> None:
    with controller(tmp_path, mode) as (run, process):
        time.sleep(0.5)
        if group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=15)
        assert process.returncode == -signal.SIGINT or "KeyboardInterrupt" in errors
        assert remaining(run, 0.5) == {}
        assert not run_shm_dir(run).exists()


def test_a_second_ctrl_c_while_closing(tmp_path: Path) -> None:
    with controller(tmp_path, "waiting") as (run, process):
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        process.communicate(timeout=15)
        assert remaining(run, 2.0) == {}
        assert not run_shm_dir(run).exists()


@pytest.mark.parametrize("mode", ["raising", "exiting"])
def test_an_exception_and_a_forgotten_close(tmp_path: Path, mode: str) -> None:
    with controller(tmp_path, mode) as (run, process):
        process.communicate(timeout=20)
        assert process.returncode == (1 if mode == "raising" else 0)
        assert remaining(run, 0.5) == {}
        assert not run_shm_dir(run).exists()


def test_kill_9_of_the_agent_ends_the_workers_and_is_reported(tmp_path: Path) -> None:
    with controller(tmp_path, "waiting") as (run, process):
        (agent,) = [pid for pid, words in processes_of(run).items() if "lockstep.watch.agent.node_agent" in words]
        os.kill(agent, signal.SIGKILL)
        _, errors = process.communicate(timeout=15)
        assert process.returncode == 1
        assert "WorkerDied: busy vanished" in errors
        assert remaining(run, 2.0) == {}
        assert not run_shm_dir(run).exists()
