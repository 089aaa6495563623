"""What an agent collects about its host's processes for an incident: beacons, ends of logs, environments, facts."""

import dataclasses
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.base.secrets import redact, secret_values
from lockstep.watch.agent.process_monitor import ProcessState
from lockstep.watch.beacon.beacon_records import BeaconState
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.procfs import exit_causes

DUMP_BYTES = 4 << 20
"""The limit for all flight-recorder dumps of a host."""
_WAIT_KEYS = {"waits_for": "whom"}
"""Fields of a wait that `beacons.json` calls otherwise."""
MAX_PROCESSES = 32
"""The maximum number of processes per host in an incident."""


def collect_host_evidence(chosen: Iterable[ProcessState], lines: int) -> dict[str, Any]:
    """All evidence about these processes, JSON-able. Times of beacons are of the host's monotonic clock; `now` says
    what it and the wall clock read."""
    some = list(chosen)[:MAX_PROCESSES]
    environment = _first_environment(some)
    known = {value for each in (environment, os.environ) for value in secret_values(each)}
    found = {
        "now": {"monotonic_ns": time.monotonic_ns(), "wall": time.time()},
        "beacons": {
            seen.name: beacon_to_json(state) for seen in some if (state := _read_current_beacon(seen)) is not None
        },
        "logs": {seen.name: _last_lines(seen.log, lines) for seen in some if seen.log is not None},
        "processes": [_process_to_json(seen) for seen in some],
        "environment": environment,
        "machine": {
            "node": platform.node(), "system": platform.platform(), "python": sys.version.split()[0],
            "cpus": os.cpu_count(), "load": list(os.getloadavg()), "memory": host_memory(),
        },
    }  # fmt: skip
    redacted: dict[str, Any] = redact(found, sorted(known, key=len, reverse=True))  # before it travels
    return redacted


def read_dumps(folder: Path) -> dict[str, str]:
    """The flight-recorder dumps in a folder, by file name, as text; those that are complete and not too large."""
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
    found = dict(_to_plain(dataclasses.asdict(state)))
    found["waits"] = [{_WAIT_KEYS.get(name, name): value for name, value in wait.items()} for wait in found["waits"]]
    return found


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _read_current_beacon(seen: ProcessState) -> BeaconState | None:
    """Reads the process's beacon now, events included."""
    return read_beacon(seen.beacon.path) if seen.beacon is not None else None


def _last_lines(log: Path, lines: int) -> str:
    return "\n".join(exit_causes.read_tail(log).splitlines()[-lines:])


def _process_to_json(seen: ProcessState) -> dict[str, Any]:
    usage = seen.usage
    return {
        "name": seen.name, "role": seen.role, "rank": seen.rank, "pid": seen.pid, "life": seen.life.name.lower(),
        "exit_code": None if seen.living else seen.exit_code, "where": seen.where, "error": seen.error,
        "cause": seen.cause, "state": usage.state if usage else None, "cpu_s": usage.cpu_s if usage else None,
        "read": usage.read if usage else None, "written": usage.written if usage else None,
    }  # fmt: skip


def _first_environment(some: Iterable[ProcessState]) -> dict[str, str]:
    """The environment of the first of them that still has one, else the agent's own."""
    for seen in some:
        try:
            raw = Path(f"/proc/{seen.pid}/environ").read_bytes()
        except OSError:
            continue
        pairs = [part.decode(errors="replace").partition("=") for part in raw.split(b"\0") if b"=" in part]
        if pairs:
            return {name: value for name, _, value in pairs}
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
