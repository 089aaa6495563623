"""Measures how long `lockstep watch -- torchrun JOB` takes to notice and to confirm each kind of fault in jobs that do
not use Lockstep, on an idle and on a loaded machine, and whether it confirms nothing about healthy ones.

    python -m benchmarks.faults.attach --loads 0                about twelve minutes on two idle cores
    python -m benchmarks.faults.attach --loads 0 --resume       continues a stopped record
    python -m benchmarks.faults.attach --only sleep --loads 2   one kind, with two busy processes for each core
    python -m benchmarks.faults.attach --table                  the table of the recorded jobs

Several jobs start together; once all train, the busy processes start, and then the faults happen. Times are from the
fault, in seconds. One JSON line per job is appended to the record.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.comparison_table import markdown, markdown_head
from benchmarks.docs_markers import into_page
from benchmarks.faults.attach_faults import FAULTS, GROUPS, LOOPS, AttachCase, attach_cases, batches
from benchmarks.runner import ROOT, read, write
from benchmarks.soak.load import busy
from lockstep.watch.attach.watched_command import WatchedCommand, run_watched
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.procfs.processes import descendant_pids
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

JOB = Path(__file__).with_name("attached_job.py")
OUT = ROOT / "benchmarks" / "results" / "cpu" / "attach.jsonl"
RANKS = 3
CORES = len(os.sched_getaffinity(0))
START_S = 300.0
SETTLE_S = 3.0
"""Seconds between the start of the last job, or of the busy processes, and the faults."""
LINGER_S = 1.0
"""A job is watched for this long after the verdict: it must accuse no other rank either."""


@dataclass(frozen=True)
class Measured:
    """One watched job. Times are seconds after the fault; None if it did not happen before the limit."""

    fault: str
    loop: str
    busy_processes: int
    """Processes that computed beside the jobs, for each core."""
    repeat: int
    noticed_s: float | None
    """The first message that names a culprit."""
    confirmed_s: float | None
    """The first confirmed verdict that names a culprit."""
    accused: tuple[int, ...]
    """All ranks that a confirmed verdict named."""
    watched_s: float
    confirm_after_s: float
    load_average: float
    """Of the last minute, when the job ended."""

    @property
    def exact(self) -> bool:
        return self.accused == FAULTS[self.fault].culprits

    @property
    def innocents(self) -> bool:
        return bool({*self.accused} - {*FAULTS[self.fault].culprits})


def measure(case: AttachCase, folder: Path, confirm_after: float) -> Measured:
    """Watches one job until the culprits are confirmed or a healthy activity is over, or to the limit."""
    folder.mkdir()
    events = list[tuple[float, SupervisorEvent]]()
    ended = threading.Event()

    def record(event: SupervisorEvent) -> None:
        if not ended.is_set():  # then the job's ranks are being killed
            events.append((time.time(), event))

    def accused() -> set[int]:
        return {rank for _, event in list(events) if _accuses(event) for rank in _ranks(event)}

    def is_over() -> bool:
        if case.about.group == "healthy":
            return (folder / "over-1").exists()
        return accused() >= {*case.about.culprits}

    ending = threading.Thread(target=_end_job, args=(folder, is_over, ended, case.limit_s(confirm_after)), daemon=True)
    ending.start()
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
    culprits = ",".join(map(str, case.about.culprits or (1,)))
    command = [*torchrun, str(JOB), case.loop, case.fault, culprits, str(folder)]
    thresholds = StallThresholds(still_s=confirm_after)
    problems = list[str]()
    run_watched(WatchedCommand(command, folder / "incidents", patience=thresholds), record, problems.append)
    ending.join()
    if problems:
        raise RuntimeError(f"{case.name} was not watched: {problems}")
    if case.about.group == "healthy" and not (folder / "over-1").exists():
        raise RuntimeError(f"{case.name}: the healthy activity failed or did not end")
    struck = min(float(path.read_text()) for path in folder.glob("struck-*"))
    named = [
        (at - struck, event)
        for at, event in events
        if event.change != "withdrawn" and {*_ranks(event)} & {*case.about.culprits}
    ]
    confirmed = [at for at, event in named if _accuses(event)]
    return Measured(
        case.fault, case.loop, case.load, case.repeat, _seconds(named[0][0]) if named else None,
        _seconds(confirmed[0]) if confirmed else None, tuple(sorted(accused())), _seconds(time.time() - struck),
        confirm_after, os.getloadavg()[0],
    )  # fmt: skip


def _quiet() -> None:
    """Drops what the jobs of this process print: their launchers report each end."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)


def _seconds(value: float) -> float:
    return round(value, 2)


def _accuses(event: SupervisorEvent) -> bool:
    return event.level != "notice" and event.change != "withdrawn"


def _ranks(event: SupervisorEvent) -> list[int]:
    return [each["rank"] for each in event.verdict["culprits"]]


def _end_job(folder: Path, is_over: Callable[[], object], ended: threading.Event, limit: float) -> None:
    """Kills the job's ranks and their children after the verdict, or at the limit."""
    _until(lambda: any(folder.glob("struck-*")), START_S)
    _until(is_over, limit)
    time.sleep(LINGER_S)
    ended.set()
    ranks = [int(path.read_text()) for path in folder.glob("pid-*")]
    for pid in [below for rank in ranks for below in descendant_pids(rank)] + ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _until(check: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.1)
    return False


def measure_batch(batch: Sequence[AttachCase], pool: ProcessPoolExecutor, confirm_after: float) -> list[Measured]:
    """Starts the jobs of a batch, then the busy processes, then lets the faults happen."""
    with tempfile.TemporaryDirectory(prefix="lockstep-attach-") as name:
        folders = [Path(name) / each.name for each in batch]
        futures: list[Future[Measured]] = [
            pool.submit(measure, case, folder, confirm_after) for case, folder in zip(batch, folders, strict=True)
        ]
        _until(lambda: all(map(_is_ready, folders)), START_S)
        with busy(batch[0].load * CORES):
            time.sleep(SETTLE_S)
            for folder in folders:
                (folder / "go").touch()
            return [future.result(START_S) for future in futures]


def _is_ready(folder: Path) -> bool:
    return len([*folder.glob("ready-*")]) >= RANKS - 1


def table(measured: Iterable[Measured]) -> str:
    """The results in Markdown: a line for each kind of fault and load."""
    found = sorted(measured, key=lambda each: (each.busy_processes, GROUPS.index(FAULTS[each.fault].group)))
    kinds = dict.fromkeys((each.busy_processes, each.fault) for each in found)
    lines = markdown_head(
        "fault", "busy processes per core", "jobs", "noticed, median / worst", "confirmed, median / worst",
        "exactly the culprits", "innocents confirmed",
    )  # fmt: skip
    for load, fault in kinds:
        cases = [each for each in found if (each.busy_processes, each.fault) == (load, fault)]
        noticed, confirmed = (_times([getattr(each, name) for each in cases]) for name in ("noticed_s", "confirmed_s"))
        exact, innocents = (str(sum(getattr(each, name) for each in cases)) for name in ("exact", "innocents"))
        title = f"{fault} (healthy)" if FAULTS[fault].group == "healthy" else fault
        lines.append(markdown(title, str(load), str(len(cases)), noticed, confirmed, exact, innocents))
    return "\n".join([*lines, "", *_loads(found)])


def _loads(measured: Sequence[Measured]) -> list[str]:
    """What the load average was, for each number of busy processes."""
    said = []
    for load in dict.fromkeys(each.busy_processes for each in measured):
        averages = sorted(each.load_average for each in measured if each.busy_processes == load)
        said.append(
            f"With {load} busy processes per core, the load average was {averages[0]:.1f} to {averages[-1]:.1f}, "
            f"median {statistics.median(averages):.1f}, on {CORES} cores."
        )
    return said


def _times(times: Sequence[float | None]) -> str:
    known = [each for each in times if each is not None]
    if not known:
        return "never"
    missing = f" ({len(times) - len(known)} never)" if len(known) < len(times) else ""
    return f"{statistics.median(known):.1f} s / {max(known):.1f} s{missing}"


def main() -> None:
    options = arguments()
    done = [Measured(**{**each, "accused": tuple(each["accused"])}) for each in read(options.out)]
    if done and not (options.resume or options.table):
        raise SystemExit(f"{options.out} has {len(done)} jobs already: go on with --resume, or name another --out")
    known = {AttachCase(each.fault, each.loop, each.busy_processes, each.repeat) for each in done}
    drawn = attach_cases(options.only, options.loops, options.loads, options.repeats)
    wanted = [each for each in drawn if each not in known]
    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), _quiet) as pool:
        for batch in [] if options.table else batches(wanted, options.jobs):
            for found in measure_batch(batch, pool, options.confirm_after):
                done.append(found)
                write(options.out, asdict(found))
                print(f"{time.monotonic() - began:5.0f} s  {found}", flush=True)
    text = table(done)
    print(text)
    if options.docs:
        into_page(options.docs, text, "attach")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults.attach", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", default=tuple(FAULTS), choices=tuple(FAULTS), metavar="KIND")
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    parser.add_argument("--loads", nargs="+", type=int, default=(0, 2), help="busy processes per core (default 0 2)")
    parser.add_argument("--confirm-after", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=4, help="jobs at once (default 4)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="leave out the jobs that FILE has already")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the table into this page, between its markers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
