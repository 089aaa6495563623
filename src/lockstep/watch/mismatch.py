"""Members of a communicator that called different things under one number, or were made with different lists.

The first number at which the calls of members differ is where they parted. Who is right is what most members say; with
no majority, what the schedule says, or what sister communicators (equal description and size: the other tensor-parallel
pairs) did at that number; without these, nobody knows, and all are named with little confidence.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.watch.evidence import Calls, Integers
from lockstep.watch.facts import Call
from lockstep.watch.finding import Case, Finding
from lockstep.watch.graph import Bools
from lockstep.watch.verdict import Alternative, Fact, Kind, Level

SURE, LIKELY, OPEN = 0.95, 0.75, 0.45
WINDOW = 256
"""Calls of a member that are compared, the newest."""


@dataclass(frozen=True, slots=True)
class _Parting:
    communicator: int
    seq: int
    said: Mapping[int, int]
    """What each member of which it is known called there: process -> signature."""


def mismatches(case: Case, reached: Bools | None) -> list[Finding]:
    """Findings of all communicators whose members do not fit together."""
    found = []
    calls = case.evidence.calls
    differing = _differing(case, calls)
    for communicator in differing:
        parting = _parting(case, communicator)
        if parting is not None:
            found.append(_judge(case, parting))
    if case.graph is not None and reached is not None:
        stalled = case.graph.communicator[reached & case.graph.stalled]
        known = set(differing)
        for communicator in np.unique(stalled[stalled >= 0]).tolist():
            if communicator not in known and calls.sites:
                found += _by_site(case, communicator)
    return found + _different_lists(case, reached)


def _differing(case: Case, calls: Calls) -> list[int]:
    """Communicators in which members with the same number have different signatures: one pass, no sorting."""
    if not len(calls.seq):
        return []
    width = WINDOW
    communicator = case.inside.communicator[calls.membership]
    place = communicator * width + calls.seq % width
    owner = np.empty((int(case.inside.communicator[-1]) + 1) * width, dtype=np.int64)
    owner[place] = np.arange(len(place))
    first = owner[place]
    same = calls.seq[first] == calls.seq
    wrong = same & (calls.signature != calls.signature[first])
    suspects = np.unique(communicator[wrong | ~same])
    return [int(each) for each in suspects]


def _parting(case: Case, communicator: int) -> _Parting | None:
    """The first number at which members differ."""
    calls = case.evidence.calls
    rows = np.flatnonzero(case.inside.communicator[calls.membership] == communicator)
    seq, signature = calls.seq[rows], _comparable(calls, rows)
    process = case.evidence.communicators.process[calls.membership[rows]]
    order = np.lexsort((signature, seq))
    seq, signature, process = seq[order], signature[order], process[order]
    differ = (seq[1:] == seq[:-1]) & (signature[1:] != signature[:-1])
    if not differ.any():
        return None
    at = int(seq[1:][np.argmax(differ)])
    there = seq == at
    return _Parting(communicator, at, dict(zip(process[there].tolist(), signature[there].tolist(), strict=True)))


def _comparable(calls: Calls, rows: Integers) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Signatures, those of operations whose shapes may differ made equal but for the operation."""
    signature = calls.signature[rows].copy()
    for each in np.unique(signature).tolist():
        call = calls.about.get(each)
        if call is not None and call.operation in calls.sizes_vary:
            signature[signature == np.uint64(each)] = hash((call.operation, call.root)) & (2**63 - 1)
    return signature


def _judge(case: Case, parting: _Parting) -> Finding:
    right, confidence, why = _who_is_right(case, parting)
    wrong = [p for p, said in parting.said.items() if said != right] if right is not None else list(parting.said)
    culprits = tuple(sorted(wrong))
    one = parting.said[culprits[0]]
    text, cause = _difference(case, parting, right, one)
    alternatives = () if cause == "uneven_data" else (Alternative("uneven_data", 0.2),)
    return Finding(
        Kind.MISMATCH,
        Level.CONFIRMED,
        confidence,
        text,
        culprits,
        collective=(parting.communicator, parting.seq),
        cause=cause,
        alternatives=alternatives,
        facts=tuple(_said(case, parting, p) for p in sorted(parting.said)[:8]),
        collect=() if confidence > OPEN else ("the schedule of the step, or the calls of a third rank",),
        more=why,
        structural=True,
        others=tuple(p for p in parting.said if p not in culprits),
    )


def _who_is_right(case: Case, parting: _Parting) -> tuple[int | None, float, str]:
    """The right signature (None if nobody knows), how sure, and a sentence that says why."""
    calls = case.evidence.calls
    scheduled = calls.schedule.get((parting.communicator, parting.seq))
    if scheduled is not None and any(said != scheduled for said in parting.said.values()):
        return scheduled, SURE, "The step's schedule says so."
    rows = case.members(parting.communicator)
    size = rows.stop - rows.start
    votes = Counter(parting.said.values()).most_common()
    most, count = votes[0]
    if 2 * count > len(parting.said) and count >= 2:
        sure = SURE if 2 * count > size else LIKELY
        return most, sure, f"{count} of {len(parting.said)} members agree on the other call."
    sisters = _sisters(case, parting)
    if sisters is not None and sisters in parting.said.values():
        return sisters, LIKELY, "The sister communicators made the other call at that number."
    return None, OPEN, "There is no majority, so it is open who is right."


def _sisters(case: Case, parting: _Parting) -> int | None:
    """What all members of all other communicators of the same description and size called at that number."""
    members, calls = case.evidence.communicators, case.evidence.calls
    about = members.about[parting.communicator]
    if not about.description:
        return None
    sizes = np.diff(members.starts)
    sisters = [
        i for i, each in enumerate(members.about)
        if each.description == about.description and sizes[i] == sizes[parting.communicator]
        and i != parting.communicator
    ]  # fmt: skip
    rows = np.flatnonzero(calls.seq == parting.seq)
    rows = rows[np.isin(case.inside.communicator[calls.membership[rows]], sisters)]
    said = np.unique(calls.signature[rows])
    return int(said[0]) if len(said) == 1 and len(rows) >= 2 else None


def _difference(case: Case, parting: _Parting, right: int | None, wrong: int) -> tuple[str, str]:
    """What the culprits did instead, in words, and the class."""
    about = case.evidence.calls.about
    if right is None:
        both = " and ".join(sorted({_named(about.get(each)) for each in parting.said.values()}))
        return f"called different things ({both}) as {{collective}}", "rank_divergent_branch"
    ours, theirs = about.get(wrong), about.get(right)
    shift = _shift(case, parting, right, wrong)
    instead = f"called {_named(ours)} where the others called {_named(theirs)} as {{collective}}"
    if shift == "skipped":
        return f"skipped {_named(theirs)} and {instead}", "rank_divergent_branch"
    if shift == "extra":
        return f"made one call too many and {instead}", "rank_divergent_branch"
    if ours and theirs and ours.operation == theirs.operation:
        for what in ("shapes", "dtype", "root"):
            a, b = getattr(ours, what), getattr(theirs, what)
            if a != b:
                name = "shape" if what == "shapes" else what
                return f"called {ours.operation} with {name} {a} where the others have {b} as {{collective}}", (
                    "rank_divergent_branch"
                )
    return instead, "rank_divergent_branch"


def _named(call: Call | None) -> str:
    if call is None:
        return "another call"
    with_ = ", ".join(str(each) for each in (call.shapes, call.dtype) if each)
    root = "" if call.root is None else f" from {call.root}"
    return f"{call.operation}({with_}){root}" if with_ else f"{call.operation}{root}"


def _shift(case: Case, parting: _Parting, right: int, wrong: int) -> str:
    """Whether the wrong ones are one call ahead (`skipped`) or behind (`extra`) from there on."""
    majority = next(p for p, said in parting.said.items() if said == right) if right in parting.said.values() else None
    if majority is None:
        return ""
    culprit = next(p for p, said in parting.said.items() if said == wrong)
    theirs, ours = _sequence(case, parting, majority), _sequence(case, parting, culprit)
    seq = parting.seq
    ahead = [ours[s] == theirs[s + 1] for s in sorted(ours) if s >= seq and s + 1 in theirs]
    behind = [ours[s + 1] == theirs[s] for s in sorted(theirs) if s >= seq and s + 1 in ours]
    if ahead and all(ahead) and not (behind and all(behind)):
        return "skipped"
    if behind and all(behind) and not (ahead and all(ahead)):
        return "extra"
    return ""


def _sequence(case: Case, parting: _Parting, process: int) -> dict[int, int]:
    calls = case.evidence.calls
    rows = case.members(parting.communicator)
    member = rows.start + int(np.argmax(case.evidence.communicators.process[rows] == process))
    own = np.flatnonzero(calls.membership == member)
    return dict(zip(calls.seq[own].tolist(), calls.signature[own].tolist(), strict=True))


def _said(case: Case, parting: _Parting, process: int) -> Fact:
    calls = case.evidence.calls
    rows = case.members(parting.communicator)
    member = rows.start + int(np.argmax(case.evidence.communicators.process[rows] == process))
    call = calls.about.get(_sequence(case, parting, process).get(parting.seq, -1))
    site = calls.sites.get((member, parting.seq)) or (call.site if call else "")
    who = case.evidence.processes.who[process]
    return Fact(f"{who.name} called {_named(call)} as #{parting.seq}{f' at {site}' if site else ''}", "calls")


def _by_site(case: Case, communicator: int) -> list[Finding]:
    """Calls that fit together but come from other lines, one call ahead or behind: one rank skipped a call, or made one
    more, of an operation and a shape that fitted the next, and everybody has been paired wrongly since."""
    members, calls = case.evidence.communicators, case.evidence.calls
    rows = case.members(communicator)
    if rows.stop - rows.start < 3:
        return []
    lines: dict[int, dict[int, str]] = {}
    for (member, seq), site in calls.sites.items():
        if rows.start <= member < rows.stop:
            lines.setdefault(member, {})[seq] = site
    usual: dict[int, str] = {}
    for seq in sorted({seq for each in lines.values() for seq in each}):
        site, count = Counter(each[seq] for each in lines.values() if seq in each).most_common(1)[0]
        if 2 * count > rows.stop - rows.start:
            usual[seq] = site
    found = []
    for member, own in sorted(lines.items()):
        parted = next((seq for seq in sorted(own) if seq in usual and own[seq] != usual[seq]), None)
        if parted is None:
            continue
        later = [seq for seq in own if seq >= parted]
        skipped = [own[seq] == usual[seq + 1] for seq in later if seq + 1 in usual]
        extra = [own[seq] == usual[seq - 1] for seq in later if seq - 1 in usual and seq > parted]
        if len(skipped) >= 2 and all(skipped):
            text = f"skipped the call at {usual[parted]} before {{collective}}"
        elif len(extra) >= 2 and all(extra):
            text = f"made one call too many at {own[parted]}, as {{collective}}"
        else:
            continue
        process = int(members.process[member])
        found.append(
            Finding(
                Kind.MISMATCH, Level.CONFIRMED, LIKELY, text, (process,), collective=(communicator, parted),
                cause="unknown", structural=True,
                alternatives=(Alternative("rank_divergent_branch", 0.6), Alternative("uneven_data", 0.3)),
                more="Operations and shapes fitted, so the backend paired the wrong calls in silence.",
                others=tuple(int(members.process[each]) for each in lines if each != member),
                facts=(Fact(f"#{parted} came from {own[parted]}, the others' from {usual[parted]}", "calls"),),
            )
        )  # fmt: skip
    return found


def _different_lists(case: Case, reached: Bools | None) -> list[Finding]:
    """Communicators in which somebody waits and whose members were made with different lists of members."""
    members, graph = case.evidence.communicators, case.graph
    if members.ranks is None or graph is None or reached is None or not len(members.ranks):
        return []
    found = []
    stalled = graph.communicator[reached & graph.stalled]
    for communicator in np.unique(stalled[stalled >= 0]).tolist():
        rows = case.members(communicator)
        said, process = members.ranks[rows], members.process[rows]
        known = said >= 0
        votes = Counter(said[known].tolist()).most_common()
        if len(votes) < 2:
            continue
        most, count = votes[0]
        majority = 2 * count > known.sum() and count >= 2
        wrong = process[known & (said != most)] if majority else process[known]
        node = int(np.flatnonzero(reached & graph.stalled & (graph.communicator == communicator))[0])
        found.append(
            Finding(
                Kind.MISMATCH,
                Level.CONFIRMED,
                (SURE if 2 * count > len(said) else LIKELY) if majority else OPEN,
                "made {communicator} with another list of members",
                tuple(sorted(wrong.tolist())),
                node=node,
                cause="rank_divergent_branch",
                alternatives=(Alternative("config_error", 0.3),),
                more=f"{count} of {len(said)} members agree on one list." if majority else "There is no majority.",
                structural=True,
                others=tuple(process.tolist()),
            )
        )
    return found
