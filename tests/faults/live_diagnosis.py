"""Diagnoses running ranks from their beacons, as an agent and a supervisor do, in the process of the test."""

import time
from collections.abc import Callable

from lockstep.watch.agent.process_monitor import ProcessMonitor
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.evidence_types import CollectiveCall
from lockstep.watch.diagnosis.verdict import StallThresholds, Verdict
from lockstep.watch.supervisor.evidence_builder import HostState, build_evidence
from lockstep.watch.supervisor.job_layout import build_layout
from tests.faults.ranks import RUN

THRESHOLDS = StallThresholds(notice_s=1.0, still_s=2.5, busy_factor=4.0)
SAMPLE_S = 0.2


class LiveDiagnosis:
    """Samples the ranks of a run on this host and diagnoses them."""

    def __init__(self, run: str = RUN) -> None:
        self._monitor, self._builder = ProcessMonitor(run), ReportBuilder("h0")
        self._calls: dict[int, CollectiveCall] = {}
        self.evidence: Evidence | None = None
        """The newest evidence."""

    def verdicts(self) -> list[Verdict]:
        self._monitor.sample({})
        roster, state = self._builder.build(self._monitor)
        self._calls |= state.about
        now = time.monotonic()
        self.evidence = build_evidence(build_layout([roster]), [HostState(roster, state, now, dict(self._calls))], now)
        return diagnose(self.evidence, THRESHOLDS)

    def until(self, check: Callable[[Verdict], object], bound_s: float = 20.0) -> Verdict:
        """Samples until the first verdict passes the check, and returns it."""
        end = time.monotonic() + bound_s
        found: list[Verdict] = []
        while time.monotonic() < end:
            found = self.verdicts()
            if found and check(found[0]):
                return found[0]
            time.sleep(SAMPLE_S)
        raise AssertionError([(each.kind, each.level, ranks_of(each), each.explanation) for each in found])


def ranks_of(verdict: Verdict) -> list[int | None]:
    return sorted((each.rank for each in verdict.culprits), key=lambda rank: -1 if rank is None else rank)
