"""Injects two faults into a run: halfway through, a trainer rank is frozen; some steps after the run has recovered, its
rollout engine is killed while it generates. The run does not know about this script.

    python examples/faults.py runs/sort-grpo -- lockstep train examples/grpo_sort.yaml

Prints the run's output, each fault as it is injected, and at the end how long the run took to report each fault and to
recover from it. The exit code is the run's, or 1 if a fault was not reported within ten seconds or not recovered from.
"""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.base.folders import run_shm_dir
from lockstep.watch.beacon.beacon_records import BeaconState
from lockstep.watch.beacon.reader import read_beacon, read_beacons

REPORT_LIMIT_S = 10.0
NEAR_INTERVAL_S, FAR_INTERVAL_S = 0.002, 0.05
"""Seconds between two checks of the run: near the moment of a fault, and otherwise."""


@dataclass
class Fault:
    """A fault, its victim, and how the run reacted."""

    verb: str
    role: str
    signal: signal.Signals
    stage: str
    """The run's stage in which the fault is injected."""
    after: float
    """The fraction of the run's steps that come before the fault."""
    victim: str = ""
    step: int = 0
    at: float = 0.0
    # Seconds from the fault until the run's console showed the event:
    reported: float | None = None
    confirmed: float | None = None
    restarted: float | None = None
    stepped: float | None = None

    @property
    def fine(self) -> bool:
        """Whether the fault was reported in time and recovered from."""
        return self.stepped is not None and self.reported is not None and self.reported <= REPORT_LIMIT_S

    def read_line(self, line: str) -> None:
        """Reads a line that the run's console printed after the fault."""
        after = time.monotonic() - self.at
        if self.reported is None and line.startswith(("notice: ", "confirmed: ")):
            self.reported = after
        if self.confirmed is None and line.startswith("confirmed: "):
            self.confirmed = after
        if self.restarted is None and re.match(rf"{re.escape(self.victim)} .*; restarted in ", line):
            self.restarted = after
        if self.stepped is None and self.restarted is not None and line.startswith("step "):
            self.stepped = after


class Run:
    """The run as its beacons show it from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.moves = 0
        self.look_s = FAR_INTERVAL_S

    def controller(self) -> BeaconState | None:
        try:
            name = (self.folder / "run-id").read_text().strip()
        except OSError:
            return None
        return read_beacon(run_shm_dir(name) / "controller.beacon", events=False) if name else None

    def newest(self, run: str, role: str) -> BeaconState | None:
        """The last rank of a role, in its present life."""
        found = [state for state in read_beacons(run, events=False) if state.role == role]
        return max(found, key=lambda state: (state.rank, state.created_ns), default=None)

    def victim(self, fault: Fault) -> BeaconState | None:
        """Whom the fault is for, once its moment has come: in that stage of a step late enough, while it works."""
        controller = self.controller()
        step = controller.counters.get("step") if controller is not None else None
        if controller is None or step is None:
            return None
        due = fault.after * (step.total or 0)
        self.look_s = NEAR_INTERVAL_S if step.value >= due - 1 else FAR_INTERVAL_S
        if step.value < due:
            return None
        there = self.newest(controller.run, fault.role) if controller.stage == fault.stage else None
        before, self.moves = self.moves, there.progress_count if there is not None else 0
        fault.step = step.value
        return there if 0 < before < self.moves else None


class Screen:
    """Passes the run's lines on. On a terminal its steps share one line."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.open = False

    def show(self, line: str, style: str = "") -> None:
        step = self.live and line.startswith("step ")
        begin = "\r\x1b[2K" if self.open else ""
        if step:
            line = line[: shutil.get_terminal_size().columns - 1]
        elif self.live and style:
            line = f"\x1b[{style}m{line}\x1b[0m"
        self.open = step
        sys.stdout.write(f"{begin}{line}{'' if step else chr(10)}")
        sys.stdout.flush()


def strike(fault: Fault, victim: BeaconState, screen: Screen) -> None:
    fault.victim = victim.name
    screen.show(f"-- {fault.verb} {victim.name}, pid {victim.pid} ({fault.signal.name})", "1;35")
    os.kill(victim.pid, fault.signal)
    fault.at = time.monotonic()


def follow(process: "subprocess.Popen[bytes]", folder: Path, faults: list[Fault]) -> int:
    """Follows the run to its end and returns its exit code. A fault waits until the run has recovered."""
    assert process.stdout is not None
    run, screen, rest, waiting = Run(folder), Screen(), b"", list(faults)
    current: Fault | None = None
    while True:
        if select.select([process.stdout], [], [], run.look_s)[0]:
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                return process.wait(60)
            *lines, rest = (rest + read).split(b"\n")
            for line in (each.decode(errors="replace") for each in lines):
                event = (
                    line.startswith(("notice: ", "confirmed: ", "resumed: ", "recovered: ", "  incident: "))
                    or "restart" in line
                )
                screen.show(line, "33" if event else "")
                if current is not None:
                    current.read_line(line)
        if waiting and (current is None or current.stepped is not None) and (victim := run.victim(waiting[0])):
            current = waiting.pop(0)
            strike(current, victim, screen)
            run.look_s = FAR_INTERVAL_S


def summary(faults: list[Fault]) -> str:
    """A table of seconds after each fault."""
    rows = [("", "reported", "confirmed", "restarted", "next step")]
    for fault in faults:
        times = (fault.reported, fault.confirmed, fault.restarted, fault.stepped)
        what = f"{fault.victim} ({fault.signal.name}) in step {fault.step + 1}" if fault.victim else f"no {fault.role}"
        rows.append((what, *("never" if each is None else f"{each:.1f} s" for each in times)))  # type: ignore[arg-type]
    return "\n".join(f"{row[0]:<32}" + "".join(f"{each:>11}" for each in row[1:]) for row in rows)


def main(folder: Path, command: list[str]) -> int:
    faults = [
        Fault("freezing", "policy", signal.SIGSTOP, "train", after=0.4),
        Fault("killing", "rollout", signal.SIGKILL, "rollout", after=0.6),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        code = follow(process, folder, faults)
    except KeyboardInterrupt:  # the run received it as well, and finishes its step
        code = follow(process, folder, [])
    sys.stdout.write(f"\nSeconds from each fault until the run reported it and recovered:\n{summary(faults)}\n")
    return code or int(not all(fault.fine for fault in faults))


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[2] != "--":
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[3:]))
