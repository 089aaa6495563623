"""Verdicts that do not come from logs but from incidents and flight-recorder dumps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.base.json_text import read_json
from lockstep.doctor.judge.hypotheses import NO_FAULT
from lockstep.doctor.logs.log_sources import CollectedSources
from lockstep.watch.diagnosis.verdict import Fact, Verdict, VerdictKind, parse_verdict

_CLASSES_OF_KIND = {
    VerdictKind.MISMATCH: ("uneven_data", "rank_divergent_branch", "zero3_generate_desync"),
    VerdictKind.CYCLE: ("rank_divergent_branch",),
    VerdictKind.ABSENT: ("uneven_data", "rank_divergent_branch", "slow_rank_preprocess"),
}
"""The failure classes that are possible for a structure found in dumps."""
_ENDED_WELL = 0.8
"""Confidence of logs whose last lines say that the job ended well; those that only lack trouble are less sure."""
STRUCTURE_CONFIDENCE = 0.7
"""Confidence of a class that only the structure of the dumps suggests."""


@dataclass(frozen=True, slots=True)
class PriorVerdicts:
    """Verdicts of incidents, newest first, and of dumps; the first one of the dumps explains the others."""

    incidents: tuple[Verdict, ...] = ()
    dumps: tuple[Verdict, ...] = ()


def read_prior_verdicts(
    found: CollectedSources, paths: Sequence[str], *, ranks: str | None, world_size: int | None
) -> PriorVerdicts:
    """Reads incidents and dumps, and removes their files from the log sources.

    Raises:
        ValueError: A `verdict.json` contains no verdict, or `ranks` matches no file.
    """
    from lockstep.watch.dumps.dump_files import find_dump_files

    stored: list[Verdict] = []
    dumps: list[Verdict] = []
    taken: set[Path] = set()
    for given in paths:
        top = Path(given)
        if not top.exists():
            continue
        incidents = _read_incidents(found, top)
        stored += incidents.values()
        taken |= incidents.keys()
        files = [] if incidents else find_dump_files(top, ranks)
        if files:
            from lockstep.watch.dumps.explain_dumps import explain_dumps

            dumps += explain_dumps(top, ranks=ranks, world_size=world_size)
            taken |= {each.path for each in files}
    if ranks is not None and not dumps:
        raise ValueError(f"--ranks {ranks!r} matches no file in {', '.join(paths)}")
    folders = {each.parent for each in taken if each.name == "verdict.json"}
    found.sources = [each for each in found.sources
                     if each.path is None or not (each.path in taken or folders & set(each.path.parents))]  # fmt: skip
    return PriorVerdicts(tuple(stored), tuple(dumps))


def _read_incidents(found: CollectedSources, top: Path) -> dict[Path, Verdict]:
    """Returns the verdicts of an incident or, newest first, of all incidents at any depth in a folder, by file. A file
    of that name without a verdict, damaged or of another program, is a gap and remains a log, unless it was given."""
    given = top if top.name == "verdict.json" else top / "verdict.json"
    if given.is_file():
        return {given: parse_verdict(_read_object(given))}
    files = [each.path for each in found.sources if each.path is not None and each.path.name == "verdict.json"]
    incidents = {}
    for file in sorted(files, key=lambda each: each.parent.name, reverse=True):
        if top not in file.parents:
            continue
        try:
            incidents[file] = parse_verdict(_read_object(file))
        except (ValueError, OSError) as error:
            found.gaps.append(f"{file}: no incident: {error}")
    return incidents


def _read_object(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a verdict")
    return content


def overriding_verdicts(logs: Verdict, prior: PriorVerdicts, *, logs_read: bool) -> Sequence[Verdict]:
    """Returns the verdicts that take precedence over the verdict of the logs; empty if there are none.

    Incidents take precedence, because they were recorded while the job ran, unless only the logs show a cause, or show
    that the job recovered and ended well. Dumps take precedence if there are no logs.
    """
    if not prior.incidents:
        return () if logs_read else prior.dumps
    if prior.incidents[0].cause == "unknown":
        overruled = logs.cause != "unknown"
    else:
        overruled = logs.cause == "benign" and logs.confidence > _ENDED_WELL
    return () if overruled else prior.incidents


def merge_dumps(logs: Verdict, prior: PriorVerdicts) -> Verdict:
    """Adds the structure found in the dumps to the verdict of the logs."""
    if not prior.dumps:
        return logs
    dump = prior.dumps[0]
    if logs.cause in NO_FAULT and dump.kind is not VerdictKind.UNKNOWN:
        return _verdict_of_dumps(logs, dump)
    agree = dump.kind in _CLASSES_OF_KIND and logs.cause in _CLASSES_OF_KIND[dump.kind]
    return replace(
        logs,
        kind=dump.kind if logs.kind is VerdictKind.UNKNOWN or agree else logs.kind,
        culprits=logs.culprits or dump.culprits,
        collective=dump.collective if dump.collective and dump.collective.operation else logs.collective,
        waiting=dump.waiting or logs.waiting,
        explanation=" ".join(part for part in (logs.explanation, f"The dumps: {dump.explanation}") if part),
    )


def _verdict_of_dumps(logs: Verdict, dump: Verdict) -> Verdict:
    """Returns the verdict if only the dumps show a fault; its failure class follows from the structure in the dumps."""
    classes = [each for each in dump.alternatives if each.what != "unknown"]
    cause = dump.cause
    if cause in NO_FAULT:
        possible = _CLASSES_OF_KIND.get(dump.kind, ())
        cause = possible[0] if possible else classes[0].what if classes else "unknown"
    confidence = dump.confidence if cause == dump.cause else min(dump.confidence, STRUCTURE_CONFIDENCE)
    others = tuple(each for each in classes if each.what != cause)
    return replace(dump, cause=cause, confidence=confidence, alternatives=others,
                   evidence=logs.evidence or _dump_facts(dump))  # fmt: skip


def _dump_facts(dump: Verdict) -> tuple[Fact, ...]:
    """Returns evidence from dumps; without a line number, the text names the file."""
    return tuple(
        each if each.line is not None or not each.file
        else Fact(f"{Path(each.file).name}: {each.text}", each.source or "dumps")
        for each in dump.evidence[:3]
    )  # fmt: skip
