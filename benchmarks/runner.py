"""Runs the sides of a workload in turn and writes each measurement down as it comes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.resource_usage import PeakMemory, Usage, usage
from benchmarks.side_process import SideProcess
from benchmarks.workloads import MODEL, Side, Work, lengths, lockstep_config, prepare, trl_arguments
from lockstep.models.tiny_model import TinyModel

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / "build" / "peer"
"""Where script/benchmark puts TRL."""

LOCKSTEP = Side("lockstep", "lockstep")
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One repeat of one side."""

    work: str
    side: str
    repeat: int
    steps: int
    cpu_s: float
    """Of all processes of the side, over all steps of the repeat."""
    wall_s: float
    tokens: int
    """Real tokens of the steps, where the sides may differ (SFT)."""
    peak_bytes: int
    load: float
    """Load average over the last minute, as the repeat began."""
    by_process: dict[str, float]
    """CPU seconds by name of the process; `main` is the one that was started."""


def peer_installed() -> bool:
    return (PEER / "trl").is_dir()


def environment(side: Side) -> dict[str, str]:
    """One thread, no network, and TRL on the path of nobody but TRL's process."""
    path = [str(ROOT), *([str(PEER)] if side.program == "trl" else []), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def call(command: Sequence[str], side: Side, limit_s: float) -> None:
    """Runs a command of a side to its end.

    Raises:
        SystemExit: it has failed; with the end of its output.
        subprocess.TimeoutExpired: it takes longer than `limit_s`.
    """
    done = subprocess.run(
        command, cwd=ROOT, env=environment(side), capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        output = f"{done.stdout[-3000:]}{done.stderr[-6000:]}"
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{output}")


def train(config: Path, limit_s: float) -> None:
    """Runs `lockstep train` with a config file, like `call`."""
    call([str(Path(sys.executable).with_name("lockstep")), "train", str(config)], LOCKSTEP, limit_s)


class Match:
    """The sides of a workload, started, warmed up and taking turns. A context manager."""

    def __init__(self, work: Work, repeats: int, folder: Path, tell: Tell, model: TinyModel = MODEL) -> None:
        self.work, self.repeats, self.folder, self.tell = work, repeats, folder, tell
        self._model = model
        self._stack = ExitStack()
        self._processes: dict[str, SideProcess] = {}
        self._names: dict[str, dict[int, str]] = {}
        self._tokens: dict[str, int] = {}
        self._spent: dict[str, dict[str, dict[str, float]]] = {}
        """CPU milliseconds by side, stage and process of all steps whose stages were measured."""

    def __enter__(self) -> "Match":
        try:
            for side in self.work.sides:
                self._start(side)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, side: Side, repeat: int) -> Measurement:
        """One repeat: its steps, and what they took."""
        process, load = self._processes[side.name], os.getloadavg()[0]
        with PeakMemory(process.pid) as memory:
            before, began = usage(process.pid), time.monotonic()
            facts = process.go(side.steps)
            wall, after = time.monotonic() - began, usage(process.pid)
        tokens = int(facts.get("tokens", 0))
        done, self._tokens[side.name] = tokens - self._tokens[side.name], tokens
        return Measurement(
            self.work.name,
            side.name,
            repeat,
            side.steps,
            after.cpu_s - before.cpu_s,
            wall,
            done,
            memory.bytes,
            load,
            by_name(before, after, self._names[side.name]),
        )

    def details(self, side: Side) -> dict[str, dict[str, float]]:
        """CPU milliseconds per step by stage and process."""
        return self.stages(side, self.work.details)

    def stages(self, side: Side, steps: int) -> dict[str, dict[str, float]]:
        """So many steps of one side, and their CPU milliseconds per step by stage and process."""
        total = self._processes[side.name].go(steps, detail=True)["detail"]
        before, self._spent[side.name] = self._spent.get(side.name, {}), total
        return {
            stage: {name: (ms - before.get(stage, {}).get(name, 0.0)) / steps for name, ms in each.items()}
            for stage, each in total.items()
        }

    def _start(self, side: Side) -> None:
        work, own = self.work, self.folder / side.name.replace(" ", "-")
        steps = 2 + self.repeats * side.steps + work.details
        command = ordered(work, side, own, steps, self._model)
        self.tell(f"{work.name}: starting {side.name}")
        process = self._stack.enter_context(SideProcess(command, environment(side), self.folder / f"{own.name}.log"))
        facts = process.ready()
        self._processes[side.name] = process
        self._names[side.name] = {pid: name for name, pid in facts.get("processes", {}).items()}
        self._tokens[side.name] = 0
        if side.warm:
            self.tell(f"{work.name}: first step of {side.name}")
            self._tokens[side.name] = int(process.go(1).get("tokens", 0))


def ordered(work: Work, side: Side, folder: Path, steps: int, model: TinyModel = MODEL) -> list[str]:
    """Makes a folder with all that a side needs for so many steps; the command that starts it."""
    folder.mkdir(parents=True)
    prepare(work, folder, steps + 2, model)  # TRL reads a batch ahead
    table = lengths(work, steps + 2)
    if side.program == "lockstep":
        order: dict[str, Any] = {"config": lockstep_config(work, side, folder, steps), "lengths": table.tolist()}
    else:
        arguments = trl_arguments(work, side, folder, steps)
        order = {"kind": work.kind, "arguments": arguments, "lengths": table.ravel().tolist()}
        order["images"] = work.vision is not None
    (folder / f"{side.program}.json").write_text(json.dumps(order))
    return [sys.executable, "-m", f"benchmarks.{side.program}_side", str(folder)]


def by_name(before: Usage, after: Usage, names: dict[int, str]) -> dict[str, float]:
    """CPU seconds between two looks by the process's name; those without one are `other`."""
    found: dict[str, float] = {}
    for pid, seconds in after.by_process.items():
        name = names.get(pid, "other" if names else "main")
        found[name] = found.get(name, 0.0) + seconds - before.by_process.get(pid, 0.0)
    return {name: round(seconds, 4) for name, seconds in found.items()}


def run(works: Sequence[Work], repeats: int, scratch: Path, record: Path, tell: Tell, model: TinyModel = MODEL) -> None:
    """Measures the workloads one after the other; `record` gets a line of JSON per repeat, and keeps what it has: a
    workload whose repeats are all there is not measured again."""
    have = read(record)
    for work in works:
        wanted = {(side.name, n) for side in work.sides for n in range(turns(side, repeats))}
        if wanted <= {(line["side"], line["repeat"]) for line in have if line.get("work") == work.name}:
            tell(f"{work.name}: measured already")
            continue
        with Match(work, repeats, scratch / work.name, tell, model) as match:
            for repeat in range(repeats):
                for side in work.sides:
                    if repeat < turns(side, repeats):
                        got = match.measure(side, repeat)
                        write(record, asdict(got))
                        tell(described(got, repeats))
            if work.details:
                side = work.sides[0]
                write(record, {"details": work.name, "side": side.name, "ms": match.details(side)})


def turns(side: Side, repeats: int) -> int:
    return min(repeats, side.repeats or repeats)


def described(got: Measurement, repeats: int) -> str:
    per_step = f"{got.cpu_s / got.steps:.2f} CPU s, {got.wall_s / got.steps:.2f} s wall a step"
    return (
        f"{got.work}: {got.side} {got.repeat + 1}/{repeats}: {per_step}, {got.peak_bytes / 2**20:.0f} MiB, "
        f"load {got.load:.1f}"
    )


def read(record: Path) -> list[dict[str, Any]]:
    """The lines of a record. Removes an unfinished last line, which a killed run leaves."""
    if not record.exists():
        return []
    text = record.read_text()
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        record.write_text(complete)
    return [json.loads(line) for line in complete.splitlines()]


def write(record: Path, line: dict[str, Any]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a") as file:
        file.write(json.dumps(line) + "\n")
