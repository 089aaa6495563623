"""Measures how long `lockstep watch -- torchrun JOB` takes to notice and to confirm each kind of fault, in jobs that do
not use Lockstep, on an idle and on a loaded machine.

    python -m benchmarks.faults.attach                          about twenty minutes
    python -m benchmarks.faults.attach --only sleep --loads 0   one kind, idle

Times are from the fault, in seconds; `limit` is how long a case is watched. An idle process that others wait for is
confirmed after `--confirm-after`, a busy one after ten times as long (so none is, within the limit).
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from benchmarks.comparison_table import markdown, markdown_head
from benchmarks.docs_markers import into_page
from benchmarks.runner import ROOT, write
from benchmarks.soak.load import busy
from lockstep.watch.attach.watched_command import WatchedCommand, run_watched
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

JOB = Path(__file__).with_name("attached_job.py")
OUT = ROOT / "benchmarks" / "results" / "cpu" / "attach.jsonl"
RANKS, CULPRIT = 3, 1
CORES = len(os.sched_getaffinity(0))
IDLE = ("sleep", "subprocess", "lock", "socket", "pipe", "loader")
BUSY = ("regex", "spin")
STRUCTURAL = ("stopped", "killed", "exits", "raises")
FAULTS = (*STRUCTURAL, *IDLE, *BUSY)
LOOPS = ("plain", "ddp")


@dataclass(frozen=True)
class Measured:
    """One watched job. Times are seconds after the fault; None if it did not happen before the limit."""

    loop: str
    fault: str
    busy_processes: int
    """Processes that computed beside the job, for each core."""
    noticed_s: float | None
    """The first message that names the culprit."""
    confirmed_s: float | None
    """The first confirmed verdict that names the culprit."""
    accused: tuple[int, ...]
    """All ranks that a confirmed verdict named."""
    confirm_after_s: float


def measure(loop: str, fault: str, load: int, confirm_after: float, limit: float) -> Measured:
    """Watches one job until the culprit is confirmed, or to the limit."""
    with tempfile.TemporaryDirectory(prefix="lockstep-attach-") as name, busy(load * CORES):
        folder, events = Path(name), list[tuple[float, SupervisorEvent]]()
        enough, ended = threading.Event(), threading.Event()

        def record(event: SupervisorEvent) -> None:
            if ended.is_set():
                return  # the job's other ranks are being killed
            events.append((time.time(), event))
            if event.level != "notice" and event.change != "withdrawn":
                enough.set()

        ending = threading.Thread(target=_end_job, args=(folder, enough, ended, limit), daemon=True)
        ending.start()
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
        command = [*torchrun, str(JOB), loop, fault, str(CULPRIT), str(folder)]
        thresholds = StallThresholds(still_s=confirm_after)
        run_watched(WatchedCommand(command, folder / "incidents", patience=thresholds), record, print)
        ending.join()
        struck = float((folder / f"struck-{CULPRIT}").read_text())
    named = [(at - struck, event) for at, event in events if CULPRIT in _ranks(event) and event.change != "withdrawn"]
    confirmed = [at for at, event in named if event.level != "notice"]
    accused = {rank for _, event in events if event.level != "notice" for rank in _ranks(event)}
    return Measured(
        loop, fault, load, named[0][0] if named else None, confirmed[0] if confirmed else None,
        tuple(sorted(accused)), confirm_after,
    )  # fmt: skip


def _ranks(event: SupervisorEvent) -> list[int]:
    return [each["rank"] for each in event.verdict["culprits"]]


def _end_job(folder: Path, enough: threading.Event, ended: threading.Event, limit: float) -> None:
    """Kills the job's ranks a second after its culprit is confirmed, or at the limit."""
    struck = folder / f"struck-{CULPRIT}"
    deadline = time.monotonic() + 120.0
    while not struck.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    enough.wait(limit)
    time.sleep(1.0)
    ended.set()
    for path in folder.glob("pid-*"):
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def table(measured: Iterable[Measured]) -> str:
    """The results in Markdown: a line for each kind of fault, loop and load, with medians."""
    rows: dict[tuple[str, str, int], list[Measured]] = {}
    for each in measured:
        rows.setdefault((each.fault, each.loop, each.busy_processes), []).append(each)
    lines = markdown_head(
        "fault", "loop", "busy processes per core", "noticed", "confirmed", "innocents confirmed", "runs"
    )
    for (fault, loop, load), cases in rows.items():
        innocents = sum(bool({*each.accused} - {CULPRIT}) for each in cases)
        noticed, confirmed = (_median([getattr(each, name) for each in cases]) for name in ("noticed_s", "confirmed_s"))
        lines.append(markdown(fault, loop, str(load), noticed, confirmed, str(innocents), str(len(cases))))
    return "\n".join(lines)


def _median(times: Sequence[float | None]) -> str:
    known = [each for each in times if each is not None]
    if not known:
        return "never"
    missing = f" ({len(times) - len(known)} never)" if len(known) < len(times) else ""
    return f"{statistics.median(known):.1f} s{missing}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.attach", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", default=FAULTS, choices=FAULTS, metavar="FAULT")
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    parser.add_argument("--loads", nargs="+", type=int, default=(0, 2), help="busy processes per core (default 0 2)")
    parser.add_argument("--confirm-after", type=float, default=10.0)
    parser.add_argument("--limit", type=float, default=40.0, help="seconds to watch after the fault")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the table into this page, between its markers")
    options = parser.parse_args()
    measured: list[Measured] = []
    options.out.unlink(missing_ok=True)
    for load, fault, loop, _ in product(options.loads, options.only, options.loops, range(options.repeats)):
        if fault == "loader" and loop != "ddp":
            continue  # only this loop has a loader
        found = measure(loop, fault, load, options.confirm_after, options.limit)
        measured.append(found)
        write(options.out, asdict(found))
        print(found, flush=True)
    text = table(measured)
    print(text)
    if options.docs:
        into_page(options.docs, text, "attach")


if __name__ == "__main__":
    main()
