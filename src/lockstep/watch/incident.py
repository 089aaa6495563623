"""An incident: a verdict with everything collected around it, in a folder that is there completely or not at all.

    incidents/20261121-231502-absent-policy-1/
        verdict.json       the one form of verdicts
        story.txt          what happened, in plain words
        timeline.json      events of the last seconds of all processes, on one clock
        beacons.json       what every process said of itself
        processes.json     their lives, codes, use of the machine
        stacks/NAME.txt    of the culprits and of one innocent (NAME.native.txt: with native frames)
        logs/NAME.log      the last lines of each
        dumps/NAME.json    flight recorders, where there are any
        environment.json run.json machine.json told.json
        findings.json      what is odd about the variables in environment.json: written by who hears of the incident

Texts are redacted; sizes are bounded; a failure to write one never disturbs the run.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.watch.naming import some
from lockstep.watch.secrets import redact, redact_text, secret_values
from lockstep.watch.verdict import Culprit, Verdict

log = logging.getLogger(__name__)

MOST = 100
"""Incidents of a run that are kept; more say nothing new."""
FILE_BYTES = 4 << 20
TIMELINE_S = 60.0
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Contents:
    """What an incident is written from."""

    verdict: Verdict
    wall: float
    at_ns: int
    """The monotonic clock of who judges."""
    bundles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By host: what its agent gathered, see `gathering`."""
    stacks: Mapping[str, Any] = field(default_factory=dict)
    """By process: its threads, as `stacks.to_json` has them."""
    native: Mapping[str, Any] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    """By host: nanoseconds that its monotonic clock is ahead."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    told: Sequence[Mapping[str, Any]] = ()
    gaps: Sequence[str] = ()
    dumps: Mapping[str, str] = field(default_factory=dict)
    """Flight recorders, by file name."""


def write(root: Path, contents: Contents, known: Collection[str] = ()) -> Path | None:
    """Writes the folder and returns it; None, and a line in the log, where that is impossible. `known` are secrets."""
    draft: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        if sum(1 for each in root.iterdir() if each.is_dir()) >= MOST:
            log.warning("no incident is written: %s has %d already", root, MOST)
            return None
        target = _free(root, name_of(contents.verdict, contents.wall))
        draft = root / f".{target.name}.{os.getpid()}"
        for path, text in files(contents, known):
            file = draft / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text[:FILE_BYTES], errors="replace")
        draft.rename(target)
    except OSError as error:
        log.warning("the incident could not be written: %s", error)
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        return None
    return target


def name_of(verdict: Verdict, wall: float) -> str:
    """`20261121-231502-absent-policy-1`."""
    who = "+".join(who_of(each) for each in verdict.culprits[:_NAMED]) or "nobody"
    more = "+more" if len(verdict.culprits) > _NAMED else ""
    cleaned = re.sub(r"[^A-Za-z0-9._+-]+", "-", who + more)[:80]
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(wall))}-{verdict.kind}-{cleaned}"


def _free(root: Path, name: str) -> Path:
    number, target = 1, root / name
    while target.exists():
        number += 1
        target = root / f"{name}.{number}"
    return target


def files(contents: Contents, known: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Relative path and text of each file, redacted."""
    environments = {host: bundle.get("environment", {}) for host, bundle in contents.bundles.items()}
    hidden = set(known) | set(secret_values(os.environ))
    for environment in environments.values():
        hidden.update(secret_values(environment))
    secrets = sorted(hidden - {""}, key=len, reverse=True)

    def plain(text: str) -> str:
        return redact_text(text, secrets)

    def shown(values: Any) -> str:
        return json.dumps(redact(values, secrets), indent=1, default=str, sort_keys=False) + "\n"

    yield "verdict.json", shown(contents.verdict.json() | {"gaps": list(contents.gaps)})
    yield "story.txt", plain(story(contents))
    yield "timeline.json", shown(timeline(contents))
    yield "beacons.json", shown(_part(contents, "beacons"))
    yield "processes.json", shown(_part(contents, "processes"))
    yield "machine.json", shown(_part(contents, "machine"))
    yield "environment.json", shown(environments)
    yield "run.json", shown(contents.facts)
    yield "told.json", shown(list(contents.told))
    for suffix, taken in (("", contents.stacks), (".native", contents.native)):
        for name, threads in taken.items():
            yield f"stacks/{_safe(name)}{suffix}.txt", plain(_stack_text(threads))
    for name, text in contents.dumps.items():
        yield f"dumps/{_safe(name)}", plain(text)
    for bundle in contents.bundles.values():
        for name, lines in bundle.get("logs", {}).items():
            yield f"logs/{_safe(name)}.log", plain(lines + "\n")


def _part(contents: Contents, name: str) -> dict[str, Any]:
    return {host: bundle.get(name) for host, bundle in contents.bundles.items()}


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "-"


def _stack_text(threads: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for thread in threads:
        marks = [mark for mark, name in (("active", "active"), ("holds the GIL", "holds_gil")) if thread.get(name)]
        lines.append(f"thread {thread['thread']} {thread['name']} {', '.join(marks)}".rstrip())
        lines += [f"    {function} ({file}:{line})" for function, file, line in thread["frames"]]
    return "\n".join(lines) + "\n" if lines else "no stack could be taken\n"


def timeline(contents: Contents) -> list[dict[str, Any]]:
    """Events of all beacons in the minute before the verdict, on one clock: `at_s` before (negative) the verdict."""
    found = []
    for host, bundle in contents.bundles.items():
        ahead = contents.offsets.get(host, 0)
        for name, state in (bundle.get("beacons") or {}).items():
            for event in state.get("events", ()):
                at_s = (event["at_ns"] - ahead - contents.at_ns) / 1e9
                if at_s >= -TIMELINE_S:
                    found.append((at_s, {"at_s": round(at_s, 4), "who": name, "host": host, "kind": event["kind"],
                                         "text": event["text"]}))  # fmt: skip
    for frame in contents.told:
        at_s = frame["wall"] - contents.wall
        if at_s >= -TIMELINE_S:
            said = {"at_s": round(at_s, 4), "who": "supervisor", "host": "", "kind": frame["change"]}
            found.append((at_s, said | {"text": frame["headline"]}))
    return [event for _, event in sorted(found, key=lambda entry: entry[0])]


def who_of(culprit: Culprit) -> str:
    """`policy-1`: its name, else role and rank."""
    if culprit.name:
        return culprit.name
    rank = "" if culprit.rank is None else f"-{culprit.rank}"
    return f"{culprit.role or 'process'}{rank}"


def headline(verdict: Verdict) -> str:
    """One line: what is wrong, and whose line it is."""
    if verdict.explanation:
        return verdict.explanation
    who = some(verdict.culprits, _NAMED, who_of) or "nobody is named"
    where = next((each.where for each in verdict.culprits if each.where), "")
    return f"{verdict.kind} ({who}){f' in {where}' if where else ''}"


def story(contents: Contents) -> str:
    """What happened, for a person who was not there."""
    verdict = contents.verdict
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(contents.wall))
    cause = "" if verdict.cause in ("", "unknown") else f", class {verdict.cause}"
    parts = [f"{when}: {verdict.kind}{cause}, {verdict.level}, confidence {verdict.confidence:.2f}."]
    parts.append(verdict.explanation or headline(verdict))
    parts += [
        f"{who_of(each)} (rank {each.rank}, role {each.role or '?'}, host {each.host or '?'}, pid {each.pid})"
        + (f" is in {each.where}." if each.where else ".")
        for each in verdict.culprits
    ]
    if verdict.collective is not None:
        each = verdict.collective
        site = f", called at {each.call_site}" if each.call_site else ""
        parts.append(f"The collective is {each.operation or 'number'} #{each.seq} on {each.communicator!r}{site}.")
    if verdict.waiting:
        parts.append("Who waits:\n" + "\n".join(f"  - {_link(each)}" for each in verdict.waiting))
    if verdict.evidence:
        parts.append(
            "Evidence:\n" + "\n".join(f"  - {each.source or each.file}: {each.text}" for each in verdict.evidence)
        )
    if verdict.alternatives:
        parts.append(
            "It may also be " + ", ".join(f"{e.what} ({e.confidence:.2f})" for e in verdict.alternatives) + "."
        )
    if verdict.fix:
        parts.append(f"What helps: {verdict.fix}")
    if verdict.collect:
        parts.append("What would tell more: " + "; ".join(verdict.collect))
    if contents.gaps:
        parts.append("What is missing here: " + "; ".join(contents.gaps))
    return "\n\n".join(parts) + "\n"


def _link(waiting: Any) -> str:
    since = "" if waiting.since_s is None else f" since {waiting.since_s:.0f} s"
    return f"{waiting.who} waits for {waiting.on}{since}: {waiting.what}"


def incidents(root: Path) -> list[Path]:
    """The incidents of a run, oldest first; folders that are not complete are none."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        found = [each for each in root.iterdir() if (each / "verdict.json").is_file() and not each.name.startswith(".")]
    return sorted(found)
