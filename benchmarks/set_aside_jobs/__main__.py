"""Runs the entries and stores what they print, with this machine's paths, names and addresses replaced."""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from benchmarks.case_corpus import OWN_CASES, SET_ASIDE
from benchmarks.job_makers.make_jobs import all_jobs
from benchmarks.set_aside_jobs import (
    communication_threads,
    deepspeed_entries,
    eighth_entries,
    eighth_told_entries,
    eighth_trainer_told_entries,
    failure_threads,
    fifth_entries,
    fifth_framework_entries,
    fifth_told_entries,
    fourth_entries,
    fourth_framework_entries,
    fourth_told_entries,
    launcher_entries,
    lightning_entries,
    lockstep_entries,
    ray_entries,
    seventh_entries,
    seventh_told_entries,
    seventh_trainer_told_entries,
    sixth_entries,
    sixth_framework_entries,
    sixth_told_entries,
    third_entries,
    third_framework_entries,
    told_entries,
    vllm_entries,
)
from benchmarks.set_aside_jobs.entry import Entry
from lockstep.base.text import count_noun

REPOSITORY = Path(__file__).parents[2]
CORPORA = tuple(OWN_CASES / each for each in SET_ASIDE)
"""Every job is in one of them; a new one goes to the last."""
SCRIPTS = Path(__file__).parent / "scripts"
VENVS = {
    "train": REPOSITORY / ".venv",
    "scale": REPOSITORY / ".venv-scale",
    "lightning": Path(os.environ.get("LIGHTNING_VENV", REPOSITORY / ".venv-lightning")),
}
"""Nothing makes the one of Lightning: a venv whose site-packages has a .pth to those of `.venv`."""
PEER = Path(os.environ.get("PEER", REPOSITORY / ".peer"))
"""A folder with TRL, for its jobs (`script/benchmark` installs one)."""
MOST_BYTES = 200_000
MODULES = (
    communication_threads, deepspeed_entries, eighth_entries, eighth_told_entries, eighth_trainer_told_entries,
    failure_threads, fifth_entries, fifth_framework_entries, fifth_told_entries, fourth_entries,
    fourth_framework_entries, fourth_told_entries, launcher_entries, lightning_entries, lockstep_entries, ray_entries,
    seventh_entries, seventh_told_entries, seventh_trainer_told_entries, sixth_entries, sixth_framework_entries,
    sixth_told_entries, third_entries, third_framework_entries, told_entries, vllm_entries,
)  # fmt: skip
ENTRIES = {each.name: each for module in MODULES for each in module.ENTRIES}


def main() -> None:
    """Runs entries, stores the output of some again, or writes the truth of all whose job is there."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.set_aside_jobs")
    options.add_argument("action", choices=("run", "truth", "list"))
    options.add_argument("names", nargs="*")
    options.add_argument("--work", type=Path, default=Path("build/set_aside_jobs").resolve())
    chosen = options.parse_args()
    if chosen.action == "run":
        for name in chosen.names:
            run(ENTRIES[name], chosen.work / name)
    elif chosen.action == "list":
        print("\n".join(f"{each.name}\t{each.cls}\t{each.framework}" for each in ENTRIES.values()))
    else:
        for corpus in CORPORA:
            made = truth(corpus)
            place = corpus / "truth.json"
            lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(made[name])}" for name in made)
            if not place.exists() or json.loads(place.read_text(encoding="utf-8")) != made:
                place.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
            print(f"{corpus.name}: {count_noun(len(made), 'job')}")


def truth(corpus: Path) -> dict[str, dict[str, object]]:
    """Returns the truth about the jobs that a corpus has, from the entries here and in `benchmarks.job_makers`."""
    known = {job.name: job.truth for job in all_jobs()} | {name: each.truth() for name, each in ENTRIES.items()}
    return {each.name: known[each.name] for each in sorted((corpus / "jobs").iterdir()) if each.name in known}


def folder_of(name: str) -> Path:
    """Returns the folder of a job, in the corpus that has it."""
    places = [corpus / "jobs" / name for corpus in CORPORA]
    return next((each for each in places if each.is_dir()), places[-1])


def run(entry: Entry, work: Path) -> None:
    """Runs an entry in a new folder and stores what it left.

    Raises:
        ValueError: it is a re-told one, or it printed nothing or too much.
    """
    if not entry.script:
        raise ValueError(f"{entry.name} is told, not run")
    shutil.rmtree(work, ignore_errors=True)
    project, out = work / "project", work / "out"
    for each in (project, out, work / "tmp"):
        each.mkdir(parents=True)
    venv = VENVS[entry.venv]
    env = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "PATH", "USER")}
    env |= {
        "PATH": f"{venv / 'bin'}:{env['PATH']}", "S": str(SCRIPTS), "OUT": str(out), "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(work / "tmp"), "DS_ACCELERATOR": "cpu",
        "PEER": str(PEER), "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "TERM": "xterm",
    }  # fmt: skip
    with (out / "job.log").open("wb") as log:
        command = ["nice", "-n", "19", "timeout", "-k", "10", str(entry.limit_s), "bash", "-c", entry.script]
        done = subprocess.run(command, cwd=project, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    files = [each for each in out.rglob("*") if each.is_file()]
    target = folder_of(entry.name)
    shutil.rmtree(target, ignore_errors=True)
    for each in files:
        text = neutral(each.read_bytes().decode("utf-8", "replace"), entry, work)
        if text:
            place = target / each.relative_to(out)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text.encode())
            if place.stat().st_size > MOST_BYTES:
                raise ValueError(f"{place} has {place.stat().st_size} bytes")
    print(f"{entry.name}: exit {done.returncode}, {sum(each.stat().st_size for each in files)} bytes", file=sys.stderr)


def neutral(text: str, entry: Entry, work: Path) -> str:
    """Returns what a job printed without paths, names and addresses of the machine that it ran on."""
    site = "/opt/venv/lib/python3.11/site-packages"
    pairs = [
        (str(work / "project"), entry.home),
        (str(work / "out"), f"{entry.home}/logs"),
        (str(work / "tmp"), "/tmp"),
    ]
    pairs += [(str(each), "/opt/venv") for each in (VENVS["scale"], VENVS["train"], VENVS["lightning"])]
    pairs += [(str(PEER), site), (str(REPOSITORY / "src"), site), (str(REPOSITORY), "/opt/lockstep")]
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    pairs += [(each, f"10.20.{len(entry.host)}.{11 + index}") for index, each in enumerate(addresses)]
    for old, new in pairs:
        text = text.replace(old, new)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", entry.host, text)
    text = text.replace(sys.base_prefix, "/usr")
    text = re.sub(r"(?:/[\w-]+){1,2}/\.pyenv/\w+/bin", "/usr/bin", text)
    text = re.sub(r"/tmp/r[a-z0-9_]{8}\b", "/tmp/ray", text)
    return text.replace("/root/", "/home/user/").replace("/root", "/home/user")


if __name__ == "__main__":
    main()
