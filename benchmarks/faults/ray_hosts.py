"""Two hosts of a Ray cluster on one machine: this network and a network namespace, with a link that can be cut."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.faults.network_namespaces import Cable

BOUND_S = 120.0
LEAVES = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
"""Nodes leave a cluster whose head has not responded for this many seconds."""
RAY = str(Path(sys.executable).with_name("ray"))


def until(check: Callable[[], object], seconds: float, what: str) -> float:
    """Wait until `check()` is true; returns how long it took."""
    started = time.monotonic()
    while not check():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


class Hosts:
    """Host a is this network, with the head and the process that starts runs; host b is a namespace. Each has its own
    folder for the shared memory of runs."""

    def __init__(self, folder: Path) -> None:
        self.cable = Cable.any("lr", "10.79")
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="lsr"))
        self.port = free_port()
        self._started: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "3", "RAY_health_check_initial_delay_ms": "0",
        }  # fmt: skip

    @property
    def address(self) -> str:
        return f"{self.cable.here}:{self.port}"

    @property
    def other(self) -> str:
        """Address of host b."""
        return self.cable.there

    def shared(self, host: str) -> Path:
        """The folder for the shared memory of runs on that host."""
        return self.folder / f"shm-{host}"

    def connect(self) -> None:
        """Create the second host and the link."""
        self.cable.lay()

    def cut(self) -> None:
        self.cable.cut()

    def mend(self) -> None:
        self.cable.mend()

    def start_ray(self, cpus: int = 4, gpus: tuple[int, int] = (0, 0)) -> None:
        """Start Ray on both hosts, with fictitious GPUs; returns when the head listens."""
        own = self._own(cpus, gpus[0])
        head = ["--head", "--port", str(self.port), "--include-dashboard=false", "--temp-dir", str(self.temporary)]
        self._start("a", [RAY, "start", *head, "--node-ip-address", self.cable.here, *own])
        until(self._listens, BOUND_S, "the head listens")
        self.join_b(cpus, gpus[1])

    def meet(self) -> None:
        """Wait until the head knows both hosts."""
        until(lambda: self._status().count(" node_") == 2, BOUND_S, "both hosts are nodes of the cluster")

    def _status(self) -> str:
        words = [RAY, "status", "--address", self.address]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60).stdout

    def join_b(self, cpus: int = 4, gpus: int = 0) -> None:
        words = [RAY, "start", "--address", self.address, "--node-ip-address", self.cable.there, *self._own(cpus, gpus)]
        self._start("b", [*self.cable.inside, *words])

    def end_b(self) -> None:
        """Kill all processes of host b at once, as a power failure would."""
        words = ["ip", "netns", "pids", self.cable.name]
        found = subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout
        ours = [psutil.Process(int(pid)) for pid in found.split()]
        for process in ours:
            process.kill()
        psutil.wait_procs(ours, timeout=20)

    def end_head(self) -> None:
        """Kill the head; its own node ends at once, the other one within ten seconds."""
        ours = [psutil.Process(each.pid) for each in self._started if each.poll() is None]
        (head,) = [each for one in ours for each in one.children(recursive=True) if "gcs_server" in each.name()]
        head.kill()

    def has_ended(self) -> bool:
        """Whether Ray has ended on both hosts."""
        return all(each.poll() is not None for each in self._started)

    def _own(self, cpus: int, gpus: int) -> list[str]:
        few = ["--num-cpus", str(cpus), "--object-store-memory", str(100 << 20), "--block", "--disable-usage-stats"]
        return [*few, *(["--num-gpus", str(gpus)] if gpus else [])]

    def _start(self, host: str, words: list[str]) -> None:
        with (self.folder / f"ray-{host}.log").open("ab") as output:
            self._started.append(
                subprocess.Popen(
                    words, env={**self.environment, **LEAVES, "LOCKSTEP_BEACONS": str(self.shared(host))},
                    stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
                )
            )  # fmt: skip

    def _listens(self) -> bool:
        with socket.socket() as trial:
            return trial.connect_ex((self.cable.here, self.port)) == 0

    def close(self) -> None:
        """End all processes that this object started."""
        ours = [psutil.Process(each.pid) for each in self._started if each.poll() is None]
        ours += [child for each in ours for child in each.children(recursive=True)]
        for process in ours:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(ours, timeout=20)
        self.cable.remove()
        shutil.rmtree(self.temporary, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
