"""The long suites: every test marked `slow`, some of a file per process, two processes at a time. `script/test --full`
calls it; those that need Ray or vLLM are `script/test --ray --vllm`.

    tests/full.py                       everything that `full-results.json` has not passed with these sources already
    tests/full.py --again               everything
    tests/full.py --slice K --seed S    a random part that takes about 7 minutes; another K is another part
    tests/full.py --match WORD          tests with this in their name

What came of each test is in `full-results.json` as soon as it is known, so a run that was stopped goes on where it was.
The seed is that of the tests' random moments, too. What failed beside another process runs once more, alone: fault
tests have bounds in seconds, and two of them may starve each other on a busy machine. This file is also the pytest
plugin that reports from inside.
"""

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
RESULTS = TESTS / "full-results.json"
SOURCES = ("src", "tests", "examples", "pyproject.toml", "requirements.lock")
"""What a result depends on."""
REPORTS = "LOCKSTEP_FULL_REPORTS"
"""Where a pytest process reports to."""
MARKS = "slow and not ray and not vllm and not deepspeed"
SLICE_S = 7 * 60.0
UNKNOWN_S = 60.0
"""What a test is thought to take that never ran."""
BATCH_S, BATCH = 240.0, 40
"""A process gets so many tests of a file at most: they share what is expensive to make."""
LIMIT_S = 900.0
"""The most that one test may take, beyond pytest's own limit: a process that does not end is killed."""


@dataclass(frozen=True)
class Result:
    node: str
    seed: int
    outcome: str
    """`passed`, `failed` or `skipped`."""
    seconds: float
    source: str
    """Digest of the sources it ran with."""
    at: str
    machine: dict[str, Any]


# --- inside of a pytest process


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(node=nodeid, when="start", outcome="passed", seconds=0.0)


def pytest_runtest_logreport(report: Any) -> None:
    """Each phase of each test."""
    _tell(node=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration)


def _tell(**line: Any) -> None:
    if REPORTS in os.environ:
        with Path(os.environ[REPORTS]).open("a") as file:
            file.write(json.dumps(line) + "\n")


# --- outside


@dataclass
class Batch:
    """Tests of one process, and what it said of them so far."""

    nodes: list[str]
    reports: Path = field(init=False)
    output: Path = field(init=False)
    process: "subprocess.Popen[bytes] | None" = None
    began: float = 0.0
    read: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    def start(self, folder: Path, number: int, seed: int) -> None:
        self.reports, self.output = folder / f"{number}.jsonl", folder / f"{number}.out"
        self.reports.touch()
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ, REPORTS: str(self.reports), "LOCKSTEP_TEST_SEED": str(seed),
            "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*pytest(), "-p", "full", "-p", "no:cacheprovider", *self.nodes],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self.began = time.monotonic()

    def news(self) -> list[str]:
        """Tests that are over since the last look."""
        with self.reports.open() as file:
            file.seek(self.read)
            lines = [line for line in file if line.endswith("\n")]
        self.read += sum(len(line.encode()) for line in lines)
        over = []
        for line in lines:
            report = json.loads(line)
            node = report["node"]
            self.seconds[node] = self.seconds.get(node, 0.0) + report["seconds"]
            self.outcomes[node] = worse(self.outcomes.get(node, "passed"), report["outcome"])
            self.begun.add(node)
            if report["when"] == "teardown":
                self.done.add(node)
                over.append(node)
        return over

    def ended(self) -> bool:
        """Whether the process is over; one that takes far too long is ended."""
        assert self.process is not None
        if self.process.poll() is None and time.monotonic() - self.began > LIMIT_S * len(self.nodes):
            self.kill()
        return self.process.poll() is not None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def lost(self) -> list[str]:
        """The test in which an ended process died, as failed; all, where it did not come to any."""
        lost = [node for node in self.nodes if node in self.begun - self.done]
        if not self.done and not lost:
            lost = self.nodes
        self.outcomes.update((node, "failed") for node in lost)
        self.done.update(lost)
        return lost

    def rest(self) -> list[str]:
        """What an ended process did not come to."""
        return [node for node in self.nodes if node not in self.done]


def worse(one: str, other: str) -> str:
    return max(one, other, key=["passed", "skipped", "failed"].index)


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-o", "addopts=--strict-markers --strict-config", "-q", *arguments]


def collect(match: str) -> list[str]:
    """Names of all slow tests that need none of Ray, vLLM and DeepSpeed. Ends the program where pytest cannot collect
    them."""
    found = subprocess.run(
        pytest("--collect-only", "-m", MARKS, str(TESTS)), cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    if found.returncode not in (0, 5):
        sys.exit(found.stdout[-4000:] + found.stderr[-4000:])
    return [line for line in found.stdout.splitlines() if "::" in line and match in line]


def digest() -> str:
    """Of everything that a result depends on."""
    files = (
        path for name in SOURCES for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    )
    whole = hashlib.sha256()
    for path in sorted(files):
        if path.is_file() and path != RESULTS and "__pycache__" not in path.parts and not path.name.startswith("."):
            whole.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()[:16]


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), "torch": version("torch"),
    }  # fmt: skip


class Results:
    """The file of results, whole after every write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = json.loads(path.read_text()) if path.exists() else []
        self._rows = {(row["node"], row["seed"]): Result(**row) for row in rows}

    def put(self, result: Result) -> None:
        self._rows[result.node, result.seed] = result
        self._write()

    def keep(self, nodes: Iterable[str]) -> None:
        """Forgets tests that are no more."""
        self._rows = {key: row for key, row in self._rows.items() if key[0] in set(nodes)}

    def passed(self, seed: int, source: str) -> set[str]:
        rows = self._rows.values()
        return {row.node for row in rows if row.outcome == "passed" and row.seed == seed and row.source == source}

    def estimate(self, node: str) -> float:
        """Seconds it took last, whatever the sources were."""
        known = [row.seconds for (name, _), row in self._rows.items() if name == node]
        return max(known, default=UNKNOWN_S)

    def _write(self) -> None:
        rows = [json.dumps(asdict(self._rows[key])) for key in sorted(self._rows)]
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        draft.write_text("[\n" + ",\n".join(rows) + "\n]\n")
        draft.replace(self.path)


def slices(nodes: Sequence[str], seed: int, results: Results, jobs: int) -> list[list[str]]:
    """The tests in random order, cut where a part would take longer than it may."""
    order = sorted(nodes)
    Random(f"slice/{seed}").shuffle(order)
    parts: list[list[str]] = [[]]
    used = 0.0
    for node in order:
        cost = results.estimate(node)
        if parts[-1] and used + cost > SLICE_S * jobs:
            parts.append([])
            used = 0.0
        parts[-1].append(node)
        used += cost
    return parts


def batches(nodes: Iterable[str], results: Results) -> list[Batch]:
    """Neighbours share what is expensive to make; the longest begin first."""
    found: list[Batch] = []
    used = 0.0
    for node in sorted(nodes):
        alike = found and found[-1].nodes[0].partition("::")[0] == node.partition("::")[0]
        if not alike or used > BATCH_S or len(found[-1].nodes) >= BATCH:
            found.append(Batch([]))
            used = 0.0
        found[-1].nodes.append(node)
        used += results.estimate(node)
    return sorted(found, key=lambda batch: -sum(map(results.estimate, batch.nodes)))


class Suite:
    """Runs batches and tells of it."""

    def __init__(self, total: int, seed: int, source: str, results: Results) -> None:
        self.total, self.seed, self.source, self.results = total, seed, source, results
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failed: set[str] = set()
        self.began = time.monotonic()

    def run(self, waiting: list[Batch], jobs: int) -> None:
        running: list[Batch] = []
        with tempfile.TemporaryDirectory(prefix="lockstep-full-") as folder:
            try:
                number = 0
                while waiting or running:
                    while waiting and len(running) < jobs:
                        running.append(waiting.pop(0))
                        running[-1].start(Path(folder), number, self.seed)
                        number += 1
                    time.sleep(0.2)
                    for batch in [batch for batch in running if self._look(batch)]:
                        running.remove(batch)
                        if batch.rest():
                            waiting.append(Batch(batch.rest()))
            finally:
                for batch in running:
                    batch.kill()

    def again(self) -> None:
        """What failed, one by one."""
        nodes = sorted(self.failed)
        print(f"{len(nodes)} failed beside others and run once more, alone", flush=True)
        self.failed.clear()
        self.counts["failed"] = 0
        self.run([Batch([node]) for node in nodes], jobs=1)

    def _look(self, batch: Batch) -> bool:
        """Notes what is over; whether all of it is."""
        ended = batch.ended()  # before the news: what it says last counts
        for node in batch.news():
            self._note(batch, node)
        if not ended:
            return False
        for node in batch.lost():
            self._note(batch, node)
        if "failed" in batch.outcomes.values():
            assert batch.process is not None
            said = batch.output.read_text(errors="replace")
            print(f"--- exit code {batch.process.returncode}\n{said[-8000:]}\n---", flush=True)
        return True

    def _note(self, batch: Batch, node: str) -> None:
        outcome, seconds = batch.outcomes[node], round(batch.seconds.get(node, 0.0), 1)
        self.counts[outcome] += 1
        if outcome == "failed":
            self.failed.add(node)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.results.put(Result(node, self.seed, outcome, seconds, self.source, now, machine()))
        done, elapsed = sum(self.counts.values()), time.monotonic() - self.began
        print(f"[{done}/{self.total}] {elapsed:6.0f} s  {outcome} in {seconds:.1f} s  {node}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slice", type=int, metavar="K", help="only the K-th random part of about 7 minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the parts, and of the tests' random moments")
    parser.add_argument("--again", action="store_true", help="also what has passed with these sources already")
    parser.add_argument("--match", default="", help="only tests with this in their name")
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))), help="processes at a time")
    chosen = parser.parse_args()
    results, source, nodes = Results(RESULTS), digest(), collect(chosen.match)
    if not chosen.match:
        results.keep(nodes)
    if chosen.slice is not None:
        parts = slices(nodes, chosen.seed, results, chosen.jobs)
        if not 0 <= chosen.slice < len(parts):
            parser.error(f"--slice {chosen.slice}: there are slices 0 to {len(parts) - 1}")
        print(f"slice {chosen.slice} of {len(parts)}: {len(parts[chosen.slice])} of {len(nodes)} tests")
        nodes = parts[chosen.slice]
    recorded = set() if chosen.again else results.passed(chosen.seed, source) & set(nodes)
    suite = Suite(len(nodes) - len(recorded), chosen.seed, source, results)
    code = 0
    try:
        suite.run(batches(set(nodes) - recorded, results), chosen.jobs)
        if suite.failed and chosen.jobs > 1:
            suite.again()
    except KeyboardInterrupt:
        print("interrupted; what is over is recorded")
        code = 130
    if recorded:
        print(f"{len(recorded)} had passed with these sources and this seed before; --again runs them too")
    if suite.counts["skipped"]:
        print(f"{suite.counts['skipped']} skipped")
    passed = suite.counts["passed"] + len(recorded)
    print(f"{passed} passed, {suite.counts['failed']} failed")
    return code or int(suite.counts["failed"] > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
