"""Members of a communicator that called different things under one number, or made it with different member lists.

The first number at which the members' calls differ is where they diverged. What most members called is right.
Without a majority the schedule decides, or what sister communicators (equal description and size: the other
tensor-parallel pairs) called at that number; without these it is unknown, and all members are named with little
confidence.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis, measure_inactivity
from lockstep.watch.diagnosis.evidence import CallTable, IntArray, WaitEdge
from lockstep.watch.diagnosis.evidence_types import CollectiveCall, Liveness
from lockstep.watch.diagnosis.off_by_one import find_off_by_one
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import BoolArray

CERTAIN, LIKELY, UNDECIDED = 0.95, 0.75, 0.45
WINDOW = 64
"""Sequence numbers within which members are compared without sorting, a power of two; who is further apart costs
more."""
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SignatureArray = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Divergence:
    """The first number of a communicator at which members differ, and what each of which it is known called there."""

    communicator: int
    seq: int
    process: IntArray
    signature: SignatureArray

    def of(self, signature: int) -> IntArray:
        """Who called it."""
        who: IntArray = self.process[self.signature == np.uint64(signature)]
        return who

    def said(self) -> list[tuple[int, int]]:
        """(signature, how many called it), the most frequent first."""
        values, counts = np.unique(self.signature, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return [(int(values[i]), int(counts[i])) for i in order]


def find_mismatches(case: DiagnosisContext, reached: BoolArray | None) -> list[Hypothesis]:
    """Findings of all communicators whose members do not fit together."""
    partings = _find_divergences(case)
    found = [_mismatch_hypothesis(case, each) for each in partings]
    if case.graph is not None and reached is not None:
        stalled = case.graph.communicator[reached & case.graph.stalled]
        known = {each.communicator for each in partings}
        found += find_off_by_one(case, set(stalled[stalled >= 0].tolist()) - known)
    return found + _different_member_lists(case, reached) + _different_rendezvous(case)


def _find_divergences(case: DiagnosisContext) -> list[_Divergence]:
    """Of each communicator whose members differ, the first number at which they do."""
    calls = case.evidence.calls
    if not len(calls.seq):
        return []
    communicator = case.inside.communicator[calls.membership]
    # By number, then by communicator: most are at the same few numbers, so little of the table is touched.
    place = (calls.seq & (WINDOW - 1)) * len(case.evidence.communicators.about) + communicator
    # Number and signature in one word: with equal numbers other signatures differ in it, and the other way round.
    said = calls.signature ^ (np.asarray(calls.seq, dtype=np.int64).view(np.uint64) * _HASH_MULTIPLIER)
    table = np.empty(len(case.evidence.communicators.about) * WINDOW, dtype=np.uint64)
    table[place] = said
    odd = table[place] != said
    if not odd.any():
        return []
    doubtful = np.zeros(len(case.evidence.communicators.about), dtype=np.bool_)
    doubtful[communicator[odd]] = True
    rows = np.flatnonzero(doubtful[communicator])
    numbers = np.empty(len(table), dtype=np.int64)
    numbers[place[rows]] = calls.seq[rows]
    if (numbers[place[rows]] == calls.seq[rows]).all():  # then every number at which members differ is one of these
        suspect = np.zeros(len(table), dtype=np.bool_)
        suspect[place[odd]] = True
        rows = rows[suspect[place[rows]]]
    return _sorted_divergences(case, rows, communicator)


def _sorted_divergences(case: DiagnosisContext, rows: IntArray, communicator: IntArray) -> list[_Divergence]:
    calls = case.evidence.calls
    signature = _comparable(calls, rows)
    order = np.lexsort((signature, calls.seq[rows], communicator[rows]))
    rows, signature = rows[order], signature[order]
    seq, communicator = calls.seq[rows], communicator[rows]
    together = (seq[1:] == seq[:-1]) & (communicator[1:] == communicator[:-1])
    differ = np.flatnonzero(together & (signature[1:] != signature[:-1]))
    _, first = np.unique(communicator[1:][differ], return_index=True)
    found = []
    ends = np.append(np.flatnonzero(~together), len(seq) - 1)
    for at in differ[first].tolist():
        end = int(ends[np.searchsorted(ends, at)])
        begin = int(ends[np.searchsorted(ends, at) - 1]) + 1 if at > ends[0] else 0
        there = slice(begin, end + 1)
        process = case.evidence.communicators.process[calls.membership[rows[there]]]
        found.append(_Divergence(int(communicator[at]), int(seq[at]), process, signature[there]))
    return found


def _comparable(calls: CallTable, rows: IntArray) -> SignatureArray:
    """Signatures, those of operations whose shapes may differ made equal but for the operation and the root."""
    signature = calls.signature[rows].copy()
    for each in np.unique(signature).tolist():
        call = calls.about.get(each)
        if call is not None and call.operation in calls.sizes_vary:
            signature[signature == np.uint64(each)] = hash((call.operation, call.root)) & (2**63 - 1)
    return signature


def _mismatch_hypothesis(case: DiagnosisContext, parting: _Divergence) -> Hypothesis:
    right, confidence, why = _correct_signature(case, parting)
    wrong = parting.process if right is None else parting.process[parting.signature != np.uint64(right)]
    culprits = tuple(sorted(wrong.tolist()))
    instead = int(parting.signature[parting.process == culprits[0]][0])
    told = [*culprits[:4], *[p for p in parting.process[:8].tolist() if p not in culprits]]
    return Hypothesis(
        VerdictKind.MISMATCH,
        VerdictLevel.CONFIRMED if right is not None or not _may_be_decided(case, parting) else VerdictLevel.NOTICE,
        confidence,
        _difference_text(case, parting, right, instead),
        culprits,
        collective=(parting.communicator, parting.seq),
        cause="rank_divergent_branch",
        alternatives=(Alternative("uneven_data", 0.2),),
        facts=tuple(_call_fact(case, parting, p) for p in told[:8]),
        collect=() if confidence > UNDECIDED else ("the schedule of the step, or the calls of a third rank",),
        more=why,
        structural=True,
    )


def _correct_signature(case: DiagnosisContext, parting: _Divergence) -> tuple[int | None, float, str]:
    """The right signature (None if nobody knows), how sure, and a sentence that says why."""
    scheduled = case.evidence.calls.schedule.get((parting.communicator, parting.seq))
    if scheduled is not None and (parting.signature != np.uint64(scheduled)).any():
        return scheduled, CERTAIN, "The step's schedule says so."
    rows = case.members(parting.communicator)
    size = rows.stop - rows.start
    most, count = parting.said()[0]
    if 2 * count > len(parting.process) and count >= 2:
        sure = CERTAIN if 2 * count > size else LIKELY
        return most, sure, f"{count} of {len(parting.process)} members agree on the other call."
    sisters = _sister_signature(case, parting)
    if sisters is not None and len(parting.of(sisters)):
        return sisters, LIKELY, "The sister communicators made the other call at that number."
    in_turn = _signature_in_sequence(case, parting)
    if in_turn is not None:
        return (
            in_turn,
            LIKELY,
            "Another member has still to come there, and waits in a collective that they passed over.",
        )
    return None, UNDECIDED, "There is no majority, so it is open who is right."


def _signature_in_sequence(case: DiagnosisContext, parting: _Divergence) -> int | None:
    """What those called, of two sides, who passed over nothing: where a member that has not come there yet waits in
    another communicator, its members on one side have not entered that, and came here out of turn."""
    members, inside = case.evidence.communicators, case.inside
    rows, said = case.members(parting.communicator), parting.said()
    behind = members.process[rows][(members.entered[rows] >= 0) & (members.entered[rows] < parting.seq)]
    if len(said) != 2 or not len(behind):
        return None
    passed: set[int] = set()
    for row in np.flatnonzero(inside.waits & np.isin(members.process, behind[:WINDOW])).tolist():
        there = case.members(int(inside.communicator[row]))
        late = (members.entered[there] >= 0) & (members.entered[there] < inside.seq[row])
        passed |= {*members.process[there][late].tolist()}
    sides = [signature for signature, _ in said if passed & {*parting.of(signature).tolist()}]
    return next(signature for signature, _ in said if signature != sides[0]) if len(sides) == 1 else None


def _may_be_decided(case: DiagnosisContext, parting: _Divergence) -> bool:
    """Whether somebody may still decide: who is on the way there, or has been there and tells of it once it stands."""
    rows, members = case.members(parting.communicator), case.evidence.communicators
    counted = members.process[rows][members.entered[rows] >= 0]
    others = [p for p in np.setdiff1d(counted, parting.process).tolist() if case.life(p) is Liveness.RUNNING]
    return any(measure_inactivity(case, p).moves(case.patience.notice_s) for p in others[:WINDOW])


def _sister_signature(case: DiagnosisContext, parting: _Divergence) -> int | None:
    """What all members of all other communicators of the same description and size called at that number."""
    calls = case.evidence.calls
    sisters = case.sisters(parting.communicator)
    rows = np.flatnonzero(calls.seq == parting.seq)
    rows = rows[np.isin(case.inside.communicator[calls.membership[rows]], sisters)]
    said = np.unique(calls.signature[rows])
    return int(said[0]) if len(said) == 1 and len(rows) >= 2 else None


def _difference_text(case: DiagnosisContext, parting: _Divergence, right: int | None, wrong: int) -> str:
    """What the culprits did instead, in words."""
    about = case.evidence.calls.about
    if right is None:
        both = " and ".join(sorted({_call_name(about.get(each)) for each, _ in parting.said()}))
        return f"called different things ({both}) as {{collective}}"
    ours, theirs = about.get(wrong), about.get(right)
    instead = f"called {_call_name(ours)} where the others called {_call_name(theirs)} as {{collective}}"
    shift = _shift_text(case, parting, right, wrong)
    if shift == "skipped":
        return f"skipped {_call_name(theirs)} and {instead}"
    if shift == "extra":
        return f"made one call too many and {instead}"
    if ours and theirs and ours.operation == theirs.operation:
        for name, a, b in (
            ("shape", ours.shapes, theirs.shapes),
            ("dtype", ours.dtype, theirs.dtype),
            ("root", ours.root, theirs.root),
        ):
            if a != b:
                return f"called {ours.operation} with {name} {a} where the others have {b} as {{collective}}"
    return instead


def _call_name(call: CollectiveCall | None) -> str:
    if call is None:
        return "another call"
    with_ = ", ".join(str(each) for each in (call.shapes, call.dtype) if each)
    root = "" if call.root is None else f" from {call.root}"
    return f"{call.operation}({with_}){root}" if with_ else f"{call.operation}{root}"


def _shift_text(case: DiagnosisContext, parting: _Divergence, right: int, wrong: int) -> str:
    """Whether the wrong ones are one call ahead (`skipped`) or behind (`check_extra`) from there on."""
    right_ones, wrong_ones = parting.of(right), parting.of(wrong)
    if not len(right_ones) or not len(wrong_ones):
        return ""
    majority, culprit = int(right_ones[0]), int(wrong_ones[0])
    theirs, ours = _signatures_by_seq(case, parting, majority), _signatures_by_seq(case, parting, culprit)
    seq = parting.seq
    ahead = [ours[s] == theirs[s + 1] for s in sorted(ours) if s >= seq and s + 1 in theirs]
    behind = [ours[s + 1] == theirs[s] for s in sorted(theirs) if s >= seq and s + 1 in ours]
    if ahead and all(ahead) and not (behind and all(behind)):
        return "skipped"
    if behind and all(behind) and not (ahead and all(ahead)):
        return "extra"
    return ""


def _signatures_by_seq(case: DiagnosisContext, parting: _Divergence, process: int) -> dict[int, int]:
    calls = case.evidence.calls
    rows = case.members(parting.communicator)
    member = rows.start + int(np.argmax(case.evidence.communicators.process[rows] == process))
    own = np.flatnonzero(calls.membership == member)
    return dict(zip(calls.seq[own].tolist(), calls.signature[own].tolist(), strict=True))


def _call_fact(case: DiagnosisContext, parting: _Divergence, process: int) -> Fact:
    calls = case.evidence.calls
    rows = case.members(parting.communicator)
    member = rows.start + int(np.argmax(case.evidence.communicators.process[rows] == process))
    call = calls.about.get(_signatures_by_seq(case, parting, process).get(parting.seq, -1))
    site = calls.sites.get((member, parting.seq)) or (call.site if call else "")
    who = case.evidence.processes.who[process]
    return Fact(f"{who.name} called {_call_name(call)} as #{parting.seq}{f' at {site}' if site else ''}", "calls")


def _different_member_lists(case: DiagnosisContext, reached: BoolArray | None) -> list[Hypothesis]:
    """Communicators in which somebody waits and whose members were made with different lists of members."""
    members, graph = case.evidence.communicators, case.graph
    if members.ranks is None or graph is None or reached is None or not len(members.ranks):
        return []
    nodes = np.flatnonzero(reached & graph.stalled & (graph.communicator >= 0))
    filled = np.flatnonzero(np.diff(members.starts) > 0)
    most = np.full(len(members.about), -1, dtype=np.int64)
    least = most.copy()
    starts = members.starts[filled]
    most[filled] = np.maximum.reduceat(members.ranks, starts)
    said = np.where(members.ranks < 0, most[case.inside.communicator], members.ranks)
    least[filled] = np.minimum.reduceat(said, starts)
    node_of = {int(graph.communicator[node]): int(node) for node in nodes[::-1]}
    differing = sorted(c for c in np.flatnonzero(least < most).tolist() if c in node_of)
    return [_member_list_hypothesis(case, each, node_of[each]) for each in differing]


def _different_rendezvous(case: DiagnosisContext) -> list[Hypothesis]:
    """Communicators that are being made, for long, by processes that take others for their members."""
    graph = case.graph
    if graph is None:
        return []
    meetings: dict[tuple[str, str], list[tuple[int, WaitEdge]]] = {}
    for node in np.flatnonzero(graph.edge >= 0).tolist():
        edge = case.evidence.edges[int(graph.edge[node])]
        if edge.members:
            meetings.setdefault((case.role(edge.process), edge.meeting), []).append((node, edge))
    found = []
    for (_, meeting), there in meetings.items():
        lists = [edge.members for _, edge in there]
        if len(set(lists)) > 1 and any(graph.stalled[node] for node, _ in there):
            found.append(_rendezvous_hypothesis(meeting, lists, there))
    return found


def _rendezvous_hypothesis(meeting: str, lists: Sequence[str], there: Sequence[tuple[int, WaitEdge]]) -> Hypothesis:
    vote = _vote(lists, size=len(max(lists, key=lists.count).split(",")))
    wrong = [there[each][1] for each in vote.wrong]
    said = " and ".join(sorted({f"ranks {edge.members}" for edge in wrong}))
    others = f", where the others make it of ranks {vote.most}" if vote.most is not None else ""
    finding = _membership_hypothesis(
        vote, f"makes {meeting} of {said}{others}", {edge.process for edge in wrong}, there[0][0], of=len(there)
    )
    since, everybody = min(edge.since for _, edge in there), tuple(edge.process for _, edge in there)
    return replace(finding, since=since, others=everybody)


def _member_list_hypothesis(case: DiagnosisContext, communicator: int, node: int) -> Hypothesis:
    members, rows = case.evidence.communicators, case.members(communicator)
    assert members.ranks is not None
    said, process = members.ranks[rows], members.process[rows]
    known = said >= 0
    vote = _vote(said[known].tolist(), size=len(said))
    wrong = process[known][vote.wrong].tolist()
    return _membership_hypothesis(vote, "made {communicator} with another list of members", wrong, node, of=len(said))


@dataclass(frozen=True, slots=True)
class _Vote:
    """Of members that believe in different lists."""

    wrong: list[int]
    """The minority, by place; all where there is no majority."""
    most: object
    """The majority's list; None where there is none."""
    count: int
    confidence: float


def _vote(said: Sequence[object], size: int) -> _Vote:
    """Args: `size`: how many members there are, those that have not said anything included."""
    most, count = Counter(said).most_common(1)[0]
    if 2 * count <= len(said) or count < 2:
        return _Vote(list(range(len(said))), None, count, UNDECIDED)
    wrong = [place for place, each in enumerate(said) if each != most]
    return _Vote(wrong, most, count, CERTAIN if 2 * count > size else LIKELY)


def _membership_hypothesis(vote: _Vote, text: str, culprits: Iterable[int], node: int, of: int) -> Hypothesis:
    agreed = f"{vote.count} of {of} members agree on one list."
    return Hypothesis(
        VerdictKind.MISMATCH,
        VerdictLevel.CONFIRMED,
        vote.confidence,
        text,
        tuple(sorted(culprits)),
        node=node,
        cause="rank_divergent_branch",
        alternatives=(Alternative("config_error", 0.3),),
        more=agreed if vote.most is not None else "There is no majority.",
        structural=True,
    )
