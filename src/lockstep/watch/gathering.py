"""What an agent gathers of its host's processes for an incident: beacons, ends of logs, environments, facts."""

import dataclasses
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.watch import causes
from lockstep.watch.beacon import BeaconState, read_beacon
from lockstep.watch.eyes import Seen
from lockstep.watch.secrets import redact, secret_values

DUMP_BYTES = 4 << 20
"""Of a host's flight recorders together."""
MOST = 32
"""Processes of a host, at most: with more, those that were not named first are like the others."""


def gather(chosen: Iterable[Seen], lines: int) -> dict[str, Any]:
    """Everything of these processes, JSON-able. Times of beacons are of the host's monotonic clock; `now` says what it
    and the wall clock read."""
    some = list(chosen)[:MOST]
    environment = _environment(some)
    known = {value for each in (environment, os.environ) for value in secret_values(each)}
    found = {
        "now": {"monotonic_ns": time.monotonic_ns(), "wall": time.time()},
        "beacons": {seen.name: as_json(state) for seen in some if (state := _beacon(seen)) is not None},
        "logs": {seen.name: _lines(seen.log, lines) for seen in some if seen.log is not None},
        "processes": [_process(seen) for seen in some],
        "environment": environment,
        "machine": {
            "node": platform.node(), "system": platform.platform(), "python": sys.version.split()[0],
            "cpus": os.cpu_count(), "load": list(os.getloadavg()), "memory": memory(),
        },
    }  # fmt: skip
    redacted: dict[str, Any] = redact(found, sorted(known, key=len, reverse=True))  # before it travels
    return redacted


def dumps(folder: Path) -> dict[str, str]:
    """The flight-recorder dumps in a folder, by file name, as text; those that are whole and not too large."""
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


def as_json(state: BeaconState) -> dict[str, Any]:
    """A beacon as JSON has it."""
    return dict(_plain(dataclasses.asdict(state)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _beacon(seen: Seen) -> BeaconState | None:
    """As it is now, events included."""
    return read_beacon(seen.beacon.path) if seen.beacon is not None else None


def _lines(log: Path, lines: int) -> str:
    return "\n".join(causes.tail(log).splitlines()[-lines:])


def _process(seen: Seen) -> dict[str, Any]:
    usage = seen.usage
    return {
        "name": seen.name, "role": seen.role, "rank": seen.rank, "pid": seen.pid, "life": seen.life.name.lower(),
        "exit_code": None if seen.living else seen.exit_code, "where": seen.where, "error": seen.error,
        "cause": seen.cause, "state": usage.state if usage else None, "cpu_s": usage.cpu_s if usage else None,
        "read": usage.read if usage else None, "written": usage.written if usage else None,
    }  # fmt: skip


def _environment(some: Iterable[Seen]) -> dict[str, str]:
    """Of the first of them that still has one, else the agent's own."""
    for seen in some:
        try:
            raw = Path(f"/proc/{seen.pid}/environ").read_bytes()
        except OSError:
            continue
        pairs = [part.decode(errors="replace").partition("=") for part in raw.split(b"\0") if b"=" in part]
        if pairs:
            return {name: value for name, _, value in pairs}
    return dict(os.environ)


def memory() -> dict[str, int]:
    """Of the host, in bytes."""
    found = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable", "SwapFree", "Shmem"):
                found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        pass
    return found
