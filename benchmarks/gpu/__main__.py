"""Runs everything that needs a GPU, and prints the table: `script/gpu`.

    script/gpu                      every part without a result of these sources: 25 minutes on one device
    script/gpu --minutes 9          starts no part that could take longer than what is left: call it again for the rest
    script/gpu sft decode           some parts
    script/gpu --again              also those that have a result
    script/gpu --cpu                a dry run: every part with tiny sizes on the CPU; tests that need CUDA are skipped
    script/gpu --table              the table of the results in --out, without measuring
    script/gpu --wheels             what has to be installed beside torch and transformers, and is not

Each part is a process group of its own, killed at its limit; no process outlives the command. Results are written as
soon as a part is done: OUT/results.json, OUT/table.md, and OUT/NAME.log with what the part printed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.gpu_table import table
from benchmarks.gpu.host_facts import ROOT, host_facts, missing_wheels, source_digest

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
NAMES = ("ceilings", "policy", "trainer", "weights", "watch", "devices", "sft", "decode", "grpo")
"""Here as well as in `benchmarks.gpu.parts`, which imports torch: `--help`, `--wheels` and `--table` need no packages,
as they tell what to install."""

ENDING = {signal.SIGINT, signal.SIGTERM}


def main() -> None:
    options = arguments()
    if options.wheels:
        print("\n".join(missing_wheels()))
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the part ends, too
    folder: Path = options.out or (ROOT / "build" / "gpu-dry-run" if options.cpu else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(folder / "results.json")
    if not options.table:
        measure(options, folder, results)
    text = table(results.read())
    (folder / "table.md").write_text(text)
    print(text)
    failed = [name for name, each in results.read()["parts"].items() if each["outcome"] == "failed"]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; see {folder}/NAME.log")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="script/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--wheels", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: benchmarks/results/gpu")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in NAMES]
    if unknown:
        parser.error(f"{unknown[0]!r} is no part, expected some of {', '.join(NAMES)}")
    return options


class Results:
    """The file of results: the host, and what came of each part."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {"parts": {}}
        found: dict[str, Any] = json.loads(self._path.read_text())
        return found

    def add(self, name: str, part: dict[str, Any]) -> None:
        """Replaces the part's result, by a new file in place of the old one."""
        found = self.read()
        found["parts"][name] = part
        new = self._path.with_suffix(".tmp")
        new.write_text(json.dumps(found, indent=2) + "\n")
        new.replace(self._path)


def measure(options: argparse.Namespace, folder: Path, results: Results) -> None:
    import torch

    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: `script/gpu --cpu` is the dry run")
    from benchmarks.gpu.parts import PARTS  # imports transformers too

    end, facts, digest = time.monotonic() + 60 * options.minutes, host_facts(), source_digest()
    for name in options.parts or NAMES:
        part = PARTS[name]
        before = results.read()["parts"].get(name, {})
        if before.get("source") == digest and before["outcome"] == "done" and not options.again:
            print(f"{name}: has a result already", flush=True)
            continue
        if time.monotonic() + 60 * part.minutes > end:
            print(f"{name}: left for another call, it may take {part.minutes:g} minutes", flush=True)
            continue
        print(f"{name}: {part.title}", flush=True)
        began = time.monotonic()
        found = run_part(name, folder, options.cpu, 60 * part.minutes)
        found |= {"seconds": round(time.monotonic() - began, 1), "source": digest, "host": facts}
        results.add(name, found)
        print(f"{name}: {found['outcome']} after {found['seconds']:g} s {found.get('why', '')}".rstrip(), flush=True)


def run_part(name: str, folder: Path, cpu: bool, limit_s: float) -> dict[str, Any]:
    """Runs a part as a process group, and kills what is left of it."""
    record = folder / f"{name}.json"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.parts", name, str(record), *(["--cpu"] if cpu else [])]
    with (folder / f"{name}.log").open("wb") as log:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until the part's group is known
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING),
        )  # fmt: skip
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_group(process)  # also after Ctrl-C and SIGTERM
    if code is None:
        return {"outcome": "failed", "why": f"took longer than {limit_s:g} s"}
    if code or not record.exists():
        return {"outcome": "failed", "why": f"its process ended with {code}"}
    found = json.loads(record.read_text())
    record.unlink()
    if "unavailable" in found:
        return {"outcome": "unavailable", "why": found["unavailable"]}
    return {"outcome": "failed" if found.get("failed") else "done", "record": found}


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to whatever is left of the process's group, and the process's end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


if __name__ == "__main__":
    main()
