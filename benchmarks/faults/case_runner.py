"""Runs a case: real ranks under a real agent and supervisor; returns their verdicts."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import forked_agents
from benchmarks.faults.cases import Case, expected
from benchmarks.faults.rank import SILENCE_S
from benchmarks.runner import ROOT
from lockstep.base.folders import new_run_id
from lockstep.base.transport.run_token import new_run_token
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorEvent, SupervisorSettings

PATIENCE = StallThresholds(notice_s=1.0, still_s=2.5, busy_factor=4.0)
START_S = 60.0
TELL_S = 20.0
"""Time limit for a verdict, from the fault on."""
CALM_S = SILENCE_S + 2.5
"""In a healthy case, no rank may be accused within this time."""
FREE_S = 5.0
LINGER_S = 1.5
"""Events are collected for this long after the verdict: they must accuse no other rank either."""


@dataclass
class Outcome:
    """The supervisor's events and the ends of the ranks, as JSON values."""

    case: dict[str, Any]
    struck: float | None = None
    """When the fault happened, on the clock of time.time()."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """The supervisor's events: at (seconds after the fault), number, change, level, kind, class, ranks, confidence,
    collective, where, text."""
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The ends by rank: code (None: the rank still ran), error, and freed: seconds from the confirmed verdict to the
    rank's end."""
    load: float = 0.0
    trouble: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return asdict(self)


class Site:
    """Agent, supervisor and ranks of one case."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "case.json").write_text(json.dumps(case.json()))
        self.run, token = new_run_id("matrix"), new_run_token()
        self._lock = threading.Lock()
        self._events: list[SupervisorEvent] = []
        self.trouble: list[str] = []
        self.client = AgentClient(forked_agents.start(self.run, token, folder), token)
        settings = SupervisorSettings(
            self.run, 1, folder, folder / "incidents", [self.client.address], os.getpid(), PATIENCE, "free"
        )
        self.supervision = SupervisorClient(settings, token, self._add_event, self.trouble.append)

    def _add_event(self, event: SupervisorEvent) -> None:
        with self._lock:
            self._events.append(event)

    def events(self) -> list[SupervisorEvent]:
        with self._lock:
            return list(self._events)

    def start(self) -> None:
        """Starts the ranks once the supervisor is connected."""
        _until(self.supervision.connected.is_set, START_S)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path[:1] and [str(ROOT), *sys.path]),
            "TORCH_NCCL_ENABLE_TIMING": str(int(self.case.timed)),
        }
        for rank in range(self.case.world):
            argv = [sys.executable, "-m", "benchmarks.faults.rank", str(self.folder), self.run, str(rank)]
            self.client.submit_spawn(
                f"policy-{rank}", argv, log_path=self.folder / f"policy-{rank}.log", env=env, cwd=ROOT,
                preload=forked_agents.PRELOAD,
            )  # fmt: skip

    def struck(self) -> float | None:
        """When the first fault happened; None until all faults have happened."""
        found = []
        for rank in self.case.faults:
            with contextlib.suppress(OSError):
                found.append(float((self.folder / f"struck-{rank}").read_text()))
        return min(found) if len(found) == len(self.case.faults) else None

    def ended(self, rank: int) -> dict[str, Any] | None:
        """The error with which a rank's collective ended; None if there was none."""
        try:
            return dict(json.loads((self.folder / f"ended-{rank}").read_text()))
        except OSError:
            return None

    def close(self) -> None:
        self.supervision.close()
        self.client.shut_down(0.1)


def run(case: Case, folder: Path) -> Outcome:
    """Runs a case until its verdict, and `LINGER_S` longer."""
    site = Site(case, folder)
    try:
        site.start()
        _until(lambda: site.struck() is not None, START_S)
        began = site.struck()
        want = expected(case)
        if want.kinds:
            _until(lambda: _named(site, want.level, want.culprits), TELL_S)
            if want.level == "confirmed":
                innocent = [rank for rank in range(case.world) if rank not in case.faults]
                _until(lambda: all(_over(site, rank) for rank in innocent), FREE_S)
            _until(lambda: False, LINGER_S)
        else:
            _until(lambda: False, CALM_S)
        return _outcome(site, began)
    finally:
        site.close()


def _named(site: Site, level: str, culprits: frozenset[int]) -> bool:
    """Whether all culprits have been named, at that level or a higher one."""
    levels = ("confirmed", "act") if level == "confirmed" else ("notice", "confirmed", "act")
    named = {each["rank"] for event in site.events() if event.level in levels for each in event.verdict["culprits"]}
    return culprits <= named


def _over(site: Site, rank: int) -> bool:
    return site.ended(rank) is not None or site.client.exit_of(f"policy-{rank}") is not None


def _outcome(site: Site, began: float | None) -> Outcome:
    found = Outcome(site.case.json(), began, load=os.getloadavg()[0], trouble=list(site.trouble))
    since = began or 0.0
    for event in site.events():
        found.told.append(
            {
                "at": round(event.wall - since, 3), "number": event.number, "change": event.change,
                "level": event.level, "kind": event.verdict["kind"], "class": event.verdict["class"],
                "ranks": sorted(each["rank"] for each in event.verdict["culprits"]),
                "where": [each["where"] for each in event.verdict["culprits"]],
                "confidence": event.verdict["confidence"], "collective": event.verdict["collective"],
                "text": event.headline,
            }
        )  # fmt: skip
    confirmed = [event.wall for event in site.events() if event.level != "notice"]
    for rank in range(site.case.world):
        done, end = site.client.exit_of(f"policy-{rank}"), site.ended(rank) or {}
        found.ends[str(rank)] = {
            "code": None if done is None else done.exit_code, "error": end.get("type", ""), "text": end.get("text", ""),
            "freed": round(end["at"] - confirmed[0], 3) if end and confirmed else None,
        }  # fmt: skip
    return found


def _until(check: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.02)
    return False
