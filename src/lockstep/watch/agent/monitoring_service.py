"""The part of a node agent that monitors processes: sends reports to supervisors and serves their requests.

    {"id", "op": "observe", "every_s", "calm_s", "suspect_after_s", "timings"} -> {"host", "pid"}, followed by rosters
        and states, every `calm_s` while all processes make progress or are idle, else every `every_s`; with `timings`,
        states have sampled calls (`call_timings`)
    {"id", "op": "clock"} -> {"monotonic_ns", "wall"}
    {"id", "op": "stacks", "pids", "native"} -> {"stacks": {pid: threads}}
    {"id", "op": "collect", "names", "lines"} -> {"beacons", "logs", "environment", "facts"}, see `host_evidence`
    {"id", "op": "end", "pid", "signal"} -> {"sent"}   sends a signal to a process of the run, worker or not
    {"id", "op": "forget", "name"} -> {}   reports a worker no more that ended and was replaced
    {"id", "op": "free", "names", "culprits", "text", "verdict", "breaks"} -> {"freed"}   if a collective of these
        processes fails, it raises the verdict; with `breaks`, the collectives that the processes are in are aborted,
        and "freed" names the processes that were in one; does nothing if a culprit has been replaced meanwhile
    {"id", "op": "calls", "communicator", "incarnation", "first", "last"} -> {"calls": [[number, seq, issued,
        signature], ...]}   the known calls of this host's members on a communicator, by their numbers from Python
    {"id", "op": "show", "communicator", "incarnation", "seq"} -> {"known"}   reports the calls from this one on,
        because members on other hosts differ; not if the communicator is unknown here so far
    {"id", "op": "dump", "names"} -> {"folder"}   has flight recorders written to this folder, see `commands`
    {"id", "op": "dumps"} -> {"dumps": {name: text}}   the dumps that have been written so far
    {"id", "op": "timeline", "capture", "last"} -> what all processes have done since the last such request with this
        `capture`, see `timeline_follower`, and "host", "devices"
    <- states also have "calm": every process makes progress or is idle, and all members' calls agree
    <- {"m": "leaving", "host", "reason"}: the agent shuts down; processes that end from now on are ended on purpose

The agent's loop drives the service, which never blocks.
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
from lockstep.watch.agent.call_comparison import CommunicatorLife
from lockstep.watch.agent.process_monitor import ProcessMonitor, ProcessState
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.agent.report_messages import encode_report
from lockstep.watch.agent.timeline_follower import TimelineFollower
from lockstep.watch.agent.worker_spawner import WorkerProcess
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.devices.device_sampler import DeviceSampler
from lockstep.watch.devices.device_samples import record_to_json
from lockstep.watch.procfs import processes, py_spy
from lockstep.watch.procfs.py_spy import StackSampler
from lockstep.watch.recorder import commands
from lockstep.watch.recorder.abort import announce_verdict, release_ranks

log = logging.getLogger(__name__)

ReplyCallback = Callable[[str, dict[str, Any]], None]

FORGET_S = 15.0
"""The log and the beacon of a dead worker can be collected for this long after its replacement."""


@dataclass
class _Subscription:
    every_s: float
    calm_s: float
    """Seconds between samples while every process makes progress or is idle. The end of a worker is sampled
    immediately."""
    suspect_after_s: float
    roster: int = 0
    """Number of the last roster sent to this subscriber."""


class MonitoringService:
    """Samples the processes of a run, and reports to the supervisors that have subscribed."""

    def __init__(
        self,
        run: str,
        host: str,
        selector: selectors.BaseSelector,
        children: Mapping[str, WorkerProcess],
        send: Callable[[Connection, dict[str, Any]], None],
        reply: ReplyCallback,
    ) -> None:
        self._devices = DeviceSampler()
        self._monitor, self._sampler = ProcessMonitor(run), StackSampler(selector)
        self._reports = ReportBuilder(host, devices=self._devices)
        self._host, self._children, self._send, self._reply = host, children, send, reply
        self._observers: dict[Connection, _Subscription] = {}
        self._sampled_at = 0.0
        self._sample_now, self._no_stall = False, False
        self._dump_folder = run_shm_dir(run) / "dumps"
        self._followers: dict[tuple[Connection, str], TimelineFollower] = {}
        self.operations: Mapping[str, Callable[[Connection, str, dict[str, Any]], None]] = {
            "observe": self._observe, "clock": self._clock, "stacks": self._stacks, "collect": self._collect,
            "end": self._end, "forget": self._forget, "free": self._free, "dump": self._dump, "dumps": self._dumps,
            "calls": self._calls, "show": self._show, "timeline": self._timeline,
        }  # fmt: skip

    def expect_end(self, name: str, pid: int) -> None:
        """Marks the end of this process as intended, whatever its exit code."""
        self._monitor.intended_ends.add((name, pid))

    def worker_exited(self) -> None:
        """Has the next tick sample and report immediately, because a worker has ended."""
        self._sample_now = True

    def disconnected(self, connection: Connection) -> None:
        self._observers.pop(connection, None)
        self._followers = {key: each for key, each in self._followers.items() if key[0] is not connection}

    def announce_shutdown(self, reason: str) -> None:
        """Reports to supervisors that the agent shuts down, and ends the subscriptions."""
        for connection in list(self._observers):
            self._send(connection, {"m": "leaving", "host": self._host, "reason": reason})
        self._observers.clear()

    def tick(self) -> None:
        """Samples and reports if a sample is due and at least one supervisor has subscribed."""
        self._sampler.tick()
        self._devices.tick()
        if not self._observers:
            return
        now = time.monotonic()
        every_s = min(each.calm_s if self._no_stall else each.every_s for each in self._observers.values())
        if self._sample_now or now - self._sampled_at >= every_s:
            self._sample(now)

    def close(self) -> None:
        self._sampler.close()
        self._devices.close()

    def _sample(self, now: float) -> None:
        self._sampled_at, self._sample_now = now, False
        self._monitor.sample(self._children, self._sampler.stopped_pid)
        self._no_stall = self._monitor.shows_no_stall()
        roster, state = self._reports.build(self._monitor)
        message = encode_report(state) | {"calm": self._no_stall and not self._reports.comparison.found_difference}
        for connection, observer in list(self._observers.items()):
            if observer.roster != roster.number:
                observer.roster = roster.number
                self._send(connection, encode_report(roster))
            self._send(connection, message)
        if not self._sampler.busy:
            after_s = min((each.suspect_after_s for each in self._observers.values()), default=2.0)
            for process in list(self._monitor.stack_candidates(after_s)):
                self._sampler.request(process.pid, self._stacks_handler(process))
                if process.needs_native_stack(after_s):
                    self._sampler.request(process.pid, self._native_handler(process), native=True)

    def _stacks_handler(self, process: ProcessState) -> Callable[[tuple[py_spy.SampledThread, ...]], None]:
        requested_ns = time.monotonic_ns()

        def on_stacks(threads: tuple[py_spy.SampledThread, ...]) -> None:
            if threads:
                process.store_stacks(threads, requested_ns)
            else:
                process.stack_ns = requested_ns  # sampling failed: do not repeat the request immediately

        return on_stacks

    def _native_handler(self, process: ProcessState) -> Callable[[tuple[py_spy.SampledThread, ...]], None]:
        requested_ns = time.monotonic_ns()
        return lambda threads: process.store_native_stacks(threads, requested_ns)

    # --- requests of supervisors

    def _observe(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        every_s, calm_s, after_s = (float(message[name]) for name in ("every_s", "calm_s", "suspect_after_s"))
        if not self._observers:  # to a supervisor that takes the place of another one these deaths are no news
            for name in self._monitor.replaced:
                self._monitor.forget(name, 0.0)
        self._observers[connection] = _Subscription(every_s, calm_s, after_s)
        self._reports.forget()
        self._reports.comparison.timings.wanted |= bool(message.get("timings"))
        self._devices.start()
        with contextlib.suppress(OSError):  # from now on, ranks whose collective fails wait for a verdict
            commands.open_command_file(self._monitor.run)
        self._sample_now = True
        self._reply(number, {"host": self._host, "pid": os.getpid()})

    def _clock(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._reply(number, {"monotonic_ns": time.monotonic_ns(), "wall": time.time()})

    def _stacks(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        living = {process.pid: process for process in self._monitor.tracked.values() if process.living}
        pids = [int(pid) for pid in message["pids"] if int(pid) in living]
        found: dict[str, Any] = {}
        if not pids:
            self._reply(number, {"stacks": {}})

        def stacks_handler(pid: int) -> Callable[[tuple[py_spy.SampledThread, ...]], None]:
            store = self._stacks_handler(living[pid])

            def on_stacks(threads: tuple[py_spy.SampledThread, ...]) -> None:
                if not message.get("native"):
                    store(threads)
                found[str(pid)] = py_spy.stacks_to_json(threads)
                if len(found) == len(pids):
                    self._reply(number, {"stacks": found})

            return on_stacks

        for pid in pids:
            self._sampler.request(pid, stacks_handler(pid), native=bool(message.get("native")), first=True)

    def _collect(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        names = set(message["names"])
        chosen = [process for process in self._monitor.tracked.values() if process.name in names]
        evidence = host_evidence.collect_host_evidence(chosen, int(message["lines"]))
        devices = record_to_json(self._reports.last_devices)
        self._reply(number, {"host": self._host, **evidence, **({"devices": devices} if devices else {})})

    def _forget(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._monitor.forget(str(message["name"]), FORGET_S)
        self._reply(number, {})

    def _free(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        """Sends the verdict to processes that wait in a collective, then aborts the collective."""
        names, text = [str(name) for name in message["names"]], str(message["text"])
        released: list[str] = []
        if any(name in self._monitor.replaced for name in message["culprits"]):
            self._reply(number, {"freed": released})  # the processes now wait for the replacement
            return
        try:
            if message["breaks"]:
                tracked = [self._monitor.tracked[name] for name in names if name in self._monitor.tracked]
                now = [read_beacon(each.beacon.path, events=False) for each in tracked if each.living and each.beacon]
                released = list(release_ranks(self._monitor.run, filter(None, now), text, message["verdict"]))
            else:
                announce_verdict(self._monitor.run, names, text, message["verdict"])
        except (OSError, ValueError) as error:
            log.warning("no process could be released: %s", error)
        self._reply(number, {"freed": released})

    def _calls(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        known = self._reports.comparison.calls_between(_life(message), int(message["first"]), int(message["last"]))
        self._reply(number, {"calls": known})

    def _show(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        known = self._reports.comparison.show(_life(message), int(message["seq"]))
        self._sample_now |= known
        self._reply(number, {"known": known})

    def _timeline(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        key = connection, str(message["capture"])
        follower = self._followers.setdefault(key, TimelineFollower())
        beacons = [each.beacon.path for each in self._monitor.tracked.values() if each.beacon is not None]
        devices = record_to_json(self._reports.last_devices)
        found = {"host": self._host, **follower.read(beacons), **({"devices": devices} if devices else {})}
        if message["last"]:
            del self._followers[key]
        self._send(connection, {"reply": number, **found})  # not kept: it is never requested again

    def _dump(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._dump_folder = run_shm_dir(self._monitor.run) / "dumps" / str(time.monotonic_ns())
        try:
            self._dump_folder.mkdir(parents=True, mode=0o700)
            commands.send_command(self._monitor.run, "dump", message["names"], folder=str(self._dump_folder))
        except (OSError, ValueError) as error:
            log.warning("cannot dump flight recorders: %s", error)
        self._reply(number, {"folder": str(self._dump_folder)})

    def _dumps(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        self._reply(number, {"dumps": host_evidence.read_dumps(self._dump_folder)})

    def _end(self, connection: Connection, number: str, message: dict[str, Any]) -> None:
        """Sends a signal to a process of the run."""
        pid = int(message["pid"])
        process = next((each for each in self._monitor.tracked.values() if each.pid == pid and each.living), None)
        sent = False
        if process is not None and processes.is_alive(pid, process.start_ticks or None):
            self.expect_end(process.name, pid)
            sent = processes.send_signal(pid, process.start_ticks or None, signal.Signals(int(message["signal"])))
        self._reply(number, {"sent": sent})


def _life(message: Mapping[str, Any]) -> CommunicatorLife:
    return CommunicatorLife(int(str(message["communicator"]), 16), int(message["incarnation"]))
