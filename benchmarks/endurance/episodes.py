"""An episode: an undisturbed run, the same run with faults, and the comparison."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.endurance import watching
from benchmarks.endurance.disturbed_run import Broken, EpisodeRun, Injected, Tell
from benchmarks.endurance.schedule import STEPS, Episode
from benchmarks.endurance.settings import settings
from benchmarks.faults.network_namespaces import why_no_namespaces
from benchmarks.runner import ROOT

EXPLAIN_S = 120.0
NEEDED = {"ray": "ray", "hosts": "ray", "deepspeed": "deepspeed"}
"""The package that a cluster or trainer needs."""


def why_not(each: Episode) -> str:
    """Why an episode cannot be run here; empty if it can."""
    for part in (each.variant.cluster, each.variant.trainer):
        if part in NEEDED and find_spec(NEEDED[part]) is None:
            return f"the package {NEEDED[part]} is not installed"
    if each.variant.cluster == "hosts" and why_no_namespaces():
        return f"no network namespaces: {why_no_namespaces()}"
    return ""


def run_episode(each: Episode, home: Path, tell: Tell, stop_asked: Callable[[], bool]) -> dict[str, Any]:
    """The line of an episode. Its folder stays if an expectation was not met. Raises Stopped if `stop_asked()`."""
    began, folder = time.monotonic(), home / f"episode-{each.number}"
    line: dict[str, Any] = {"episode": each.number, "variant": each.variant.name, "seed_of_run": each.seed}
    if why := why_not(each):
        return {**line, "skipped": why}
    failures: list[dict[str, str]] = []
    calm, calm_line = undisturbed(each, home, tell, stop_asked)
    hit = EpisodeRun(each, home, folder, disturbed=True, tell=tell)
    hit.stop_asked = stop_asked
    with hit:
        try:
            hit.go()
            failures += _expectations(hit, calm, calm_line, line)
        except Broken as error:
            failures.append({"expectation": "the run continues", "found": str(error)})
        line["faults"] = _fault_lines(hit, failures)
        line |= {
            "steps": STEPS,
            "calm": calm_line,
            "span_s": round(hit.span_s, 2),
            "load": round(os.getloadavg()[0], 2),
        }
        if failures:
            _keep(hit, home / "failures" / str(each.number), failures)
    shutil.rmtree(folder, ignore_errors=True)
    line |= {"failures": failures, "wall_s": round(time.monotonic() - began, 1)}
    return {**line, "ended": time.strftime("%FT%TZ", time.gmtime())}


def undisturbed(each: Episode, home: Path, tell: Tell, stop_asked: Callable[[], bool]) -> tuple[Path, dict[str, Any]]:
    """The folder of the episode's undisturbed run on this machine, and its span; it is made once for each program."""
    config = json.dumps(settings(each, Path("home"), Path("runs"), None) | {"cluster": each.variant.cluster})
    key = hashlib.sha256((config + _program() + sys.executable).encode()).hexdigest()[:12]
    kept = home / "calm" / f"{each.variant.name.replace(' ', '-')}-{key}"
    if not (kept / "span.json").exists():
        tell("the undisturbed run")
        calm = EpisodeRun(each, home, home / f"calm-{each.number}", disturbed=False, tell=tell)
        calm.stop_asked = stop_asked
        with calm:
            try:
                calm.go()
            except Broken as error:
                text = calm.site.run.output.read_text(errors="replace")[-4000:]
                raise SystemExit(f"the undisturbed run of {each.variant.name} failed: {error}\n{text}") from None
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copytree(calm.run, kept / "run", dirs_exist_ok=True)
            (kept / "span.json").write_text(json.dumps({"span_s": round(calm.span_s, 2), "growth": calm.growth}))
        shutil.rmtree(calm.folder, ignore_errors=True)
    found: dict[str, Any] = json.loads((kept / "span.json").read_text())
    return kept / "run", found


def _program() -> str:
    """The state of the product's code."""
    words = ["git", "rev-parse", "HEAD:src"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip()


def _expectations(hit: EpisodeRun, calm: Path, calm_line: dict[str, Any], line: dict[str, Any]) -> list[dict[str, str]]:
    """Compare a finished run with the undisturbed one; returns what is not as promised."""
    failures = []

    def expect(met: bool, expectation: str, found: object) -> None:
        if not met:
            failures.append({"expectation": expectation, "found": str(found)})

    lost = watching.missing_steps(hit.run, STEPS)
    expect(not lost, "every step is done once", lost)
    if watching.used_prompts(hit.run) != watching.used_prompts(calm):
        expect(False, "every prompt is used as in the undisturbed run", "other prompts, or in other steps")
    apart = watching.difference(hit.run, calm)
    exact = all(each.fault.exact or each.skipped for each in hit.faults)
    expect(apart == 0 or (not exact and apart < watching.CLOSE), "weights equal the undisturbed run's", f"{apart:.1e}")
    accusable = [each.accusable for each in hit.faults if not each.skipped]
    alarms = watching.false_alarms(watching.stalls(hit.run), accusable)
    expect(not alarms, "no verdict names an innocent process", "; ".join(alarms))
    orphans = hit.orphans()
    expect(not orphans, "nothing is left of the run", "; ".join(orphans))
    grown = watching.grown(hit.growth, calm_line["growth"])
    expect(not grown, "no process grows over the last half", grown)
    line |= {
        "step_s": round(watching.typical_step_s(hit.run), 4), "lost_steps": len(lost), "difference": apart,
        "exact": exact, "false_alarms": alarms, "orphans": len(orphans), "growth": hit.growth,
    }  # fmt: skip
    return failures


def _fault_lines(hit: EpisodeRun, failures: list[dict[str, str]]) -> list[dict[str, Any]]:
    """What each fault did; a silent process that no verdict names is a failure."""
    readable = (hit.run / "ledger.sqlite").exists()
    stalls = watching.stalls(hit.run) if readable else []
    events = watching.recovery_events(hit.run) if readable else []
    lines = []
    for each, following in zip_longest(hit.faults, hit.faults[1:]):
        named_s = watching.seconds_until_named(stalls, each.accusable)
        lines.append(
            {"fault": each.fault.name, "step": each.step, "skipped": each.skipped, "named_s": named_s,
             "back_s": each.back_s, "resumed": each.resumed, "restarts": _restarts(events, each, following)}
        )  # fmt: skip
        if each.fault.silent and not each.skipped and each.back_s is not None and named_s is None:
            found = f"`{each.fault.name}` in step {each.step}"
            failures.append({"expectation": "a silent process is named", "found": found})
    return lines


def _restarts(events: list[dict[str, Any]], each: Injected, following: Injected | None) -> list[dict[str, Any]]:
    """Role and seconds of the restarts after a fault and before the next one."""
    until = each.over + 60 if following is None else following.at
    mine = [e for e in events if e["action"] == "restarted" and each.at <= e["at"] < until]
    return [{"role": e["role"], "seconds": e["seconds"]} for e in mine]


def _keep(hit: EpisodeRun, folder: Path, failures: list[dict[str, str]]) -> None:
    """Keep the run's folder and output, and what `lockstep explain` says of them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hit.site.run.members()
    stacks = "\n".join(f"{each.pid} {each.status()} {each.cmdline()[:6]}" for each in hit.site.run.remaining())
    (folder / "processes.txt").write_text(stacks)
    for source in (hit.run, hit.site.run.output, hit.folder / "run.yaml"):
        with_files = shutil.copytree if source.is_dir() else shutil.copy
        if source.exists():
            with_files(source, folder / source.name)  # type: ignore[operator]
    subject = folder / hit.run.name if (hit.run / "ledger.sqlite").exists() else folder
    words = [sys.executable, "-c", "from lockstep.cli import app; app()", "explain", str(subject)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=EXPLAIN_S, check=False)
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        text = f"`lockstep explain` did not answer within {EXPLAIN_S:g} s"
    (folder / "explanation.txt").write_text(text)
    (folder / "failures.json").write_text(json.dumps(failures, indent=2))
    for failure in failures:
        failure["explain"] = text[:1500]
