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
    """The findings of one site or run."""

    what: str
    notices: int = 0
    withdrawn: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """Confirmed verdicts."""
    right: list[dict[str, Any]] = field(default_factory=list)
    """Confirmed verdicts that were right: this machine was too busy to let a stopped process go on in time."""
    silences: Counter[str] = field(default_factory=Counter)
    """Acts that lasted longer than three times the floor, by name."""
    longest_s: float = 0.0
    troubles: list[str] = field(default_factory=list)
    _confirmed: set[int] = field(default_factory=set)

    def hear(self, said: SupervisorEvent) -> None:
        self.note(said.number, said.change, said.level, said.headline, said.verdict, said.incident, said.wall, said.who)

    def note(
        self, number: int, change: str, level: str, headline: str, verdict: Mapping[str, Any], incident: str | None,
        wall: float, who: Sequence[str],
    ) -> None:  # fmt: skip
        """Something was said."""
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
        """Notes with each wrong verdict what had been done to whom in the half minute before it. It was right where it
        calls stopped whom the soak itself let go on too late."""
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
        """Counts the long ones of a file that `acts.perform` wrote."""
        for line in record.read_text().splitlines() if record.exists() else ():
            took = float(json.loads(line).get("took_s", 0.0))
            self.longest_s = max(self.longest_s, took)
            if took >= longer_than_s:
                self.silences[json.loads(line)["act"]] += 1


def told(tallies: list[Tally], minutes: float, patience: Mapping[str, float], load: float) -> str:
    """The table."""
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
        ("stopped for too long by the soak itself, and told", f"{sum(len(each.right) for each in tallies)}"),
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
