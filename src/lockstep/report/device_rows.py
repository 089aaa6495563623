"""The GPUs of a run for its report: how evenly they worked, and what held them back (`devices.json`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.json_text import read_json

DEVICES_FILE = "devices.json"
MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A GPU as the report shows it; unknown figures are empty."""

    host: str
    device: str
    name: str
    processes: str
    busy: str
    percent: float
    """`busy` as a number, 0 if unknown: the length of the bar."""
    memory_busy: str
    power: str
    memory: str
    temperature: str
    trouble: str
    """Throttling and errors."""


def device_totals(folder: Path) -> list[dict[str, Any]]:
    """The totals of all GPUs of a run, as the supervisor wrote them; empty without samples."""
    path = folder / DEVICES_FILE
    try:
        return [dict(each) for each in read_json(path)] if path.is_file() else []  # a pipe would block
    except (OSError, ValueError, TypeError):
        return []


def device_rows(folder: Path) -> list[DeviceRow]:
    """The GPUs that a run's processes used, by host and number; at most `MOST_ROWS`: those with trouble, then those
    that worked least. Empty without samples."""
    try:
        rows = [_device_row(each) for each in device_totals(folder) if each["processes"]]
    except (ValueError, LookupError, TypeError):
        return []
    chosen = sorted(range(len(rows)), key=lambda number: (not rows[number].trouble, rows[number].percent))[:MOST_ROWS]
    return [rows[number] for number in sorted(chosen)]


def device_spread(rows: list[DeviceRow]) -> str:
    """`busiest 97%, least 61%`; empty unless two are known."""
    known = [row.percent for row in rows if row.busy]
    return f"busiest {max(known):.0f}%, least {min(known):.0f}%" if len(known) > 1 else ""


def _device_row(entry: Mapping[str, Any]) -> DeviceRow:
    throttled = [f"{share:g}% of the time {reason}" for reason, share in entry["throttled"].items()]
    used, total = entry["memory_used"], entry["memory_total"]
    limit = entry["power_limit_w"]
    return DeviceRow(
        host=entry["host"], device=entry["device"], name=entry["name"], processes=", ".join(entry["processes"]),
        busy=_percent(entry["busy"]), percent=float(entry["busy"] or 0.0), memory_busy=_percent(entry["memory_busy"]),
        power="" if entry["power_w"] is None else f"{entry['power_w']:.0f}{f' of {limit:.0f}' if limit else ''} W",
        memory="" if used is None or not total else f"{used / 2**30:.1f} of {total / 2**30:.0f} GiB",
        temperature="" if entry["temperature_c"] is None else f"{entry['temperature_c']} °C",
        trouble="; ".join([*throttled, *entry["errors"]]),
    )  # fmt: skip


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"
