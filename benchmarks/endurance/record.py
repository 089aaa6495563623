"""The file of an endurance benchmark: its lines say on which machines it ran, what each episode found, and so which one
is next. Lines are only appended: the file may be carried to another machine at any time."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import facts


class Record:
    """The lines of a file; an unfinished last line, of a benchmark that was killed, is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole)
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]

    @property
    def seed(self) -> int | None:
        """The seed of the file, which the first line has."""
        return next((line["seed"] for line in self.lines if "seed" in line), None)

    @property
    def next_episode(self) -> int:
        """The first episode that has no line. One that was interrupted has none, and is run again."""
        return max((line["episode"] + 1 for line in self.lines if "episode" in line), default=0)

    @property
    def hours(self) -> float:
        """Of all its episodes."""
        return sum(line.get("wall_s", 0.0) for line in self.lines) / 3600

    def open(self, seed: int) -> None:
        """Note the machine on which episodes are run from here on."""
        self.append({"seed": seed, "made": facts()})

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line, durably."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(dict(line))
