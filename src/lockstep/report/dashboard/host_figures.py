"""Figures of hosts and of their GPUs: now, of the last minutes, and over a whole run."""

import socket
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from lockstep.report.device_rows import device_totals
from lockstep.watch.devices.device_samples import DeviceState

KEPT = 900
"""Samples of the last minutes."""
FIGURES = ("utilisation", "memory_used", "temperature", "clock", "power")


class HostHistory:
    """The figures of the last minutes, by host."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[float, Mapping[str, Any]]]] = {}
        self._lock = threading.Lock()

    def add(self, at: float, hosts: Iterable[Mapping[str, Any]]) -> None:
        """Adds the figures of one look. `at`: seconds since the epoch."""
        with self._lock:
            for host in hosts:
                self._samples.setdefault(host["name"], deque(maxlen=KEPT)).append((at, host))

    def json(self, points: int = 300) -> dict[str, Any]:
        """The times of each host, the figures at these times, and those of each GPU by number; of more samples than
        `points`, every n-th one, the newest always."""
        found: dict[str, Any] = {}
        with self._lock:
            copied = {name: list(samples) for name, samples in self._samples.items()}
        for name, samples in copied.items():
            every = -(-len(samples) // points)
            chosen = samples[::-every][::-1]
            gpus: dict[str, dict[str, list[Any]]] = {}
            numbers = dict.fromkeys(str(gpu["index"]) for _, host in chosen for gpu in host["gpus"])
            for number in numbers:
                of_each = [_gpu(host, number) for _, host in chosen]
                gpus[number] = {figure: [gpu.get(figure) for gpu in of_each] for figure in FIGURES}
            found[name] = {
                "times": [round(at, 2) for at, _ in chosen],
                "cpu": [host["cpu"] for _, host in chosen],
                "memory_used": [host["memory_used"] for _, host in chosen],
                "gpus": gpus,
            }
        return found


def _gpu(host: Mapping[str, Any], number: str) -> Mapping[str, Any]:
    return next((gpu for gpu in host["gpus"] if str(gpu["index"]) == number), {})


def host_figures(devices: Sequence[DeviceState]) -> dict[str, Any]:
    """This host and its GPUs now. `cpu` is the share since the last call."""
    memory = psutil.virtual_memory()
    return {
        "name": socket.gethostname(),
        "live": True,
        "cpu": round(psutil.cpu_percent() / 100, 3),
        "memory_used": memory.total - memory.available,
        "memory_total": memory.total,
        "gpus": [gpu_figures(each) for each in devices],
    }


def gpu_figures(device: DeviceState) -> dict[str, Any]:
    """A GPU now; what the driver does not report is None."""
    sample = device.sample
    return {
        "index": sample.index if sample.instance is None else f"{sample.index}.{sample.instance}",
        "name": sample.name,
        "utilisation": None if sample.busy is None else sample.busy / 100,
        "memory_used": sample.memory_used,
        "memory_total": sample.memory_total,
        "temperature": sample.temperature_c,
        "clock": sample.sm_mhz,
        "power": sample.power_w,
        "power_limit": sample.power_limit_w,
        "throttled": list(sample.throttled or ()),
        "errors": [*([sample.lost] if sample.lost else []), *(fault.text for fault in device.faults)],
    }


def run_hosts(folder: Path, live: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The hosts of a run: those that are watched now, and of the others their means over the run."""
    found: dict[str, Mapping[str, Any]] = {host["name"]: host for host in live}
    for entry in device_totals(folder):
        name = str(entry.get("host") or (live[0]["name"] if live else socket.gethostname()))
        host = found.setdefault(
            name, {"name": name, "live": False, "cpu": None, "memory_used": None, "memory_total": None, "gpus": []}
        )
        if not host["live"]:
            host["gpus"].append(_mean_figures(entry))
    return list(found.values())


def _mean_figures(entry: Mapping[str, Any]) -> dict[str, Any]:
    busy, number = entry.get("busy"), str(entry.get("device", "")).removeprefix("GPU ")
    return {
        "index": int(number) if number.isdecimal() else number,
        "name": entry.get("name", ""),
        "utilisation": None if busy is None else busy / 100,
        "memory_used": entry.get("memory_used"),
        "memory_total": entry.get("memory_total"),
        "temperature": entry.get("temperature_c"),
        "clock": None,
        "power": entry.get("power_w"),
        "power_limit": entry.get("power_limit_w"),
        "throttled": list(entry.get("throttled") or {}),
        "errors": list(entry.get("errors") or ()),
    }
