"""Writes an incident: a folder with a verdict and the evidence for it.

    incidents/20261121-231502-absent-policy-1/
        verdict.json       the verdict as JSON
        story.txt          what happened, as text
        timeline.json      events of all processes in the last minute, on one clock
        capture.jsonl      what they have done until then, for `lockstep timeline` (see `timeline_capture`)
        beacons.json       the beacons of the processes that were asked: in a small job of all
        processes.json     state, exit code and resource usage of each of them
        stacks/NAME.txt    stacks of the culprits, of processes that wait for them and of some others
                           (NAME.native.txt: with native frames)
        logs/NAME.log      the last lines of each one's log
        dumps/NAME.json    flight-recorder dumps, if there are any
        environment.json   environment variables of each host
        machine.json       state of each host
        devices.json       the newest samples of its GPUs and which process uses which, if there are any
        run.json           the run's config, versions and command
        told.json          the frames published before
        findings.json      findings about environment.json; a subscriber of the supervisor writes this file

A folder is written completely or not at all. Secrets are redacted and sizes are bounded. A failure to write an incident
never affects the run.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base.folders import check_shared_folder, make_folder, make_private_dir, write_private
from lockstep.base.secrets import redact, redact_environment, redact_text, secret_values
from lockstep.base.text import summarize_list
from lockstep.watch.diagnosis.verdict import Culprit, Verdict
from lockstep.watch.supervisor.timeline_capture import answer_line, header_line

log = logging.getLogger(__name__)

USUAL_FOLDER, CAPTURE_FILE = "incidents", "capture.jsonl"
"""The folder for incidents in a run folder, and that of `lockstep watch` unless it is given another one."""
MAX_INCIDENTS = 100
"""The most incidents per run; further ones are not written."""
FILE_BYTES = 4 << 20
TIMELINE_S = 60.0
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class IncidentContents:
    """The content of an incident."""

    verdict: Verdict
    wall: float
    at_ns: int
    """When the collection began, on the supervisor's monotonic clock."""
    bundles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The evidence that each host's agent collected (see `agent.host_evidence`); keys are hosts."""
    stacks: Mapping[str, Any] = field(default_factory=dict)
    """The threads of each process, in the form of `py_spy.stacks_to_json`; keys are names of processes."""
    native: Mapping[str, Any] = field(default_factory=dict)
    """The same with native frames."""
    offsets: Mapping[str, int] = field(default_factory=dict)
    """By how many nanoseconds each host's monotonic clock is ahead of the supervisor's; keys are hosts."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    told: Sequence[Mapping[str, Any]] = ()
    """The frames published before."""
    gaps: Sequence[str] = ()
    """Missing evidence, as text."""
    dumps: Mapping[str, str] = field(default_factory=dict)
    """Flight-recorder dumps by file name."""


def write_incident(root: Path, contents: IncidentContents, known: Collection[str] = ()) -> Path | None:
    """Writes an incident, which only this user can read, and returns its folder. If that fails, logs a warning and
    returns None. `known` are secrets that are redacted in addition to those in environments."""
    draft: Path | None = None
    try:
        make_incident_root(root)
        if sum(1 for each in root.iterdir() if each.is_dir()) >= MAX_INCIDENTS:
            log.warning("no incident is written: %s has %d already", root, MAX_INCIDENTS)
            return None
        target = _free_folder(root, incident_name(contents.verdict, contents.wall))
        draft = root / f".{target.name}.{os.getpid()}"
        make_private_dir(draft, "remove it")
        for path, text in incident_files(contents, known):
            file = draft / path
            file.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(file, text[:FILE_BYTES].encode(errors="replace"))
        draft.rename(target)
    except OSError as error:
        log.warning("the incident could not be written: %s", error)
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        return None
    return target


def make_incident_root(root: Path) -> None:
    """Creates the folder for incidents, in which nobody else can put a link in the way of a later write. Raises
    UnsafePath if it exists and another user controls it."""
    if not root.is_symlink():
        new = not root.exists()
        facts = make_folder(root).stat()
        # Earlier versions made the usual folder as the umask allowed. Others may be used for more than incidents.
        ours = (new or root.name == USUAL_FOLDER) and facts.st_uid == os.geteuid()
        if ours and facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
            root.chmod(stat.S_IMODE(facts.st_mode) & ~0o022)
    check_shared_folder(root, "remove it, or choose a folder of your own (lockstep watch --incidents)")


def incident_name(verdict: Verdict, wall: float) -> str:
    """`20261121-231502-absent-policy-1`."""
    who = "+".join(culprit_name(each) for each in verdict.culprits[:_MAX_NAMED]) or "nobody"
    more = "+more" if len(verdict.culprits) > _MAX_NAMED else ""
    cleaned = re.sub(r"[^A-Za-z0-9._+-]+", "-", who + more)[:80]
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(wall))}-{verdict.kind}-{cleaned}"


def _free_folder(root: Path, name: str) -> Path:
    number, target = 1, root / name
    while target.exists():
        number += 1
        target = root / f"{name}.{number}"
    return target


def incident_files(contents: IncidentContents, known: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields the relative path and redacted text of each file."""
    given = {host: bundle.get("environment", {}) for host, bundle in contents.bundles.items()}
    hidden = {*known, *secret_values(os.environ)}.union(*map(secret_values, given.values()))
    secrets = sorted(hidden - {""}, key=len, reverse=True)

    def redacted(text: str) -> str:
        return redact_text(text, secrets)

    def redacted_json(values: Any) -> str:
        return json.dumps(redact(values, secrets), indent=1, default=str, sort_keys=False) + "\n"

    verdict = contents.verdict.json() | {"gaps": list(contents.gaps), "wall": contents.wall}
    yield "verdict.json", redacted_json(verdict)
    yield "story.txt", redacted(incident_story(contents))
    yield "timeline.json", redacted_json(incident_timeline(contents))
    yield CAPTURE_FILE, "".join(incident_capture(contents, secrets))
    yield "beacons.json", redacted_json(_by_host(contents, "beacons"))
    yield "processes.json", redacted_json(_by_host(contents, "processes"))
    yield "machine.json", redacted_json(_by_host(contents, "machine"))
    if devices := {host: each["devices"] for host, each in contents.bundles.items() if each.get("devices")}:
        yield "devices.json", redacted_json(devices)
    yield "environment.json", redacted_json({host: redact_environment(each) for host, each in given.items()})
    yield "run.json", redacted_json(contents.facts)
    yield "told.json", redacted_json(list(contents.told))
    for suffix, taken in (("", contents.stacks), (".native", contents.native)):
        for name, threads in taken.items():
            yield f"stacks/{_safe_name(name)}{suffix}.txt", redacted(_stack_text(threads))
    for name, text in contents.dumps.items():
        yield f"dumps/{_safe_name(name)}", redacted(text)
    for bundle in contents.bundles.values():
        for name, lines in bundle.get("logs", {}).items():
            yield f"logs/{_safe_name(name)}.log", redacted(lines + "\n")


def _by_host(contents: IncidentContents, name: str) -> dict[str, Any]:
    return {host: bundle.get(name) for host, bundle in contents.bundles.items()}


def _safe_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "-"


def _stack_text(threads: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for thread in threads:
        marks = [mark for mark, name in (("active", "active"), ("holds the GIL", "holds_gil")) if thread.get(name)]
        lines.append(f"thread {thread['thread']} {thread['name']} {', '.join(marks)}".rstrip())
        lines += [f"    {function} ({file}:{line})" for function, file, line in thread["frames"]]
    return "\n".join(lines) + "\n" if lines else "no stack could be taken\n"


def incident_timeline(contents: IncidentContents) -> list[dict[str, Any]]:
    """Events of all beacons in the minute before the verdict. `at_s` is the time relative to the verdict, so mostly
    negative."""
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
            entry = {"at_s": round(at_s, 4), "who": "supervisor", "host": "", "kind": frame["change"]}
            found.append((at_s, entry | {"text": frame["headline"]}))
    return [event for _, event in sorted(found, key=lambda entry: entry[0])]


def incident_capture(contents: IncidentContents, known: Collection[str] = ()) -> Iterator[str]:
    """The lines of `capture.jsonl`, in which secrets are redacted, those in `known` too."""
    yield redact_text(header_line(str(contents.facts.get("folder", "")), contents.wall, contents.at_ns, 0), known)
    for host, bundle in contents.bundles.items():
        if "timeline" in bundle:
            yield answer_line(host, contents.offsets.get(host, 0), bundle["timeline"], known)
    headline = redact_text(verdict_headline(contents.verdict), known)
    yield (
        json.dumps({"verdict": headline, "level": contents.verdict.level, "change": "", "at_ns": contents.at_ns}) + "\n"
    )
    yield json.dumps({"end": "the incident was collected", "at_ns": contents.at_ns}) + "\n"


def culprit_name(culprit: Culprit) -> str:
    """`policy-1`: the name of the process, or its role and rank."""
    if culprit.name:
        return culprit.name
    rank = "" if culprit.rank is None else f"-{culprit.rank}"
    return f"{culprit.role or 'process'}{rank}"


def verdict_headline(verdict: Verdict) -> str:
    """The explanation of a verdict, or a short text if it has none."""
    if verdict.explanation:
        return verdict.explanation
    who = summarize_list(verdict.culprits, _MAX_NAMED, culprit_name) or "no culprit"
    where = next((each.where for each in verdict.culprits if each.where), "")
    return f"{verdict.kind} ({who}){f' in {where}' if where else ''}"


def incident_story(contents: IncidentContents) -> str:
    """The text of `story.txt`."""
    verdict = contents.verdict
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(contents.wall))
    cause = "" if verdict.cause in ("", "unknown") else f", class {verdict.cause}"
    parts = [f"{when}: {verdict.kind}{cause}, {verdict.level}, confidence {verdict.confidence:.2f}."]
    parts.append(verdict.explanation or verdict_headline(verdict))
    parts += [
        f"{culprit_name(each)} (rank {each.rank}, role {each.role or '?'}, host {each.host or '?'}, pid {each.pid})"
        + (f" is in {each.where}." if each.where else ".")
        for each in verdict.culprits
    ]
    if verdict.collective is not None:
        each = verdict.collective
        site = f", called at {each.call_site}" if each.call_site else ""
        parts.append(f"The collective is {each.operation or 'number'} #{each.seq} on {each.communicator!r}{site}.")
    if verdict.waiting:
        parts.append("Waiting:\n" + "\n".join(f"  - {_wait_text(each)}" for each in verdict.waiting))
    if verdict.evidence:
        parts.append(
            "Evidence:\n" + "\n".join(f"  - {each.source or each.file}: {each.text}" for each in verdict.evidence)
        )
    if verdict.alternatives:
        parts.append("Alternatives: " + ", ".join(f"{e.what} ({e.confidence:.2f})" for e in verdict.alternatives) + ".")
    if verdict.fix:
        parts.append(f"Fix: {verdict.fix}")
    if verdict.collect:
        parts.append("Next steps: " + "; ".join(verdict.collect))
    if contents.gaps:
        parts.append("Missing from this incident: " + "; ".join(contents.gaps))
    return "\n\n".join(parts) + "\n"


def _wait_text(waiting: Any) -> str:
    since = "" if waiting.since_s is None else f" for {waiting.since_s:.0f} s"
    return f"{waiting.who} waits for {waiting.on}{since}: {waiting.what}"


def list_incidents(root: Path) -> list[Path]:
    """The complete incidents of a run, oldest first."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        found = [each for each in root.iterdir() if (each / "verdict.json").is_file() and not each.name.startswith(".")]
    return sorted(found)
