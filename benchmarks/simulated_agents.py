"""Node agents of many hosts in one process: `python -m benchmarks.simulated_agents`, with `Job` as JSON on stdin.

Each host has its own port and speaks the agents' protocol with the run's token. It reports what
`benchmarks.diagnosis_cost` simulates, and answers requests for evidence with a real beacon, log lines and environment
for each process. The first line of the output has the addresses. Each further line on stdin is a command, answered by
one line:

    healthy, waiting, stalled      what all hosts report from now on
    counts                         -> {"observed", "reports", "requests": {op: n}, "asked": {op: hosts}, "sent_bytes"}
"""

import contextlib
import json
import os
import selectors
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.diagnosis_cost import ABOUT, PER_HOST, healthy, messages, stalled, with_liveness
from lockstep.base.folders import new_run_id
from lockstep.base.limits import raise_descriptor_limit
from lockstep.base.transport.auth_handshake import Listener
from lockstep.base.transport.frames import Connection, WireError
from lockstep.watch.agent.host_evidence import beacon_to_json
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.diagnosis.evidence_types import Liveness

EVENTS = 200
"""In the beacon of a process, as many as its ring may hold after some minutes."""
MAX_BURST = 50
"""Reports between two looks at requests: a real host does not wait for the reports of others before it answers."""
LOG_LINE = "2026-11-26 16:02:11,482 INFO trainer.py:218 step 1042 loss 1.8731 grad_norm 0.412 tokens/s 48211 lr 1.0e-6"
STACK = [{"thread": 1, "name": "MainThread", "active": True, "frames": [["step", "train.py", n] for n in range(40)]}]


@dataclass(frozen=True, slots=True)
class Job:
    run: str
    token: str
    hosts: int
    dump_bytes: int
    """Of the flight recorder of a process."""


class Evidence:
    """What a host answers to requests for evidence."""

    def __init__(self, job: Job) -> None:
        run = new_run_id("simulated")
        beacon = open_beacon(run, "policy-0", "policy", 0)
        beacon.stage("train")
        for number in range(EVENTS):
            beacon.event("step", f"train {number}")
        self._beacon = json.dumps(beacon_to_json(_present(read_beacon(beacon.path))))
        close_beacon(remove=True)
        self._log_line, self._dump = json.dumps(LOG_LINE)[1:-1], json.dumps("x" * job.dump_bytes)
        self._environment = json.dumps({f"VARIABLE_{n}": f"/some/path/of/this/host:{n}" for n in range(80)})

    def bundle(self, host: str, names: list[str], lines: int) -> str:
        log = "\\n".join([self._log_line] * lines)
        beacons = ", ".join(f'"{name}": {self._beacon}' for name in names)
        logs = ", ".join(f'"{name}": "{log}"' for name in names)
        facts = [{"name": name, "life": "running", "cpu_s": 4021.3, "read": 1 << 30, "written": 1} for name in names]
        return (
            f'"host": "{host}", "beacons": {{{beacons}}}, "logs": {{{logs}}}, "processes": {json.dumps(facts)}, '
            f'"environment": {self._environment}, "machine": {{"node": "{host}", "cpus": 96}}'
        )

    def dumps(self, names: list[str]) -> str:
        return '"dumps": {' + ", ".join(f'"{name}.json": {self._dump}' for name in names) + "}"


def _present(state: Any) -> Any:
    if state is None:
        raise SystemExit("the beacon of this process cannot be read")
    return state


@dataclass
class _Host:
    name: str
    listener: Listener
    connection: Connection | None = None
    every_s: float = 0.5
    calm_s: float = 1.5
    due: float = float("inf")
    dump_names: list[str] | None = None


class Agents:
    """All hosts, one thread, one selector."""

    def __init__(self, job: Job) -> None:
        self._evidence, self._selector = Evidence(job), selectors.DefaultSelector()
        self._rosters, self._states = _reports(job.hosts * PER_HOST)
        self._reported = "healthy"
        self._reports, self._sent = 0, 0
        self._requests: Counter[str] = Counter()
        self._asked: dict[str, set[str]] = defaultdict(set)
        self._hosts = [_Host(f"host{n}", Listener(job.token, job.run, 1, "agent")) for n in range(job.hosts)]
        for index, host in enumerate(self._hosts):
            self._selector.register(host.listener, selectors.EVENT_READ, lambda mask, index=index: self._accept(index))
        self.addresses = [
            ServiceAddress(job.run, 1, each.listener.host, each.listener.port, os.getpid()) for each in self._hosts
        ]

    def run(self) -> None:
        """Serves until stdin is closed."""
        closed = False

        def read(mask: int) -> None:
            nonlocal closed
            text = os.read(sys.stdin.fileno(), 4096).decode()
            closed = not text
            for line in text.split():
                print(json.dumps(self._command(line)), flush=True)

        self._selector.register(sys.stdin, selectors.EVENT_READ, read)
        while not closed:
            for key, mask in self._selector.select(0.02):
                key.data(mask)
            now = time.monotonic()
            due = [index for index, host in enumerate(self._hosts) if now >= host.due]
            for index in sorted(due, key=lambda index: self._hosts[index].due)[:MAX_BURST]:
                self._report(index)

    def _command(self, word: str) -> dict[str, Any]:
        if word != "counts":
            self._reported = word
            for host in self._hosts:
                host.due = min(host.due, time.monotonic()) if host.due < float("inf") else host.due
        asked = {name: len(hosts) for name, hosts in self._asked.items()}
        found = {
            "observed": sum(each.due < float("inf") for each in self._hosts), "reports": self._reports,
            "requests": dict(self._requests), "asked": asked, "sent_bytes": self._sent,
        }  # fmt: skip
        if word == "counts":
            self._requests.clear()
            self._asked.clear()
            self._reports = self._sent = 0
        return found

    def _accept(self, index: int) -> None:
        host = self._hosts[index]
        while (connection := host.listener.accept(0)) is not None:
            host.connection = connection
            self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._serve(index))

    def _serve(self, index: int) -> None:
        host = self._hosts[index]
        connection = host.connection
        if connection is None:
            return
        try:
            while (frame := connection.recv(0)) is not None:
                self._answer(index, json.loads(frame))
            self._flush(host)
        except WireError:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection)
            host.connection, host.due = None, float("inf")

    def _answer(self, index: int, message: dict[str, Any]) -> None:
        host, operation = self._hosts[index], str(message["op"])
        self._requests[operation] += 1
        self._asked[operation].add(host.name)
        match operation:
            case "observe":
                host.every_s, host.calm_s = float(message["every_s"]), float(message["calm_s"])
                self._send(host, f'{{"reply": "{message["id"]}", "host": "{host.name}", "pid": 1}}'.encode())
                self._send(host, self._rosters[index])
                host.due = time.monotonic() + host.calm_s * index / len(self._hosts)
                self._report(index)
                return
            case "clock":
                content = f'"monotonic_ns": {time.monotonic_ns()}, "wall": 0'
            case "stacks":
                content = '"stacks": ' + json.dumps({str(pid): STACK for pid in message["pids"]})
            case "collect":
                content = self._evidence.bundle(host.name, message["names"], int(message["lines"]))
            case "dump":
                host.dump_names, content = list(message["names"]), '"folder": ""'
            case "dumps":
                content = self._evidence.dumps(host.dump_names or [])
            case "free":
                content = '"freed": ' + json.dumps(message["names"] if message["breaks"] else [])
            case _:
                content = f'"error": "unknown operation {operation}"'
        self._send(host, f'{{"reply": "{message["id"]}", {content}}}'.encode())

    def _report(self, index: int) -> None:
        host = self._hosts[index]
        host.due = time.monotonic() + (host.calm_s if self._reported == "healthy" else host.every_s)
        self._reports += 1
        self._send(host, self._states[self._reported][index])

    def _send(self, host: _Host, frame: bytes) -> None:
        if host.connection is not None:
            with contextlib.suppress(WireError):  # `_serve` notices it
                host.connection.queue(frame)
                self._sent += len(frame)
                self._flush(host)

    def _flush(self, host: _Host) -> None:
        assert host.connection is not None
        mask = selectors.EVENT_READ
        if not host.connection.flush():
            mask |= selectors.EVENT_WRITE
        key = self._selector.get_key(host.connection)
        if key.events != mask:
            self._selector.modify(host.connection, mask, key.data)


def _reports(ranks: int) -> tuple[list[bytes], dict[str, list[bytes]]]:
    """Rosters, and states by what is reported. `stalled`: one rank is stopped, all others have waited for a minute,
    directly or not; `waiting`: the same after a second, when nothing is late yet."""
    base, culprit = healthy(ranks), ranks // 3
    jobs = {
        "healthy": base,
        "waiting": stalled(base, culprit, waits_s=1.0),
        "stalled": with_liveness(stalled(base, culprit), culprit, Liveness.STOPPED),
    }
    rosters, _ = messages(base)
    states = {}
    for name, evidence in jobs.items():
        more = json.dumps({"about": ABOUT, "calm": name == "healthy"})[1:]
        states[name] = [each[:-1] + b", " + more.encode() for each in messages(evidence)[1]]
    return rosters, states


def main() -> None:
    raise_descriptor_limit()
    agents = Agents(Job(**json.loads(sys.stdin.readline())))
    print(json.dumps([asdict(each) for each in agents.addresses]), flush=True)
    agents.run()


if __name__ == "__main__":
    main()
