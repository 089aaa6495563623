"""Counts the findings about processes that were healthy all the time."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.watch.supervisor.supervisor_client import SupervisorEvent


@dataclass
class Tally:
    """The findings of one bare job or run."""

    what: str
    notices: int = 0
    withdrawn: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """Confirmed verdicts."""
    right: list[dict[str, Any]] = field(default_factory=list)
    """Confirmed verdicts that were right: the machine was too busy to resume a stopped process in time."""
    silences: Counter[str] = field(default_factory=Counter)
    """Number of activities longer than three times the threshold, by name."""
    longest_s: float = 0.0
    troubles: list[str] = field(default_factory=list)
    _confirmed: set[int] = field(default_factory=set)

    def add_event(self, event: SupervisorEvent) -> None:
        self.note(
            event.number, event.change, event.level, event.headline, event.verdict, event.incident, event.wall,
            event.who,
        )  # fmt: skip

    def note(
        self, number: int, change: str, level: str, headline: str, verdict: Mapping[str, Any], incident: str | None,
        wall: float, who: Sequence[str],
    ) -> None:  # fmt: skip
        """Count a message of the supervisor."""
        if change == "withdrawn":
            self.withdrawn += 1
            return
        if change == "told":
            self.notices += 1
        if level == "notice" or number in self._confirmed:
            return
        self._confirmed.add(number)
        wrong = {"in": self.what, "at": wall, "headline": headline, "verdict": dict(verdict)}
        wrong["who"] = list(who)
        self.wrong.append(wrong)
        at = time.strftime("%T", time.localtime(wall))
        print(f"WRONG in {self.what} at {at}: {headline} ({incident})", file=sys.stderr)

    def trouble(self, text: str) -> None:
        self.troubles.append(text)

    def disturbed(
        self, done: Sequence[tuple[float, str, str, float]], late: Callable[[str, float], bool], prefix: str
    ) -> None:
        """Add to each wrong verdict the disturbances of the half minute before it. Verdicts that a process was stopped
        move to the right ones if the benchmark itself resumed it too late."""
        wrong, self.wrong = self.wrong, []
        for each in wrong:
            each["disturbed"] = [one for one in done if 0 <= each["at"] - one[0] < 30]
            stopped = "is stopped" in each["headline"]
            right = stopped and all(late(f"{prefix}{name}", each["at"]) for name in each["who"])
            (self.right if right else self.wrong).append(each)

    def json(self) -> dict[str, Any]:
        return {
            "in": self.what, "notices": self.notices, "withdrawn": self.withdrawn, "wrong": self.wrong,
            "right": self.right, "silences": dict(self.silences), "longest_s": self.longest_s,
            "troubles": self.troubles,
        }  # fmt: skip

    def acts(self, record: Path, longer_than_s: float) -> None:
        """Count the long activities in a file that `activities.perform` wrote."""
        for line in record.read_text().splitlines() if record.exists() else ():
            took = float(json.loads(line).get("took_s", 0.0))
            self.longest_s = max(self.longest_s, took)
            if took >= longer_than_s:
                self.silences[json.loads(line)["act"]] += 1


def findings_table(tallies: list[Tally], minutes: float, patience: Mapping[str, float], load: float) -> str:
    """The table, as text."""
    silences = sum((each.silences for each in tallies), Counter[str]())
    rows = [
        ("minutes", f"{minutes:.1f}"),
        ("floors", f"notice {patience['notice_s']:g} s, confirmed {patience['still_s']:g} s (defaults: 3 s, 40 s)"),
        ("in minutes at the default floors", f"{minutes * 40.0 / patience['still_s']:.0f}"),
        ("bare sites; runs", "; ".join(str(sum(each.what.startswith(kind) for each in tallies)) for kind in "sr")),
        ("silences longer than three times the floor", f"{silences.total()}"),
        ("longest silence", f"{max((each.longest_s for each in tallies), default=0.0):.1f} s"),
        ("notices (allowed)", f"{sum(each.notices for each in tallies)}"),
        ("of these taken back", f"{sum(each.withdrawn for each in tallies)}"),
        ("stopped too long by the benchmark itself, and reported", f"{sum(len(each.right) for each in tallies)}"),
        ("confirmed verdicts, all of them wrong", f"{sum(len(each.wrong) for each in tallies)}"),
        ("load average at the end", f"{load:.1f}"),
    ]
    lines = [f"{name:<50} {value}" for name, value in rows]
    lines += [f"    {name:<46} {count}" for name, count in sorted(silences.items())]
    lines += [f"trouble in {each.what}: {text}" for each in tallies for text in each.troubles]
    for each in tallies:
        for wrong in each.wrong:
            lines += ["", f"WRONG in {each.what}: {wrong['headline']}", json.dumps(wrong["verdict"], indent=2)]
            lines += [f"    {each}" for each in wrong.get("disturbed", ())]
    return "\n".join(lines)
