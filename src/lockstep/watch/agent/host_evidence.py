"""Collects an agent's evidence about the processes of its host for an incident: beacons, logs, environment, machine."""

import dataclasses
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.base.secrets import redact, redact_environment, secret_values
from lockstep.watch.agent.process_monitor import ProcessState
from lockstep.watch.agent.timeline_follower import TimelineFollower
from lockstep.watch.beacon.beacon_records import BeaconState
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.procfs import exit_causes, processes

DUMP_BYTES = 4 << 20
"""The limit for all flight-recorder dumps of a host."""
_BEACON_KEYS = {"progress_count": "moves"}
_WAIT_KEYS = {"waits_for": "whom"}
"""Fields of a beacon and of a wait that have other names in `beacons.json`."""
MAX_PROCESSES = 32
"""The maximum number of processes per host in an incident."""

RECENT_CALLS = 128
"""The most calls on a communicator, and spans of a process, in the timeline of an incident."""


def collect_host_evidence(chosen: Iterable[ProcessState], lines: int) -> dict[str, Any]:
    """The evidence about these processes in JSON form, with secrets redacted. Times in beacons are on the host's
    monotonic clock; `now` has the current time of this clock and of the wall clock."""
    selected = list(chosen)[:MAX_PROCESSES]
    environment = _first_environment(selected)
    known = {value for each in (environment, os.environ) for value in secret_values(each)}
    found = {
        "now": {"monotonic_ns": time.monotonic_ns(), "wall": time.time()},
        "beacons": {
            process.name: beacon_to_json(state)
            for process in selected
            if (state := _read_current_beacon(process)) is not None
        },
        "timeline": TimelineFollower(RECENT_CALLS).read([each.beacon.path for each in selected if each.beacon]),
        "logs": {process.name: _last_lines(process.log, lines) for process in selected if process.log is not None},
        "processes": [_process_to_json(process) for process in selected],
        "environment": redact_environment(environment),
        "machine": {
            "node": platform.node(), "system": platform.platform(), "python": sys.version.split()[0],
            "cpus": os.cpu_count(), "load": list(os.getloadavg()), "memory": host_memory(),
        },
    }  # fmt: skip
    redacted: dict[str, Any] = redact(found, sorted(known, key=len, reverse=True))  # before anything is sent
    return redacted


def read_dumps(folder: Path) -> dict[str, str]:
    """The text of the flight-recorder dumps in a folder, by file name, up to `DUMP_BYTES` in total."""
    found: dict[str, str] = {}
    left = DUMP_BYTES
    try:
        paths = sorted(folder.glob("*.json"))
        for path in paths:
            if path.stat().st_size <= left:
                found[path.name] = path.read_text(errors="replace")
                left -= len(found[path.name])
    except OSError:
        pass
    return found


def beacon_to_json(state: BeaconState) -> dict[str, Any]:
    """Converts a beacon to the form stored in an incident's `beacons.json`."""
    found = {_BEACON_KEYS.get(name, name): value for name, value in _to_plain(dataclasses.asdict(state)).items()}
    found["waits"] = [{_WAIT_KEYS.get(name, name): value for name, value in wait.items()} for wait in found["waits"]]
    return found


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _read_current_beacon(process: ProcessState) -> BeaconState | None:
    """Reads the process's beacon now, events included."""
    return read_beacon(process.beacon.path) if process.beacon is not None else None


def _last_lines(log: Path, lines: int) -> str:
    return "\n".join(exit_causes.read_tail(log).splitlines()[-lines:])


def _process_to_json(process: ProcessState) -> dict[str, Any]:
    usage = process.usage
    return {
        "name": process.name, "role": process.role, "rank": process.rank, "pid": process.pid,
        "life": process.liveness.name.lower(), "exit_code": None if process.living else process.exit_code,
        "where": process.where, "error": process.error,
        "cause": process.cause, "state": usage.state if usage else None, "cpu_s": usage.cpu_s if usage else None,
        "read": usage.read if usage else None, "written": usage.written if usage else None,
    }  # fmt: skip


def _first_environment(selected: Iterable[ProcessState]) -> dict[str, str]:
    """The environment of the first process that can be read, else that of the agent."""
    for process in selected:
        if found := processes.environment(process.pid):
            return found
    return dict(os.environ)


def host_memory() -> dict[str, int]:
    """Memory of the host, in bytes."""
    found = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable", "SwapFree", "Shmem"):
                found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        pass
    return found
