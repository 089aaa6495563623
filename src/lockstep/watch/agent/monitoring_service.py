"""The part of a node agent that watches: what it sees goes to supervisors, what they ask for is done.

    {"id", "op": "observe", "every_s", "calm_s", "suspect_after_s"} -> {"host", "pid"}; then rosters and states
    {"id", "op": "clock"} -> {"monotonic_ns", "wall"}
    {"id", "op": "stacks", "pids", "native"} -> {"stacks": {pid: threads}}
    {"id", "op": "collect", "names", "lines"} -> {"beacons", "logs", "environment", "facts"}, see `host_evidence`
    {"id", "op": "end", "pid", "signal"} -> {"sent"}   a process of the run, a worker or not
    {"id", "op": "forget", "name"} -> {}   a worker that ended, and whose place another has taken
    {"id", "op": "free", "names", "culprits", "text", "verdict", "breaks"} -> {"freed"}   a collective of theirs that
        breaks raises the verdict; with `breaks`, those that they are in are broken, and "freed" has the names of who
        was in one; nothing is done where somebody else has a culprit's place by now
    {"id", "op": "dump", "names"} -> {"folder"}   flight recorders are written there, see `commands`
    {"id", "op": "dumps"} -> {"dumps": {name: text}}   what has been written by then
    <- states have "calm" besides: everybody moves or has nothing to do
    <- {"m": "leaving", "host", "reason"}: what ends from here on was meant to

Driven by the agent's loop; nothing here blocks.
"""

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.base.folders import run_shm_dir
from lockstep.base.transport.frames import Connection
from lockstep.watch.agent import host_evidence
from lockstep.watch.agent.process_monitor import ProcessMonitor, ProcessState
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.agent.report_messages import encode_report
from lockstep.watch.agent.worker_spawner import WorkerProcess
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.procfs import processes, py_spy
from lockstep.watch.procfs.py_spy import StackSampler
from lockstep.watch.recorder import commands
from lockstep.watch.recorder.abort import announce_verdict, release_ranks

log = logging.getLogger(__name__)

ReplyCallback = Callable[[str, dict[str, Any]], None]

FORGET_S = 15.0
"""So long after it was replaced, what a dead worker left can still be collected."""


@dataclass
class _Subscription:
    every_s: float
    calm_s: float
    """Between looks while everybody moves; an end is looked at at once in any case."""
    suspect_after_s: float
    roster: int = 0
    """Number of the roster it has."""


class MonitoringService:
    """Eyes, and who is told of what they see."""

    def __init__(
        self,
        run: str,
        host: str,
        selector: selectors.BaseSelector,
        children: Mapping[str, WorkerProcess],
        send: Callable[[Connection, dict[str, Any]], None],
        reply: ReplyCallback,
    ) -> None:
        self._eyes, self._teller, self._spy = ProcessMonitor(run), ReportBuilder(host), StackSampler(selector)
        self._host, self._children, self._send, self._reply = host, children, send, reply
        self._observers: dict[Connection, _Subscription] = {}
        self._looked = 0.0
        self._due, self._calm = False, False
        self._dump_folder = run_shm_dir(run) / "dumps"
        self.operations: Mapping[str, Callable[[Connection, str, dict[str, Any]], None]] = {
            "observe": self._observe, "clock": self._clock, "stacks": self._stacks, "collect": self._collect,
            "end": self._end, "forget": self._forget, "free": self._free, "dump": self._dump, "dumps": self._dumps,
        }  # fmt: skip

    def meant(self, name: str) -> None:
        """Whatever happens to this worker now was asked for."""
        self._eyes.ours.add(name)

    def exited(self) -> None:
        """A worker has ended: that is looked at and told at once."""
        self._due = True

    def dropped(self, connection: Connection) -> None:
        self._observers.pop(connection, None)

    def leaving(self, reason: str) -> None:
        """All ends are meant from here on."""
        for connection in list(self._observers):
            self._send(connection, {"m": "leaving", "host": self._host, "reason": reason})
        self._observers.clear()

    def tick(self) -> None:
        """Looks and tells, where somebody listens and it is time."""
        self._spy.tick()
        if not self._observers:
            return
        now = time.monotonic()
        every_s = min(each.calm_s if self._calm else each.every_s for each in self._observers.values())
        if self._due or now - self._looked >= every_s:
            self._look(now)

    def close(self) -> None:
        self._spy.close()

    def _look(self, now: float) -> None:
        self._looked, self._due = now, False
        self._eyes.look(self._children, self._spy.holds)
        self._calm = self._eyes.calm()
        roster, state = self._teller.tell(self._eyes)
        said = encode_report(state) | {"calm": self._calm}
        for connection, observer in list(self._observers.items()):
            if observer.roster != roster.number:
                observer.roster = roster.number
                self._send(connection, encode_report(roster))
            self._send(connection, said)
        if not self._spy.busy:
            after_s = min((each.suspect_after_s for each in self._observers.values()), default=2.0)
            for seen in list(self._eyes.suspects(after_s)):
                self._spy.order(seen.pid, self._noting(seen))

    def _noting(self, seen: ProcessState) -> Callable[[tuple[py_spy.SampledThread, ...]], None]:
        ordered = time.monotonic_ns()

        def told(threads: tuple[py_spy.SampledThread, ...]) -> None:
            if threads:
                seen.take_stacks(threads, ordered)
            else:
                seen.stack_ns = ordered  # none to be had: not asked for again at once

        return told

    # --- what supervisors ask for

    def _observe(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        every_s, calm_s, after_s = (float(message[name]) for name in ("every_s", "calm_s", "suspect_after_s"))
        self._observers[connection] = _Subscription(every_s, calm_s, after_s)
        self._teller.forget()
        with contextlib.suppress(OSError):  # a broken collective waits for our verdict from now on
            commands.open_command_file(self._eyes.run)
        self._due = True
        self._reply(number, {"host": self._host, "pid": os.getpid()})

    def _clock(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._reply(number, {"monotonic_ns": time.monotonic_ns(), "wall": time.time()})

    def _stacks(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        ours = {seen.pid: seen for seen in self._eyes.seen.values() if seen.living}
        wanted = [int(pid) for pid in message["pids"] if int(pid) in ours]
        found: dict[str, Any] = {}
        if not wanted:
            self._reply(number, {"stacks": {}})

        def taken(pid: int) -> Callable[[tuple[py_spy.SampledThread, ...]], None]:
            note = self._noting(ours[pid])

            def told(threads: tuple[py_spy.SampledThread, ...]) -> None:
                if not message.get("native"):
                    note(threads)
                found[str(pid)] = py_spy.stacks_to_json(threads)
                if len(found) == len(wanted):
                    self._reply(number, {"stacks": found})

            return told

        for pid in reversed(wanted):
            self._spy.order(pid, taken(pid), native=bool(message.get("native")), first=True)

    def _collect(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        names = set(message["names"])
        chosen = [seen for seen in self._eyes.seen.values() if seen.name in names]
        self._reply(number, {"host": self._host, **host_evidence.collect_host_evidence(chosen, int(message["lines"]))})

    def _forget(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._eyes.forget(str(message["name"]), FORGET_S)
        self._reply(number, {})

    def _free(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        """Tells who waits in a collective why it ends, then ends it."""
        names, text = [str(name) for name in message["names"]], str(message["text"])
        freed: list[str] = []
        if any(name in self._eyes.replaced for name in message["culprits"]):
            self._reply(number, {"freed": freed})  # others are in its place: who is here now waits for those
            return
        try:
            if message["breaks"]:
                living = [self._eyes.seen[name] for name in names if name in self._eyes.seen]
                now = [read_beacon(each.beacon.path, events=False) for each in living if each.living and each.beacon]
                freed = list(release_ranks(self._eyes.run, filter(None, now), text, message["verdict"]))
            else:
                announce_verdict(self._eyes.run, names, text, message["verdict"])
        except (OSError, ValueError) as error:
            log.warning("nobody could be freed: %s", error)
        self._reply(number, {"freed": freed})

    def _dump(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._dump_folder = run_shm_dir(self._eyes.run) / "dumps" / str(time.monotonic_ns())
        try:
            self._dump_folder.mkdir(parents=True, mode=0o700)
            commands.send_command(self._eyes.run, "dump", message["names"], folder=str(self._dump_folder))
        except (OSError, ValueError) as error:
            log.warning("flight recorders are not dumped: %s", error)
        self._reply(number, {"folder": str(self._dump_folder)})

    def _dumps(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._reply(number, {"dumps": host_evidence.read_dumps(self._dump_folder)})

    def _end(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        """Sends a signal to a process of the run."""
        pid = int(message["pid"])
        seen = next((each for each in self._eyes.seen.values() if each.pid == pid and each.living), None)
        sent = False
        if seen is not None and processes.is_alive(pid, seen.start_ticks or None):
            self.meant(seen.name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals(int(message["signal"])))
                sent = True
        self._reply(number, {"sent": sent})
