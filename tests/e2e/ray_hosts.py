"""Network namespaces as the hosts of a Ray cluster, each with shared memory of its own."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
CPUS = 2
HEALTH = {"period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "3", "initial_delay_ms": "0"}
"""A lost node is known in about six seconds instead of a minute."""

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one interface."""

    name: str
    address: str
    folder: Path
    """Of its Ray, and of its shared memory."""

    @property
    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OMP_"))}
        health = {f"RAY_health_check_{name}": value for name, value in HEALTH.items()}
        return own | health | {
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1",
            "LOCKSTEP_BEACONS": str(self.shared), "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip

    @property
    def shared(self) -> Path:
        return Path("/dev/shm") / self.name

    def argv(self, program: str, *arguments: str) -> list[str]:
        """A program of this environment, on this host."""
        return ["ip", "netns", "exec", self.name, str(BIN / program), *arguments]

    def start_ray(self, *arguments: str) -> None:
        """Its node of the cluster, ended with the host. Raises AssertionError where it does not come up."""
        common = [f"--node-ip-address={self.address}", f"--num-cpus={CPUS}", "--object-store-memory=100000000",
                  f"--temp-dir={self.folder}", "--disable-usage-stats"]  # fmt: skip
        done = subprocess.run(
            self.argv("ray", "start", *arguments, *common),
            env=self.environment, capture_output=True, text=True, timeout=170, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def cut_off(self) -> None:
        """Nothing goes in or out any more."""
        ip("-n", self.name, "link", "set", "eth", "down")

    def pids(self) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=10, check=True
        )
        return [int(line) for line in found.stdout.split()]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two that reach each other and nobody else. Their processes are killed in the end."""
    mark, number = secrets.token_hex(2), secrets.randbelow(250) + 1
    # Short folders: Ray's sockets are below them.
    here, there = (
        Host(f"lr{mark}{letter}", f"10.80.{number}.{n}", Path(tempfile.mkdtemp(prefix="lsr")))
        for n, letter in enumerate("ab", 1)
    )
    with ExitStack() as stack:
        for host in (here, there):
            stack.callback(shutil.rmtree, host.folder, ignore_errors=True)
            try:
                ip("netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
            stack.callback(_down, host)
        ip("link", "add", "eth", "netns", here.name, "type", "veth", "peer", "name", "eth", "netns", there.name)
        for host in (here, there):
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth")
            for device in ("lo", "eth"):
                ip("-n", host.name, "link", "set", device, "up")
            host.shared.mkdir(mode=0o700)
        yield here, there


def _down(host: Host) -> None:
    for pid in host.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ip("netns", "del", host.name)
    shutil.rmtree(host.shared, ignore_errors=True)


def start_cluster(made: Sequence[Host], port: int = 6379) -> str:
    """Ray on all of them, the first as the head; its address."""
    made[0].start_ray("--head", f"--port={port}", "--include-dashboard=false")
    address = f"{made[0].address}:{port}"
    for host in made[1:]:
        host.start_ray(f"--address={address}")
    return address
