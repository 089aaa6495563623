"""The supervisor: a process that merges the reports of a run's agents, diagnoses the job up to twice a second, and
reports verdicts to its subscribers (`python -m lockstep.watch.supervisor.supervisor`, with settings as JSON on stdin).

The supervisor outlives the controller and does not depend on restarts of agents. It exits when the run has ended
(controller and agents have ended, or a subscriber requests `leave`), or when a newer controller has taken over the run.
Messages are JSON frames:

    {"id", "op": "subscribe", "pid", "start", "place", "after"} -> {"pid"}; event frames after number `after` follow
    {"id", "op": "agents", "agents": [address, ...]} -> {}     sets the agents
    {"id", "op": "join", "agent": address} -> {}     adds an agent
    {"id", "op": "leave", "failed"} -> {}     ends the supervisor; if the job has failed, after a last diagnosis
    {"id", "op": "timeline", "file", ...} -> {"file"}     captures a timeline, see `timeline_capture`
    <- {"told": n, "number", "change", "level", "verdict", "since_s", "wall", "incident", "headline", "who", "done"}

`number` is the same for all events of one stall; `change` is `told` (new), `updated` or `withdrawn`; `verdict` is the
JSON form of a verdict; `done` says what Lockstep did about the stall, at the level `act`. A confirmed verdict is
published as soon as its incident is on disk, normally within a second. Then the supervisor delivers the verdict to the
processes that wait for the culprits in collectives.
"""

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from lockstep.base.limits import raise_descriptor_limit
from lockstep.base.transport.auth_handshake import Listener
from lockstep.base.transport.frames import Connection
from lockstep.base.transport.run_token import take_token
from lockstep.watch.agent.service_discovery import ServiceAddress, is_superseded
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence import Evidence, drop_uninformative, with_parts
from lockstep.watch.diagnosis.verdict import MIN_ACTION_CONFIDENCE, Verdict, VerdictLevel
from lockstep.watch.procfs import processes
from lockstep.watch.supervisor import incident
from lockstep.watch.supervisor.agent_connections import AgentConnection
from lockstep.watch.supervisor.digest_comparison import DigestComparison
from lockstep.watch.supervisor.incident_collection import IncidentCollection
from lockstep.watch.supervisor.job_totals import JobTotals
from lockstep.watch.supervisor.message_store import MessageStore
from lockstep.watch.supervisor.subscribers import RequestHandler, Subscribers, unregister, verdict_frame
from lockstep.watch.supervisor.supervisor_client import SupervisorSettings
from lockstep.watch.supervisor.timeline_capture import TimelineCaptures
from lockstep.watch.supervisor.verdict_tracker import VerdictChange, VerdictTracker, VerdictUpdate

log = logging.getLogger("lockstep.watch.supervisor.supervisor")

CLOCK_SYNC_S = 30.0
IDLE_DIAGNOSIS_S = 4.0
"""Seconds between diagnoses while all agents report progress everywhere, so that only slow processes can be found."""
DIAGNOSIS_PACE_S = 0.05
"""The least seconds between diagnoses, per host."""
LAST_REPORT_S = 2.0
"""How long the end of a job waits for the agents' last reports."""
HOST_LINGER_S = 5.0
"""After the controller has ended, an agent that cannot be reached for this long counts as ended, too."""


def may_abort(on_stall: str, verdict: Verdict) -> bool:
    """Whether the collectives of those that wait for the culprits are aborted: never for a rank that may compute."""
    return on_stall == "free" and verdict.confidence >= MIN_ACTION_CONFIDENCE


class Supervisor:
    """The state of the supervisor process and its event loop."""

    def __init__(self, settings: SupervisorSettings, token: str) -> None:
        self.settings, self._token = settings, token
        self._selector = selectors.DefaultSelector()
        ports = (settings.port, settings.port) if settings.port else None
        self._listener = Listener(
            token, settings.meeting or settings.run, settings.generation, "supervisor", settings.host, ports,
            max_frame=64 << 20,
        )  # fmt: skip
        self._connections: dict[tuple[str, int], AgentConnection] = {}
        self._captures = TimelineCaptures(settings.run, self._connections.values, (token,))
        operations: dict[str, RequestHandler] = {
            "subscribe": self._subscribe, "agents": self._agents, "join": self._join, "leave": self._leave,
            "timeline": lambda connection, message: self._captures.start(message),
        }  # fmt: skip
        self._subscribers = Subscribers(self._listener, self._selector, operations)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wakeups)
        self._connected_links: SimpleQueue[tuple[AgentConnection, Connection]] = SimpleQueue()
        self._messages = MessageStore(aliases=settings.aliases, host_s=settings.patience.host_s)
        self._comparison = DigestComparison(self._connections.values)
        self._tracker = VerdictTracker()
        self._totals = JobTotals(settings.run, settings.devices, settings.communication)
        self._collections: list[IncidentCollection] = []
        self._incidents: dict[int, Path] = {}
        pid = settings.controller
        self._controller = (pid, None if pid is None else processes.start_ticks(pid))
        self._subscribed = False
        self._ending = False
        self._last_reports: tuple[set[AgentConnection], float] | None = None
        """Once the job has ended: the agents whose last reports are missing, and until when they are waited for."""
        self._clock_at = 0.0
        self._ticked_at = self._next_tick = self._diagnosed_at = 0.0
        self._path = settings.folder / "supervisor.json"
        self._set_agents(settings.agents)

    def run(self) -> None:
        """Runs until the run has ended."""
        signal.signal(signal.SIGTERM, lambda number, frame: self._end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        beacon = open_beacon(self.settings.run, "supervisor", "supervisor", 0)
        beacon.stage("watching")
        address = ServiceAddress(
            self.settings.meeting or self.settings.run, self.settings.generation, self._listener.host,
            self._listener.port, os.getpid(),
        )  # fmt: skip
        address.publish(self._path)
        try:
            while not self._ending and not self._run_is_over():
                pause_s = min(self._next_tick - time.monotonic(), 0.1 if self._collections else 1.0)
                for key, _ in self._selector.select(max(0.0, min(pause_s, self._captures.pause_s))):
                    key.data()
                self._captures.tick(time.monotonic())
                self._attach_connected()
                if time.monotonic() >= self._next_tick:
                    self._ticked_at = time.monotonic()
                    self._next_tick = self._ticked_at + 2 * self.settings.every_s
                    self._tick()
                    beacon.beat()
                self._finish_collections()
                self._conclude()
        finally:
            self._clean_up()

    # --- diagnosis

    def _tick(self) -> None:
        now = time.monotonic()
        self._totals.write(now)
        self._captures.read_requests()
        for link in self._connections.values():
            link.tick()
            if now - self._clock_at >= CLOCK_SYNC_S or not link.clock.known:
                link.measure_clock()
        if now - self._clock_at >= CLOCK_SYNC_S:
            self._clock_at = now
        self._follow_replacement()
        self._ending |= is_superseded(self.settings.run, self.settings.generation)
        if not any(link.host for link in self._connections.values()):
            return
        no_stall = all(now < link.no_stall_until for link in self._connections.values()) and not self._tracker.standing
        if no_stall and now - self._diagnosed_at < IDLE_DIAGNOSIS_S:
            return
        self._diagnose(now)

    def _diagnose(self, now: float) -> None:
        self._diagnosed_at = now
        evidence = self._messages.evidence(now)
        verdicts = diagnose(drop_uninformative(evidence), self.settings.patience)
        for update in self._tracker.update(verdicts, now):
            self._handle_update(update, evidence)

    def _handle_update(self, update: VerdictUpdate, evidence: Evidence) -> None:
        fresh = update.verdict.level != VerdictLevel.NOTICE and update.number not in self._incidents
        under_way = any(each.update.number == update.number for each in self._collections)
        if fresh and update.change != VerdictChange.WITHDRAWN and not under_way:
            links = [link for link in self._connections.values() if link.host]
            native = self.settings.on_stall == "dump"
            self._collections.append(IncidentCollection(update, evidence, links, native))
        else:
            self._publish(update)

    def _finish_collections(self) -> None:
        for collection in [each for each in self._collections if each.done()]:
            self._collections.remove(collection)
            update = collection.update
            if self.settings.incidents is not None:
                contents = collection.contents(self.settings.facts, self._subscribers.frames[-50:])
                path = incident.write_incident(self.settings.incidents, contents, (self._token,))
                if path is not None:
                    self._incidents[update.number] = path
            self._publish(update)
            self._release_waiting(update, collection.evidence)

    def _release_waiting(self, update: VerdictUpdate, evidence: Evidence) -> None:
        """Delivers the verdict to all processes that communicators connect with the culprits: their pending collectives
        raise it. Also aborts these collectives if `on_stall` is `free` and the verdict is certain enough to act on."""
        info, verdict = evidence.processes.info, update.verdict
        reported = {(each.host, each.name) for each in verdict.culprits if each.pid}
        culprits = with_parts(info, reported)
        if not culprits:
            return
        names: dict[str, list[str]] = {}
        for index in sorted(evidence.communicators.peers_of(culprits)):
            names.setdefault(info[index].host, []).append(info[index].name)
        requests = [(link, names[link.host]) for link in self._connections.values() if link.host in names]
        released: list[str] = []
        pending_replies = len(requests)

        def on_reply(reply: dict[str, Any] | None) -> None:
            nonlocal pending_replies
            pending_replies -= 1
            released.extend([] if reply is None else reply["freed"])
            if released and not pending_replies:
                self._acted(update, f"{', '.join(released)} freed")

        culprit_names = [info[index].name for index in culprits]
        content = {"text": incident.verdict_headline(verdict), "verdict": verdict.json(), "culprits": culprit_names}
        breaks = may_abort(self.settings.on_stall, verdict)
        for link, host_names in requests:
            link.request("free", on_reply, 5.0, names=host_names, breaks=breaks, **content)

    def _acted(self, update: VerdictUpdate, done: str) -> None:
        self._tracker.acted(update.number)
        verdict = replace(update.verdict, level=VerdictLevel.ACT)
        self._publish(replace(update, change=VerdictChange.UPDATED, verdict=verdict, at=time.monotonic()), done)

    # --- publishing

    def _publish(self, update: VerdictUpdate, done: str = "") -> None:
        frame = verdict_frame(update, self._incidents.get(update.number), done, (self._token,))
        log.info("%s %s: %s", update.change, update.verdict.level, frame["done"] or frame["headline"])
        self._subscribers.publish(frame)
        self._captures.note(frame)

    # --- agents

    def _set_agents(self, addresses: Sequence[ServiceAddress]) -> None:
        addressed = {(each.host, each.port): each for each in addresses}
        for key in [key for key in self._connections if key not in addressed]:
            link = self._connections.pop(key)
            if link.connection is not None:
                unregister(self._selector, link.connection)
            link.close()
            if link.host:
                self._forget_host(link.host)
        for key, address in addressed.items():
            if key not in self._connections:
                self._connections[key] = AgentConnection(
                    address, self._token, self.settings.generation, self._connected
                )

    def _follow_replacement(self) -> None:
        """Connects to the agent that has replaced the run's only agent, if there is one."""
        if len(self._connections) != 1 or any(link.connection is not None for link in self._connections.values()):
            return
        with suppress(OSError, ValueError, TypeError):
            address = ServiceAddress.read(self.settings.folder)
            if (address.host, address.port) not in self._connections and address.generation == self.settings.generation:
                self._set_agents([address])

    def _connected(self, link: AgentConnection, connection: Connection) -> None:
        """Runs in the thread that connects to an agent."""
        self._connected_links.put((link, connection))
        self._wake()

    def _attach_connected(self) -> None:
        while True:
            try:
                link, connection = self._connected_links.get_nowait()
            except Empty:
                return
            if self._connections.get((link.address.host, link.address.port)) is not link:
                connection.close()
                continue
            link.attach(connection)
            self._selector.register(connection, selectors.EVENT_READ, lambda link=link: self._read_messages(link))
            self._observe(link)

    def _observe(self, link: AgentConnection) -> None:
        """Asks an agent for a report now, and for further ones."""

        def on_observed(reply: dict[str, Any] | None) -> None:
            if reply is not None:
                link.host = str(reply["host"])

        every_s, notice_s = self.settings.every_s, self.settings.patience.notice_s
        # A report grows old until the next sample. This must not look like a lack of progress.
        link.request(
            "observe", on_observed, 10.0, every_s=every_s, calm_s=max(every_s, min(3 * every_s, notice_s / 2)),
            suspect_after_s=max(0.2, notice_s / 2), timings=self.settings.communication is not None,
        )  # fmt: skip

    def _read_messages(self, link: AgentConnection) -> None:
        connection = link.connection
        for message in link.messages():
            kind = message.get("m")
            if kind == "leaving":
                link.shut_down = True
                self._forget_host(str(message["host"]))
            elif kind in ("roster", "state") and not link.shut_down:
                self._receive(link, message)
        if connection is not None and link.connection is None:
            unregister(self._selector, connection)

    def _receive(self, link: AgentConnection, message: Mapping[str, Any]) -> None:
        try:
            stored = self._messages.receive(message, time.monotonic())
            host = self._messages.host(str(message["host"]))
            if stored and host is not None:
                self._comparison.update(host)
                if message["m"] == "state":
                    self._totals.add(host, link.clock.ns)
        except ValueError as error:
            log.warning("%s: %s", link, error)
            return
        if message["m"] == "state":
            link.no_stall_until = time.monotonic() + 4 * self.settings.every_s if message.get("calm") else 0.0
            if self._last_reports is not None:
                self._last_reports[0].discard(link)
        # Diagnose soon after a change; with many hosts, wait for further changes.
        self._next_tick = min(
            self._next_tick, self._ticked_at + min(self.settings.every_s, DIAGNOSIS_PACE_S * len(self._connections))
        )

    def _forget_host(self, host: str) -> None:
        self._messages.forget(host)
        self._comparison.forget(host)

    # --- requests

    def _subscribe(self, connection: Connection, message: dict[str, Any]) -> dict[str, Any]:
        if connection.peer.name == "controller" and message["place"] == processes.pid_namespace():
            self._controller = (int(message["pid"]), int(message["start"]))
        self._subscribed = True
        self._subscribers.subscribe(connection, int(message["after"]))
        return {"pid": os.getpid()}

    def _agents(self, connection: Connection, message: dict[str, Any]) -> dict[str, Any]:
        self._set_agents([ServiceAddress(**each) for each in message["agents"]])
        return {}

    def _join(self, connection: Connection, message: dict[str, Any]) -> dict[str, Any]:
        self._set_agents([*(link.address for link in self._connections.values()), ServiceAddress(**message["agent"])])
        return {}

    def _leave(self, connection: Connection, message: dict[str, Any]) -> dict[str, Any]:
        """Ends the supervisor; with `failed`, after a diagnosis of what all agents report at the end of the job."""
        if not message.get("failed"):
            self._ending = True
        elif self._last_reports is None:
            links = {link for link in self._connections.values() if link.connection is not None}
            self._last_reports = links, time.monotonic() + LAST_REPORT_S
            for link in links:
                self._observe(link)
        return {}

    def _conclude(self) -> None:
        """Makes the last diagnosis once the agents have reported, and ends when its incident is written."""
        if self._last_reports is None or self._collections:
            return
        missing, until = self._last_reports
        now = time.monotonic()
        if missing and now < until:
            return
        self._diagnose(now)
        self._ending = not self._collections

    # --- end

    def _run_is_over(self) -> bool:
        """Whether the controller (or the last subscriber) and all agents have ended."""
        pid, start = self._controller
        if pid is None:
            if self._subscribers.any or not self._subscribed:
                return False
        elif processes.is_alive(pid, start):
            return False
        now = time.monotonic()
        return not self._collections and all(
            link.connection is None and (link.shut_down or self._is_unreachable(link, now))
            for link in self._connections.values()
        )

    def _is_unreachable(self, link: AgentConnection, now: float) -> bool:
        return link.disconnected_since is not None and now - link.disconnected_since >= HOST_LINGER_S

    def _end(self) -> None:
        self._ending = True
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            self._wake_out.send(b"\0")

    def _drain_wakeups(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _clean_up(self) -> None:
        self._totals.write(time.monotonic(), last=True)
        self._captures.close()
        for link in self._connections.values():
            link.close()
        self._subscribers.close()
        close_beacon(remove=True)
        ServiceAddress.remove(self._path)


def main() -> None:
    try:
        token = take_token("the supervisor")
    except ValueError as error:
        sys.exit(str(error))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_descriptor_limit()
    Supervisor(SupervisorSettings.parse(sys.stdin.read()), token).run()


if __name__ == "__main__":
    main()
