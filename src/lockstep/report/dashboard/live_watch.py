"""Watches the processes of a run on this host while a page shows it: their waits, the verdict, GPUs and stages."""

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base import waits
from lockstep.base.folders import read_run_id, run_shm_dir
from lockstep.base.secrets import redact_text
from lockstep.base.wait_state import WaitTimeout
from lockstep.config.roles import ROLE_OF_PROCESSES
from lockstep.report.dashboard.host_figures import HostHistory, host_figures
from lockstep.report.dashboard.stage_spans import StageRow, StageSpan
from lockstep.report.top_table import run_observer
from lockstep.watch.beacon import beacon_table
from lockstep.watch.beacon.beacon_table import ProcessRow
from lockstep.watch.beacon.reader import opened_beacon
from lockstep.watch.beacon.span_ring import SpanKind
from lockstep.watch.diagnosis.verdict import Verdict
from lockstep.watch.supervisor.incident import culprit_name, verdict_headline

log = logging.getLogger(__name__)

TICK_S = 1.0
SHARE = 0.2
"""At most this share of one core: a run with many processes is looked at less often."""
IDLE_S = 30.0
"""The watching ends this long after the last question about the run."""
FIRST_S = 5.0
"""How long a question waits for the first look."""
SPANS_KEPT = 256
"""Of one process."""
MOST_EDGES = 5000


@dataclass(slots=True)
class LiveView:
    """What was seen at the last look."""

    at: float = 0.0
    """Seconds since the epoch; 0 before the first look."""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    edges: list[dict[str, Any]] = field(default_factory=list)
    verdict: dict[str, Any] | None = None
    hosts: list[dict[str, Any]] = field(default_factory=list)
    stages: list[StageRow] = field(default_factory=list)

    @property
    def live(self) -> bool:
        """Whether a process of the run was there."""
        return bool(self.nodes)


class LiveWatch:
    """Looks at a run again and again in a thread of its own, from the first question until nobody asks any more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._seen = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0
        self._closed = False
        self._view = LiveView()
        self.history = HostHistory()

    def view(self) -> LiveView:
        """The newest look, which waits for the first one. One without processes if the run has none on this host."""
        with self._lock:
            self._asked_at = time.monotonic()
            if self._closed or run_id_of(self._folder) is None:
                return LiveView()
            if self._thread is None:
                self._seen.clear()
                self._thread = threading.Thread(target=self._watch, name="dashboard watch", daemon=True)
                self._thread.start()
        with contextlib.suppress(WaitTimeout):
            waits.event(
                self._seen, waits_for="first look at the processes", why="the page shows them", timeout_s=FIRST_S,
                notice_after_s=None,
            )  # fmt: skip
        return self._view

    def close(self) -> None:
        """Ends the watching after the current look. Idempotent."""
        self._closed = True

    def _watch(self) -> None:
        try:
            while (run := run_id_of(self._folder)) is not None and not self._is_idle():
                with contextlib.closing(_LiveReader(run)) as reader:
                    while run_id_of(self._folder) == run and not self._is_idle():
                        began = time.monotonic()
                        self._view = view = reader.look()
                        self.history.add(view.at, view.hosts)
                        self._seen.set()
                        spent = time.monotonic() - began
                        waits.sleep(max(TICK_S, spent * (1 / SHARE - 1)), "next look at the processes")
        except (OSError, ValueError) as error:  # the folder was removed, or holds something else now
            log.debug("cannot watch %s: %s", self._folder, error)
        finally:
            with self._lock:
                self._view, self._thread = LiveView(), None
                self._seen.set()

    def _is_idle(self) -> bool:
        return self._closed or time.monotonic() - self._asked_at > IDLE_S


class _LiveReader:
    """Reads the processes of one attempt of a run, and remembers what they did before."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._observer = run_observer(run)
        self._spans: dict[tuple[str, int], tuple[int, deque[StageSpan]]] = {}
        """By name and pid: the number of the newest span that was read, and the newest stages."""

    def look(self) -> LiveView:
        every = beacon_table.process_rows(beacon_table.take_snapshot(self._run))
        rows = without_replaced(every)
        left = {row.name for row in every} - {row.name for row in rows}
        # One that blames only processes that were replaced since is about a failure that is over.
        verdicts = [each for each in self._observer.poll() if not _names_only(each, left)]
        verdict = verdicts[0] if verdicts else None
        edges = wait_graph_edges(rows, verdict)
        return LiveView(
            at=time.time(),
            nodes=wait_graph_nodes(rows, edges, verdict),
            edges=edges,
            verdict=None if verdict is None else verdict_json(verdict),
            hosts=[host_figures(self._observer.device_states())] if rows else [],
            stages=self._stages(),
        )

    def close(self) -> None:
        self._observer.close()

    def _stages(self) -> list[StageRow]:
        """What each process did, and what it does now."""
        found, now, to_wall = [], time.time(), time.time() - time.monotonic()
        for path in sorted(run_shm_dir(self._run).glob("*.beacon")):
            with opened_beacon(path) as beacon:
                if beacon is None:
                    continue
                state = beacon.state
                after, known = self._spans.get((state.name, state.pid), (0, deque[StageSpan](maxlen=SPANS_KEPT)))
                for span in beacon.spans(after):
                    after = max(after, span.number)
                    if span.kind == SpanKind.STAGE:
                        known.append(StageSpan(span.name, span.began_ns / 1e9 + to_wall, span.ended_ns / 1e9 + to_wall))
                self._spans[state.name, state.pid] = after, known
                spans = list(known)
                if state.stage:
                    spans.append(StageSpan(state.stage, state.stage_since_ns / 1e9 + to_wall, now, "running"))
                found.append(StageRow(state.name, state.role, state.rank, spans))
        return found


def run_id_of(folder: Path) -> str | None:
    """The id of the run's newest attempt, if its processes are, or were, on this host."""
    path = folder / "run-id"
    try:
        run = read_run_id(path) if path.is_file() else ""  # a pipe would block
        return run if run and run_shm_dir(run).is_dir() else None
    except (OSError, ValueError):
        return None


def without_replaced(rows: Sequence[ProcessRow]) -> list[ProcessRow]:
    """All processes but those that ended and that another one of the same role and rank has replaced."""
    living = {(row.role, row.rank) for row in rows if row.alive}
    return [row for row in rows if row.alive or (row.role, row.rank) not in living]


def wait_graph_edges(rows: Sequence[ProcessRow], verdict: Verdict | None) -> list[dict[str, Any]]:
    """Who waits for what: the longest waits first, and the chain of the verdict, which may say more exactly for which
    process."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    processes = {row.name: row.name for row in rows} | _ranks_of_verdict(rows, verdict)

    def add(waiter: str, waits_for: str, why: str, seconds: float | None) -> None:
        named = [processes.get(part) for part in waits_for.split(", ")]
        for target in named if all(named) else [waits_for]:
            ends = processes.get(waiter, waiter), str(target)
            found[ends] = {"from": ends[0], "to": ends[1], "why": redact_text(why), "seconds": seconds}

    for row in rows:
        for wait in reversed(row.waits):  # the one to show first is kept
            add(row.name, wait.waits_for, wait.why, round(wait.since_s, 1))
    for link in verdict.waiting if verdict is not None else ():
        add(link.who, link.on, link.what, None if link.since_s is None else round(link.since_s, 1))
    return sorted(found.values(), key=lambda edge: -(edge["seconds"] or 0.0))[:MOST_EDGES]


def _ranks_of_verdict(rows: Sequence[ProcessRow], verdict: Verdict | None) -> dict[str, str]:
    """The processes that the chain of a verdict calls `rank 0`: those of its culprits' role, if it is one."""
    roles = {each.role for each in verdict.culprits} if verdict is not None else set()
    return {f"rank {row.rank}": row.name for row in rows if {row.role} == roles and row.alive}


def _names_only(verdict: Verdict, names: Collection[str]) -> bool:
    return bool(verdict.culprits) and all(culprit_name(each) in names for each in verdict.culprits)


def wait_graph_nodes(
    rows: Sequence[ProcessRow], edges: Iterable[dict[str, Any]], verdict: Verdict | None
) -> list[dict[str, Any]]:
    """All processes, and whatever else is waited for: all processes of a role, a service, a file."""
    culprits = {culprit_name(each): each for each in (verdict.culprits if verdict is not None else ())}
    host = socket.gethostname()
    nodes = {
        row.name: {
            "name": row.name, "role": row.role, "rank": row.rank, "host": host, "stage": row.stage, "state": row.state,
            "culprit": row.name in culprits, "pid": row.pid, "doing": redact_text(beacon_table.describe_process(row)),
        }
        for row in rows
    }  # fmt: skip
    for edge in edges:
        for name in (edge["from"], edge["to"]):
            if name not in nodes:
                role = ROLE_OF_PROCESSES.get(name, "")
                nodes[name] = {
                    "name": name, "role": role, "host": "", "stage": "", "state": "group" if role else "other",
                    "culprit": name in culprits,
                }  # fmt: skip
    return list(nodes.values())


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as the page shows it."""
    return {
        "level": str(verdict.level), "kind": str(verdict.kind), "text": redact_text(verdict_headline(verdict)),
        "fix": verdict.fix,
        "culprits": [culprit_name(each) for each in verdict.culprits], "confidence": round(verdict.confidence, 2),
        "evidence": [redact_text(each.text) for each in verdict.evidence],
    }  # fmt: skip
