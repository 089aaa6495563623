"""What the dumps of a job say is wrong."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.watch.diagnose import diagnose
from lockstep.watch.dumps.choose import spoken
from lockstep.watch.dumps.read import read_dumps
from lockstep.watch.evidence import Evidence
from lockstep.watch.verdict import Fact, Kind, Level, Verdict

_TOLD = 4
"""Culprits of whom is told what their dump says last."""


def explain_dumps(folder: Path, *, ranks: str | None = None, world_size: int | None = None) -> list[Verdict]:
    """Verdicts, the one that explains the others first; there is always one. Arguments and errors are those of
    `read_dumps`."""
    evidence = read_dumps(folder, ranks=ranks, world_size=world_size)
    found = diagnose(evidence)
    return [_with_dumps(verdict, evidence) for verdict in found] or [nothing_waits(evidence)]


def nothing_waits(evidence: Evidence) -> Verdict:
    """All collectives that were entered were also completed, as far as the dumps say."""
    told, missing = evidence.extra["files"], evidence.extra["missing"]
    of_all = "Every collective that was entered was completed by its members" if not missing else (
        "No collective is in flight on the ranks whose dumps could be read"
    )  # fmt: skip
    ranks = len(evidence.processes.who)
    return Verdict(
        Kind.UNKNOWN,
        Level.NOTICE,
        cause="unknown" if missing else "benign",
        confidence=0.3 if missing else 0.7,
        evidence=_gaps(evidence),
        explanation=f"{of_all}: {evidence.extra['entries']} entries in the dumps of {len(told)} of {ranks} ranks. "
        "Either the job went on when the dumps were written, or it waits for something that is no collective.",
        collect=(*_missing(evidence), "stacks of all ranks (py-spy dump)"),
    )


def _with_dumps(verdict: Verdict, evidence: Evidence) -> Verdict:
    """The verdict with what the culprits' dumps say last, and with what is missing."""
    own = [fact for fact in verdict.evidence if fact.source != "agent"]
    collect = verdict.collect if verdict.kind is not Kind.UNKNOWN else (*_missing(evidence), *verdict.collect)
    facts = (*own, *_last_entries(verdict, evidence), *_gaps(evidence))
    return replace(verdict, evidence=facts, collect=tuple(dict.fromkeys(collect)))


def _missing(evidence: Evidence) -> tuple[str, ...]:
    missing = evidence.extra["missing"]
    return (f"the flight-recorder dump of {spoken(missing)}",) if missing else ()


def _gaps(evidence: Evidence) -> tuple[Fact, ...]:
    return tuple(Fact(gap, "dumps") for gap in evidence.gaps)


def _last_entries(verdict: Verdict, evidence: Evidence) -> Iterator[Fact]:
    """The newest entry of each culprit, on the verdict's communicator if it has one there."""
    wanted = verdict.collective.communicator if verdict.collective else ""
    members, who = evidence.communicators, evidence.processes.who
    of_rank = {each.rank: at for at, each in enumerate(who)}
    names = [about.name for about in members.about]
    communicator = np.repeat(np.arange(len(names)), np.diff(members.starts))
    for culprit in verdict.culprits[:_TOLD]:
        process = -1 if culprit.rank is None else of_rank.get(culprit.rank, -1)
        rows = [row for row in np.flatnonzero(members.process == process).tolist() if members.entered[row] > 0]
        if not rows:
            continue
        row = max(rows, key=lambda row: (names[communicator[row]] == wanted, members.entered_at[row]))
        yield Fact(_entry(evidence, row, names[communicator[row]], who[process].rank),
                   file=evidence.extra["files"].get(culprit.rank, ""))  # fmt: skip


def _entry(evidence: Evidence, row: int, communicator: str, rank: int) -> str:
    members, calls = evidence.communicators, evidence.calls
    seq = int(members.entered[row])
    found = np.flatnonzero((calls.membership == row) & (calls.seq == seq))
    call = calls.about.get(int(calls.signature[found[0]])) if len(found) else None
    site = calls.sites.get((row, seq), "")
    entered = members.entered_at[row]
    when = "" if np.isnan(entered) else time.strftime(", entered %Y-%m-%d %H:%M:%S", time.localtime(entered))
    ended = "completed" if members.completed[row] >= seq else "not completed"
    return (
        f"rank {rank}'s newest entry on '{communicator}' is {call.operation if call else 'collective'} #{seq}"
        f"{f' at {site}' if site else ''}, {ended}{when}"
    )
