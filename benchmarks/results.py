"""A folder of results: `raw.jsonl` with what made them in its first line, `settings.json`, and `table.md`."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.comparison_table import Line, comparison, floors, generation, overhead
from benchmarks.runner import PEER, ROOT
from benchmarks.staleness import ahead_table
from benchmarks.workloads import MODEL, VISION, Work, lockstep_config, trl_arguments

RAW, SETTINGS, TABLE = "raw.jsonl", "settings.json", "table.md"


def facts() -> dict[str, Any]:
    """What the numbers depend on."""
    trl = next(PEER.glob("trl-*.dist-info"), None)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "numpy")},
        "trl": trl.name.removeprefix("trl-").removesuffix(".dist-info") if trl else None,
        "load": os.getloadavg(),
    }


def settings(works: Sequence[Work]) -> dict[str, Any]:
    """What each side was told, without what it left at its default."""
    folder = Path("FOLDER")
    make = {"lockstep": lockstep_config, "trl": trl_arguments}
    return {
        "model": asdict(MODEL),
        "vision_model": asdict(VISION),
        **{work.name: {s.name: make[s.program](work, s, folder, 0) for s in work.sides} for work in works},
    }


def read(folder: Path) -> list[Line]:
    """The lines of the record. An unfinished last line, of a run that was killed, is left out."""
    path = folder / RAW
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def report(works: Sequence[Work], lines: Sequence[Line]) -> str:
    """The tables, as Markdown."""
    parts = [comparison(works, lines), generation(lines), floors(works, lines)]
    parts += [overhead(work, lines) for work in works if work.details] + [ahead_table(lines)]
    made = [line["made"] for line in lines if "made" in line]
    return "\n\n".join(["\n".join(part) for part in parts if len(part) > 2] + [footnote(made, lines)]) + "\n"


def footnote(made: Sequence[Line], lines: Sequence[Line]) -> str:
    """Who, when, where, and how quiet the machine was."""
    if not made:
        return ""
    first = made[0]
    loads = [line["load"] for line in lines if "load" in line]
    busy = f", load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    return (
        f"Measured {first['date']} at {first['commit']} on {first['cpu']} ({first['cores']} cores){busy}: "
        f"Python {first['python']}, torch {first['torch']}, transformers {first['transformers']}, TRL {first['trl']}."
    )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        got = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except OSError:  # no git
        return "unknown"
    return got.stdout.strip() or "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
