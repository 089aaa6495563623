"""What an incident costs the supervisor of a large job: `python -m benchmarks.incident_cost`. Prints a table.

A real supervisor process watches 2,000 simulated hosts with 8 processes each (`benchmarks.simulated_agents`) over
loopback sockets. Measured are its CPU seconds (all threads) to connect to the hosts, for a second of a healthy job, for
an incident (one rank is stopped, all others wait; from the first report of it to the incident on disk and the verdict
delivered to the ranks), and for a second of the stalled job afterwards.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.diagnosis_cost import PER_HOST
from benchmarks.simulated_agents import Job
from lockstep.base import waits
from lockstep.base.folders import new_run_id
from lockstep.base.limits import raise_descriptor_limit
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.procfs import processes
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorEvent, SupervisorSettings

BOUND_S = 120.0
QUIET_S = 5.0
"""How long a healthy and a stalled job are measured."""


@dataclass(frozen=True, slots=True)
class IncidentCost:
    hosts: int
    connect_cpu_s: float
    healthy_cpu_s: float
    """Per second."""
    incident_cpu_s: float
    """With the reports of all hosts in the same time, which alone cost `stalled_cpu_s` per second."""
    incident_wall_s: float
    publish_wall_s: float
    """From the first report of the stall to the verdict, which comes when its incident is on disk."""
    stalled_cpu_s: float
    """Per second, after the incident."""
    peak_bytes: int
    """The most memory of the supervisor."""
    incident_bytes: int
    asked: dict[str, int]
    """Hosts that got a request during the incident, by operation."""
    received_bytes: int
    """From all hosts, during the incident."""
    gaps: list[str]
    lost: int
    """Hosts without a connection in the end, and culprits beyond the one that is stopped."""


class SimulatedHosts:
    """The process of `benchmarks.simulated_agents`."""

    def __init__(self, job: Job) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.simulated_agents"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        self.addresses = [ServiceAddress(**each) for each in self._exchange(json.dumps(asdict(job)))]

    def command(self, word: str) -> dict[str, Any]:
        found: dict[str, Any] = self._exchange(word)
        return found

    def close(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        waits.process(self._popen, waits_for="simulated hosts", why="their end", timeout_s=30.0, notice_after_s=None)

    def _exchange(self, line: str) -> Any:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write(line.encode() + b"\n")
        self._popen.stdin.flush()
        answer = self._popen.stdout.readline()
        if not answer:
            raise SystemExit("the simulated hosts have ended")
        return json.loads(answer)


def until(check: Callable[[], object], why: str) -> float:
    """Waits until `check()` is true; the seconds that took."""
    began = time.monotonic()
    waits.poll(lambda: check() or None, kind="process", waits_for="supervisor", why=why, timeout_s=BOUND_S)
    return time.monotonic() - began


def cpu_s(pid: int) -> float:
    used = processes.process_usage(pid)
    if used is None:
        raise SystemExit("the supervisor has ended")
    return used.cpu_s


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def per_second(pid: int, seconds: float) -> float:
    before, began = cpu_s(pid), time.monotonic()
    waits.sleep(seconds, "measuring a quiet job")
    return (cpu_s(pid) - before) / (time.monotonic() - began)


def measure(hosts: int, dump_bytes: int, folder: Path, say: Callable[[str], None]) -> IncidentCost:
    job = Job(new_run_id("incident-cost"), secrets.token_hex(32), hosts, dump_bytes)
    simulated = SimulatedHosts(job)
    events: list[SupervisorEvent] = []
    settings = SupervisorSettings(
        job.run, 1, folder, folder / "incidents", simulated.addresses, os.getpid(), StallThresholds(), "free"
    )
    supervision = SupervisorClient(settings, job.token, events.append)
    try:
        until(supervision.connected.is_set, "its start")
        pid = supervision.pid
        assert pid is not None
        until(lambda: simulated.command("counts")["observed"] == hosts, "connections to all hosts")
        waits.sleep(2 * QUIET_S, "the first reports")
        connect = cpu_s(pid)
        say(f"connected: {connect:.2f} s")
        steady = per_second(pid, QUIET_S)
        say(f"healthy: {steady:.3f} s per second")
        simulated.command("waiting")
        waits.sleep(3.0, "reports of a wait that is not late")
        assert not events, f"a healthy job has verdicts: {events[0].headline}"
        simulated.command("counts")
        before, began = cpu_s(pid), time.monotonic()
        simulated.command("stalled")
        publish = until(lambda: any(each.incident for each in events), "the incident")
        until(lambda: any(each.done for each in events), "delivery of the verdict")
        incident, wall = cpu_s(pid) - before, time.monotonic() - began
        counts = simulated.command("counts")
        say(f"incident and reports: {incident:.2f} s in {wall:.1f} s")
        after = per_second(pid, max(QUIET_S, 2 * settings.patience.host_s))
        written = Path(next(each.incident for each in events if each.incident) or "")
        lost = hosts - simulated.command("counts")["observed"] + sum(len(each.who) != 1 for each in events)
        return IncidentCost(
            hosts, connect, steady, incident, wall, publish, after, peak_bytes(pid),
            sum(each.stat().st_size for each in written.rglob("*")), counts["asked"], counts["sent_bytes"],
            json.loads((written / "verdict.json").read_text())["gaps"], lost,
        )  # fmt: skip
    finally:
        supervision.close()
        simulated.close()


def table(found: IncidentCost) -> list[str]:
    """Lines of Markdown."""
    asked = ", ".join(f"{name} {count:,}" for name, count in sorted(found.asked.items()))
    of_reports = found.incident_wall_s * found.stalled_cpu_s
    rows = [
        ("connections to all hosts, first reports", f"{found.connect_cpu_s:.2f} s of CPU"),
        ("a second of a healthy job", f"{found.healthy_cpu_s:.3f} s of CPU"),
        ("an incident, and reports meanwhile", f"{found.incident_cpu_s:.2f} s of CPU in {found.incident_wall_s:.1f} s"),
        ("of it beyond the reports", f"{max(0.0, found.incident_cpu_s - of_reports):.2f} s of CPU"),
        ("until the incident is on disk", f"{found.publish_wall_s:.1f} s"),
        ("a second of the stalled job", f"{found.stalled_cpu_s:.3f} s of CPU"),
        ("peak memory", f"{found.peak_bytes / (1 << 20):.0f} MiB"),
        ("received during the incident", f"{found.received_bytes / (1 << 20):.1f} MiB"),
        ("size of the incident", f"{found.incident_bytes / (1 << 20):.1f} MiB"),
        ("hosts that were asked", asked),
        ("gaps of the incident", "; ".join(found.gaps[:4]) or "none"),
        ("hosts lost", str(found.lost)),
    ]
    head = f"{found.hosts:,} hosts with {PER_HOST} processes each; load {os.getloadavg()[0]:.1f}"
    return [head, "", "| supervisor | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2000, help="a multiple of 16")
    parser.add_argument("--dump-kib", type=int, default=64, help="size of the flight recorder's dump of a process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    options = parser.parse_args(arguments)
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory(prefix="lockstep-incident-") as scratch:
        found = measure(options.hosts, options.dump_kib << 10, Path(scratch), lambda text: print(text, file=sys.stderr))
    print("\n".join(table(found)))
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=2) + "\n")


if __name__ == "__main__":
    main()
