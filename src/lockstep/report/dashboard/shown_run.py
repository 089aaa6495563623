"""A run as the dashboard shows it: its ledger, its processes on this host, its captured timelines and its incidents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.base.secrets import redact_text
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_incidents import STALL_EVENT, Incident, incidents_of
from lockstep.ledger.sqlite_index import EventRow
from lockstep.report.communication.communication_summary import communication_summary
from lockstep.report.dashboard.config_view import shown_config
from lockstep.report.dashboard.host_figures import run_hosts
from lockstep.report.dashboard.incident_view import (
    incident_file,
    incident_files_of,
    incident_folder,
    incident_id,
    incidents_json,
)
from lockstep.report.dashboard.live_watch import LiveWatch
from lockstep.report.dashboard.run_feed import RunFeed
from lockstep.report.dashboard.sample_browser import SampleBrowser
from lockstep.report.dashboard.stage_spans import CapturedStages, joined_rows

SAMPLES = SampleBrowser()
"""One for all runs of this process, so that its memory is bounded."""
NOT_HERE = "no process of the run is on this host: the graph is empty, and the verdict is the supervisor's"


class ShownRun:
    """Answers the page's questions about one run. All methods may be called by any thread, and raise LedgerError,
    OSError, RunBusy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.feed = RunFeed(folder)
        self.live = LiveWatch(folder)
        self._captured = CapturedStages(folder)

    def stages(self, start: float | None, end: float | None) -> dict[str, Any]:
        """The Gantt chart between two times, in seconds since the epoch; None: the newest steps."""
        rows = joined_rows([*self._captured.rows(), *self.live.view().stages])
        return self.feed.stages(start, end, rows)

    def waits(self) -> dict[str, Any]:
        """The graph of waits with the verdict: the supervisor's, which sees all hosts, if it is sure; else that of the
        observation from here."""
        view, overview = self.live.view(), self.feed.overview()
        published = open_verdict(self.feed.newest_events()) if overview.state == "running" else None
        certain = published is not None and published["level"] != "notice"
        verdict = published if certain else view.verdict or published
        culprits = set(verdict["culprits"]) if verdict is not None else set()
        nodes = [{**node, "culprit": node["name"] in culprits} for node in view.nodes]
        message = "" if view.live else NOT_HERE if overview.state == "running" else f"the run is {overview.state}"
        return {"nodes": nodes, "edges": view.edges, "verdict": verdict, "live": view.live, "message": message}

    def hosts(self) -> dict[str, Any]:
        """Hosts and GPUs, now and in the last minutes."""
        return {"hosts": run_hosts(self.folder, self.live.view().hosts), "history": self.live.history.json()}

    def samples(self, step: int | None, query: str, offset: int, limit: int, chars: int) -> dict[str, Any]:
        return dict(self.feed.reading(lambda ledger: SAMPLES.page(ledger, step, query, offset, limit, chars)))

    def sample_diff(self, prompt_id: str, a: int, b: int, chars: int) -> dict[str, Any]:
        """The samples of one prompt in two steps."""

        def read(ledger: Ledger) -> dict[str, Any]:
            return {side: SAMPLES.of_prompt(ledger, step, prompt_id, chars) for side, step in (("a", a), ("b", b))}

        return dict(self.feed.reading(read))

    def incidents(self) -> list[dict[str, Any]]:
        return incidents_json(self._incidents(), self.folder)

    def incident_file(self, incident: str, name: str) -> tuple[str, int] | None:
        """A file of an incident, see `incident_view.incident_file`; None if there is none of this name."""
        for each in self._incidents():
            path = incident_folder(each, self.folder) if incident_id(each) == incident else None
            if path is not None:
                file = incident_files_of(path).get(name)
                return None if file is None else incident_file(file)
        return None

    def config(self) -> dict[str, Any]:
        return shown_config(self.feed.config())

    def communication(self) -> dict[str, Any]:
        """What the run's collectives cost and who was late, and how evenly its ranks are loaded."""
        return communication_summary(self.folder)

    def _incidents(self) -> list[Incident]:
        return incidents_of(self.feed.events())


def open_verdict(events: Sequence[EventRow]) -> dict[str, Any] | None:
    """The newest verdict of the supervisor that it has not withdrawn, the surest level first; None without one.

    Args:
        events: those of the run's newest attempt.
    """
    newest = {int(each.fields["number"]): each.fields for each in events if each.kind == STALL_EVENT}
    still = [fields for fields in newest.values() if fields["change"] != "withdrawn"]
    if not still:
        return None
    chosen = max(still, key=lambda fields: (fields["level"] != "notice", float(fields["said_at"])))
    return {
        "level": str(chosen["level"]), "kind": str(chosen["verdict"]), "text": redact_text(str(chosen["text"])),
        "culprits": [str(name) for name in chosen["who"]], "fix": "", "evidence": [], "since": chosen["said_at"],
    }  # fmt: skip
