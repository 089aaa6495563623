"""What is ended after a killed process that had a private Ray, and what is not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.cluster.ray.ray_cleanup import end_processes, ray_processes, start_cleanup
from lockstep.watch.procfs import processes

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process with these arguments that has a file open."""
    started = list[subprocess.Popen[bytes]]()

    def run(file: Path, *arguments: str, mode: str = "ab") -> subprocess.Popen[bytes]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        with file.open(mode) as opened:
            started.append(subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=opened))
        return started[-1]

    yield run
    for each in started:
        each.kill()
        each.wait()


def titled(title: str) -> tuple[str, ...]:
    """The arguments of a process with this title."""
    return "/bin/bash", "-c", f"exec -a '{title}' sleep 60"


def test_only_processes_of_the_ray_in_the_folder_are_ended(tmp_path: Path, start: Start) -> None:
    folder, other = tmp_path / "lsr-1", tmp_path / "lsr-12"
    agent = start(folder / "logs" / "agent.log", *titled("ray::DashboardAgent"))
    monitor = start(folder / "logs" / "monitor.log", *titled(f"python monitor.py --temp-dir={folder}"))
    stopped = start(folder / "logs" / "worker.log", *titled("ray::IDLE"))
    spared = [
        start(other / "agent.log", *titled("ray::DashboardAgent")),  # of another Ray
        start(folder / "driver.log", *titled("python train.py")),  # a child that has inherited a file
        start(folder / "logs" / "agent.log", *titled(f"tail -f {folder}/logs/agent.log"), mode="rb"),
        start(tmp_path / "log", *titled(f"ray::Actor {folder}")),
    ]
    until(lambda: all(processes.command_line(each.pid)[-1:] == ["60"] for each in (agent, monitor, stopped, *spared)))
    stopped.send_signal(signal.SIGSTOP)

    assert sorted(ray_processes(folder)) == sorted([agent.pid, monitor.pid, stopped.pid])
    end_processes(folder)

    assert [each.wait(5) for each in (agent, monitor, stopped)] == [-signal.SIGKILL] * 3
    assert [each.poll() for each in spared] == [None] * 4


def test_what_is_left_ends_with_the_process_that_started_ray(tmp_path: Path, start: Start) -> None:
    code = (
        "import sys, time; from pathlib import Path; from lockstep.cluster.ray.ray_cleanup import start_cleanup\n"
        "print(start_cleanup(Path(sys.argv[1])).pid, flush=True); time.sleep(60)"
    )
    folder = tmp_path / "lsr-1"
    agent = start(folder / "agent.log", *titled("ray::DashboardAgent"))
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        cleanup = int(owner.stdout.readline())
        time.sleep(1.5)
        assert agent.poll() is None
        assert os.getsid(cleanup) == cleanup, "signals to the owner's process group do not reach it"
        owner.kill()
    assert agent.wait(10) == -signal.SIGKILL
    until(lambda: not processes.is_alive(cleanup))


def test_a_process_that_has_ended_before_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "start_ticks", lambda pid: 1)  # as if the pid were that of an earlier process
    assert start_cleanup(tmp_path).wait(20) == 0


def until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)
