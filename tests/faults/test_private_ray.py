"""A Ray that is started for a run, and other users who reach the host."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from needed_systems import needs_ray

from lockstep.base.folders import STALE_AFTER_S
from lockstep.config.cluster import RayClusterConfig as Config
from lockstep.watch.procfs import processes

pytestmark = needs_ray

STRANGER = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("tasks run as", ray.get(ray.remote(num_cpus=0)(lambda: "another user").remote()))
"""


def connect_as_other_user(address: str, **variables: str) -> str:
    """The output of a program of another user, with these variables, that connects to the Ray at the address."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, address], env={**environment, **variables}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_another_user_runs_nothing_in_the_ray_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from lockstep.cluster.ray.ray_session import close_session, open_session

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # as if for another cluster
    for _ in range(2):  # the second has another token
        open_session(Config(), 1, 0)
        try:
            assert os.environ["RAY_AUTH_MODE"] == "disabled"
            assert "RAY_AUTH_TOKEN" not in os.environ  # which workers of the run would get
            address = ray.get_runtime_context().gcs_address
            assert ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=60) == 7
            for variables in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}):
                output = connect_as_other_user(address, **variables)
                assert "another user" not in output
                assert "uthenticat" in output, output
        finally:
            close_session()


USER = """
import sys, time
from lockstep.cluster.ray import ray_session
from lockstep.config.cluster import RayClusterConfig
ray_session.open_session(RayClusterConfig(), 1, 0)
print(ray_session._private_ray.folder, ray_session._private_ray.cleanup.pid, flush=True)
time.sleep(300)
"""


@dataclass(frozen=True, slots=True)
class RayUser:
    """A process with a private Ray, and every process below it."""

    process: subprocess.Popen[str]
    folder: Path
    cleanup: psutil.Process
    below: list[psutil.Process]

    def agents(self) -> list[psutil.Process]:
        return [each for each in self.left() if AGENTS.intersection(processes.command_line(each.pid))]

    def left(self) -> list[psutil.Process]:
        return [each for each in self.below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    def left_after(self, within_s: float) -> list[psutil.Process]:
        deadline = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


@contextmanager
def user_of_ray() -> Iterator[RayUser]:
    process = subprocess.Popen([sys.executable, "-c", USER], stdout=subprocess.PIPE, text=True)
    user = None
    try:
        assert process.stdout is not None
        folder, cleanup = process.stdout.readline().split()
        below = psutil.Process(process.pid).children(recursive=True)
        user = RayUser(process, Path(folder), psutil.Process(int(cleanup)), below)
        deadline = time.monotonic() + 60.0
        while len(user.agents()) < len(AGENTS):  # they get their titles after they have begun
            assert time.monotonic() < deadline, below
            time.sleep(0.1)
            user.below[:] = psutil.Process(process.pid).children(recursive=True)
        yield user
    finally:
        process.kill()
        process.communicate()
        if user is not None:
            for each in user.left():
                each.kill()
            shutil.rmtree(user.folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_of_a_private_ray_outlives_a_killed_process() -> None:
    from lockstep.cluster.ray.ray_session import close_session, open_session

    with user_of_ray() as killed, user_of_ray() as other:
        killed.process.kill()
        killed.process.wait(10)
        assert killed.left_after(10.0) == []  # its agents alone would stay for a minute
        assert [each for each in other.below if each not in other.left()] == []

        other.cleanup.kill()
        other.process.kill()
        other.process.wait(10)
        time.sleep(5.0)
        assert len(other.agents()) == len(AGENTS)
        old = time.time() - 2 * STALE_AFTER_S
        os.utime(other.folder, (old, old))
        open_session(Config(), 1, 0)  # the next start on the host
        try:
            assert other.left() == []
            assert not other.folder.exists()
        finally:
            close_session()


def test_all_addresses_of_a_head_are_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.cluster.ray.ray_session import RayUnavailable, _check_listening

    def both(host: str, port: int, **more: Any) -> list[Any]:
        return [each for one in ("127.0.0.1", "::1") for each in resolve(one if host == "head" else host, port, **more)]

    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", both)

    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        port = listening.getsockname()[1]
        _check_listening(f"[::1]:{port}")
        _check_listening(f"head:{port}")  # 127.0.0.1 does not listen
    with pytest.raises(RayUnavailable, match="Connection refused"):
        _check_listening(f"[::1]:{port}")
