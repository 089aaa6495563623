"""Runs the jobs of `benchmarks/cases/ran` anew: `python -m benchmarks.job_makers.make_jobs [NAME ...] [--jobs 2]`.

Each job of `job_makers/lists` is a shell script that starts real processes in a folder of its own, writes what its user
would find to `out/` and injects its fault. The truth is the job's entry, written before the job runs. Paths, the host's
name and its addresses are replaced by plausible ones. A job that exists is kept unless it is named.
"""

import argparse
import importlib
import json
import os
import pkgutil
import random
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case_corpus import OWN_CASES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RAN = OWN_CASES / "ran"
MOST_BYTES = 200 * 1024
LIMIT_S = 240.0
HOMES = (
    "/home/user/project",
    "/home/mia/ranker",
    "/workspace/train",
    "/data/jobs/run42",
    "/home/ubuntu/exp",
    "/srv/app",
)
SITES = ("/opt/venv", "/opt/conda", "/home/user/venv", "/usr/local")
HOSTS = ("gpu-node-07", "worker-3", "n0142", "trainbox", "dgx-12", "ip-10-4-2-31")
PRELUDE = """
mkdir -p out
hit() { python3 hit.py "$@" >/dev/null 2>&1 & }
plain() { local n=$1 r; shift; for r in $(seq 0 $((n - 1))); do
  RANK=$r LOCAL_RANK=$r WORLD_SIZE=${WORLD:-$n} MASTER_ADDR=${ADDR:-127.0.0.1} MASTER_PORT=$PORT \
    python -u "$@" > out/${PREFIX:-rank}$r.log 2>&1 & pids="$pids $!"; done; }
labelled() { local label=$1 n=$2 r; shift 2; for r in $(seq 0 $((n - 1))); do
  RANK=$r LOCAL_RANK=$r SLURM_PROCID=$r SLURM_NTASKS=$n WORLD_SIZE=${WORLD:-$n} MASTER_ADDR=${ADDR:-127.0.0.1} \
    MASTER_PORT=$PORT python -u "$@" 2>&1 | sed -u "s/^/$(printf "$label" $r)/" >> "$FILE" & pids="$pids $!"; done; }
finish() { wait $pids; }
"""
"""For every job: `plain N SCRIPT` starts ranks with a log each, `labelled FORMAT N SCRIPT` with one prefixed log."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job and the truth about it, from what is injected."""

    name: str
    framework: str
    cls: str
    script: str
    culprit: tuple[int | str, ...] | None = None
    also: tuple[str, ...] = ()
    alt: tuple[tuple[int | str, ...], ...] = ()
    sufficiency: str = "root"
    fix: str = ""
    env: str = ".venv"
    """The environment whose programs are on the path: `.venv` or `.venv-scale` (with Ray)."""
    made: str = "ran"

    @property
    def truth(self) -> dict[str, object]:
        """Its entry in truth.json."""
        return {
            "class": self.cls,
            "also_ok": list(self.also),
            "culprit": list(self.culprit) if self.culprit is not None else None,
            "culprit_alt": [list(each) for each in self.alt],
            "framework": self.framework,
            "sufficiency": self.sufficiency,
            "fix": self.fix or ("Nothing to fix." if self.cls == "benign" else ""),
            "made": self.made,
        }


def all_jobs() -> list[Job]:
    """The jobs of every list."""
    lists = HERE / "lists"
    names = sorted(each.name for each in pkgutil.iter_modules([str(lists)]))
    modules = [importlib.import_module(f"benchmarks.job_makers.lists.{name}") for name in names]
    found = [job for module in modules for job in module.JOBS]
    repeated = {job.name for job in found if sum(other.name == job.name for other in found) > 1}
    if repeated:
        raise ValueError(f"these jobs have two entries: {sorted(repeated)}; rename one of each")
    return found


def make(job: Job, scratch: Path, peer: str) -> str:
    """Runs a job and puts its files into the corpus; returns what is odd about them."""
    work = scratch / job.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for script in (HERE / "scripts").glob("*.py"):
        shutil.copy(script, work)
    seed = zlib.crc32(job.name.encode())
    venv = _environment(job.env)
    env = {
        "PATH": f"{venv}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(work),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "JOB_OF_CORPUS": job.name,
        "PORT": str(21000 + seed % 9000),
        "PORT2": str(31000 + seed % 700),
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "PEER": peer,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with subprocess.Popen(
        ["nice", "-n", "19", "bash", "-c", PRELUDE + job.script],
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        late = process.returncode is None or process.returncode == -signal.SIGKILL
    _end_left_overs(job.name)
    target = RAN / "jobs" / job.name
    shutil.rmtree(target, ignore_errors=True)
    size = 0
    for file in sorted(each for each in (work / "out").rglob("*") if each.is_file()):
        place = target / file.relative_to(work / "out")
        place.parent.mkdir(parents=True, exist_ok=True)
        data = file.read_bytes()
        node = seed + 1 if "node1" in str(place.relative_to(target)) else seed
        text = neutral(data.decode("utf-8", "surrogateescape"), work, venv, peer, seed, node)
        place.write_bytes(data if file.suffix in {".pkl", ".pt"} else text.encode("utf-8", "surrogateescape"))
        size += len(data)
    odd = [word for word, wrong in (("late", late), ("large", size > MOST_BYTES), ("empty", size < 80)) if wrong]
    shutil.rmtree(work, ignore_errors=True)
    return ", ".join(odd) or f"{size} bytes"


def neutral(text: str, work: Path, venv: Path, peer: str, seed: int, node: int) -> str:
    """Replaces the paths and names of the machine that ran a job; `node` picks the host's name."""
    draw, host = random.Random(seed), HOSTS[node % len(HOSTS)]
    home, site = draw.choice(HOMES), draw.choice(SITES)
    text = re.sub(r"(?m)^(  host      : )localhost$", rf"\g<1>{host}", text)
    text = re.sub(r"(?m)^(\d+\t\d+\.\d+\t)(?!.*\bray\b).*$", r"\1/usr/lib/systemd/systemd-journald", text)
    for path, shown in ((venv.resolve(), site), (venv, site), (work, home)):
        text = text.replace(str(path), shown)
    text = text.replace(peer, f"{site}/lib/python3.11/site-packages") if peer else text
    text = re.sub(r"/tmp/ray/session_[\w-]+", "/tmp/ray/session_2026-11-27_09-12-44_184310_2107", text)
    own = os.uname().nodename
    text = re.sub(rf"(?<![\w./-]){re.escape(own)}(?=[:_ \]\"',)\n]|$)(?!_)", host, text)
    text = re.sub(rf"{re.escape(own)}_(?=\d)", f"{host}_", text)
    for address in _addresses():
        text = text.replace(address, f"10.4.2.{20 + seed % 60}" if ":" not in address else f"fd00:10::{20 + seed % 60}")
    return text.replace("/root/", "/home/user/")


def write_truth(jobs: Sequence[Job]) -> None:
    """Writes the truth about every job that exists."""
    made = {job.name: job.truth for job in jobs if (RAN / "jobs" / job.name).is_dir()}
    text = "".join(f"{json.dumps(name)}: {json.dumps(made[name])},\n" for name in sorted(made))
    (RAN / "truth.json").write_text("{\n" + text.removesuffix(",\n") + "\n}\n")


def _environment(name: str) -> Path:
    own = ROOT / name
    return own if own.is_dir() else Path(os.environ.get("LOCKSTEP_SCALE_ENV", str(own)))


def _addresses() -> Iterator[str]:
    said = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout
    yield from said.split()


def _end_left_overs(name: str) -> None:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"JOB_OF_CORPUS={name}".encode() in environ:
            try:
                os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue


def main(arguments: Sequence[str]) -> int:
    """Makes the jobs that are named, or those that do not exist yet."""
    parser = argparse.ArgumentParser(prog="benchmarks.job_makers.make_jobs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="jobs to make anew; none: those that do not exist")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--scratch", type=Path, default=Path("build/job_makers").resolve())
    parser.add_argument("--peer", default="", help="a folder with TRL, for the jobs that need it (script/benchmark)")
    parser.add_argument("--only-truth", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    jobs = all_jobs()
    unknown = set(options.names) - {job.name for job in jobs}
    if unknown:
        raise SystemExit(f"no job is called {sorted(unknown)[0]!r}; the names are in benchmarks/job_makers/lists")
    wanted = [job for job in jobs if job.name in options.names] or [
        job for job in jobs if not options.names and not (RAN / "jobs" / job.name).is_dir()
    ]
    (RAN / "jobs").mkdir(parents=True, exist_ok=True)
    if not options.only_truth:
        with ThreadPoolExecutor(options.jobs) as pool:
            started = {pool.submit(make, job, options.scratch, options.peer): job for job in wanted}
            for done in as_completed(started):
                print(f"{started[done].name}: {done.result()}", flush=True)
    write_truth(jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
