"""Reading flight-recorder dumps, beside `torchfrtrace`, which comes with torch: `python -m benchmarks.dumps`.

    python -m benchmarks.dumps                     cases, the same work on one core, 1,024 dumps on two
    python -m benchmarks.dumps cases               some of it: cases, beside, many
    python -m benchmarks.dumps --quick             small numbers, to see that it works
    python -m benchmarks.dumps --out FILE.json     what was measured, too

Dumps are generated anew each time, always the same ones, and deleted. Memory is the peak of a process; of Lockstep that
of the process and of all its readers together.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.dump_cases import CASES, Case
from benchmarks.dump_files import Comm, steps, write

PARTS = ("cases", "beside", "many")
ROOT = Path(__file__).parents[1]
PEER = """
import os, sys
from torch.distributed.flight_recorder.fr_trace import main
walk = os.walk
os.walk = lambda top: ((folder, folders, sorted(files)) for folder, folders, files in walk(top))
main(sys.argv[1:])
"""
"""In the order of names: it blames everybody who differs from the first file that the file system happens to list."""
OURS = """
import json, resource, sys, time
from pathlib import Path
from lockstep.watch.dumps.explain_dumps import explain_dumps
verdicts = explain_dumps(Path(sys.argv[1]))
kib = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"verdict": verdicts[0].json(), "kib": kib}))
"""


def main() -> None:
    options = _arguments()
    measured: dict[str, Any] = {"load": os.getloadavg(), "cpus": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory(prefix="lockstep-dumps-") as scratch:
        if "cases" in options.parts:
            measured["cases"] = cases(Path(scratch))
        if "beside" in options.parts:
            measured["beside"] = beside(Path(scratch), *((32, 200) if options.quick else (256, 2000)))
        if "many" in options.parts:
            measured["many"] = many(Path(scratch), *((64, 200) if options.quick else (1024, 2000)))
    if options.out:
        options.out.write_text(json.dumps(measured, indent=1) + "\n")


def cases(scratch: Path) -> list[dict[str, Any]]:
    """Who names the right culprits."""
    rows = []
    print(f"{'case':46} {'right':12} {'lockstep explain':26} torchfrtrace")
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            case.make(Path(folder))
            ours, peer = lockstep(Path(folder)), torchfrtrace(Path(folder))
        row = {
            "case": case.name, "culprits": sorted(case.culprits),
            "lockstep": ours["said"], "right": fits(case, ours),
            "torchfrtrace": peer["said"], "torchfrtrace_right": peer["named"] == case.culprits,
        }  # fmt: skip
        rows.append(row)
        right = ", ".join(map(str, row["culprits"])) or "nobody"
        print(f"{case.name:46} {right:12} {_mark(row['right'])} {ours['said']:24} "
              f"{_mark(row['torchfrtrace_right'])} {peer['said']}", flush=True)  # fmt: skip
    both = [sum(row[name] for row in rows) for name in ("right", "torchfrtrace_right")]
    print(f"right: lockstep {both[0]} of {len(rows)}, torchfrtrace {both[1]} of {len(rows)}\n")
    return rows


def fits(case: Case, ours: Mapping[str, Any]) -> bool:
    return bool(ours["named"] == case.culprits and (not case.kinds or ours["kind"] in case.kinds))


def beside(scratch: Path, ranks: int, entries: int) -> dict[str, Any]:
    """The same dumps on one core, one after the other."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        generate(folder, ranks, entries)
        runs = {"lockstep": lockstep(folder, cpus=1), "torchfrtrace": torchfrtrace(folder, cpus=1)}
        runs["lockstep, again"] = lockstep(folder, cpus=1)
    print(f"{ranks} dumps of {entries} entries with stacks, one core")
    for who, run in runs.items():
        print(f"  {who:16} {_costs(run)}  {run['said']}")
    wall, cpu = (
        runs["torchfrtrace"][what] / min(runs["lockstep"][what], runs["lockstep, again"][what])
        for what in ("wall_s", "cpu_s")
    )
    memory = runs["lockstep"]["mib"] / runs["torchfrtrace"]["mib"]
    print(f"  {wall:.1f} times as fast ({cpu:.1f} in CPU time) with {memory:.1%} of the memory\n", flush=True)
    return {
        "ranks": ranks,
        "entries": entries,
        "runs": _plain(runs),
        "faster": wall,
        "faster_cpu": cpu,
        "memory": memory,
    }


def many(scratch: Path, ranks: int, entries: int) -> dict[str, Any]:
    """A large job, with as many readers as there are cores, two at most."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        generate(folder, ranks, entries)
        size = sum(path.stat().st_size for path in folder.iterdir())
        runs = {f"lockstep {turn}": lockstep(folder, cpus=2) for turn in (1, 2, 3)}
    print(f"{ranks} dumps of {entries} entries with stacks ({size >> 20} MiB), two cores")
    for run in runs.values():
        print(f"  {_costs(run)}  {run['said']}", flush=True)
    return {"ranks": ranks, "entries": entries, "bytes": size, "runs": _plain(runs)}


def generate(folder: Path, ranks: int, entries: int) -> None:
    """One communicator; one rank stops a few calls before the end."""
    job = steps(ranks, [Comm("0", tuple(range(ranks)), "default_pg")], entries)
    job.programs[ranks // 3] = job.programs[ranks // 3][: entries - 7]
    write(job.play(), folder, ring=entries)


def lockstep(folder: Path, cpus: int = 2) -> dict[str, Any]:
    wall_s, cpu_s, _, out, errors = timed([sys.executable, "-c", OURS, str(folder)], cpus)
    if not out:
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "mib": 0.0,
            "named": None,
            "kind": "",
            "said": f"failed: {errors[-200:]}",
        }
    answer = json.loads(out)
    verdict, (own, reader) = answer["verdict"], answer["kib"]
    named = frozenset(each["rank"] for each in verdict["culprits"])
    who = ", ".join(map(str, sorted(named))) or ("nobody waits" if verdict["class"] == "benign" else "cannot tell")
    if verdict["kind"] == "in_flight":
        who = "nobody"
    kind = "" if verdict["kind"] == "unknown" else f" ({verdict['kind']})"
    readers = min(cpus, len(os.sched_getaffinity(0)))
    return {
        "wall_s": wall_s, "cpu_s": cpu_s, "mib": (own + readers * reader) / 1024,
        "named": named, "kind": verdict["kind"], "said": f"{who}{kind}",
    }  # fmt: skip


def torchfrtrace(folder: Path, cpus: int = 2) -> dict[str, Any]:
    """What it names first; it is given the missing ranks' option where it asks for it."""
    command = [sys.executable, "-c", PEER, str(folder)]
    wall_s, cpu_s, kib, out, errors = timed(command, cpus)
    text = out + errors
    if "Missing dump files" in text:
        wall_s, cpu_s, kib, out, errors = timed([*command, "--allow-incomplete-ranks"], cpus)
        text = out + errors
    first = re.search(r"missing ranks: \{([\d, ]+)\}|error msg: (.*)", text)
    crash = re.findall(r"^(\w+(?:Error|Exception)\b.*)", text, re.MULTILINE)
    named: frozenset[int] | None = frozenset()
    said = "nobody"
    if crash and not first:
        named, said = None, f"fails: {crash[-1][:60]}"
    elif first:
        numbers = first[1] or ", ".join(re.findall(r"Culprit rank (\d+)", first[2]))
        named = frozenset(map(int, re.findall(r"\d+", numbers)))
        said = f"{', '.join(map(str, sorted(named)))} ({'missing' if first[1] else 'mismatch'})"
        more = len(re.findall(r"missing ranks: |error msg: ", text)) - 1
        said += f" and {more} reports more" if more else ""
    return {"wall_s": wall_s, "cpu_s": cpu_s, "mib": kib / 1024, "named": named, "said": said}


def timed(command: Sequence[str], cpus: int) -> tuple[float, float, int, str, str]:
    """Seconds, CPU seconds of it and its children, peak KiB of the process, what it printed."""
    allowed = set(sorted(os.sched_getaffinity(0))[:cpus])
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        child = subprocess.Popen(
            command, stdout=out, stderr=errors, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )  # fmt: skip
        _, _, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - began
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, texts[0], texts[1]


def _plain(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {who: {key: run[key] for key in ("wall_s", "cpu_s", "mib", "said")} for who, run in runs.items()}


def _costs(run: Mapping[str, Any]) -> str:
    return f"{run['wall_s']:7.2f} s  CPU {run['cpu_s']:7.2f} s  {run['mib']:6.0f} MiB"


def _mark(right: bool) -> str:
    return "+" if right else "-"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all when none is given")
    parser.add_argument("--quick", action="store_true", help="small numbers")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was measured as JSON")
    options = parser.parse_args()
    options.parts = options.parts or list(PARTS)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{unknown.pop()!r} is none of {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    main()
