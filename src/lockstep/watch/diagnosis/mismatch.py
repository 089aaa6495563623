"""Finds members of a communicator that made different calls at one sequence number.

The members diverged at the first sequence number at which their calls differ. The call of the majority is correct.
Without a majority the step's schedule decides, or the call of the parallel groups (communicators of equal description
and size, such as the other tensor-parallel pairs) at that number. If neither is known, all members are reported with
low confidence.

If a rank skips a call or makes an extra one, and the next call has the same operation and shape, gloo and NCCL pair
the wrong calls silently from then on. Only the call sites reveal it.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.diagnosis.diagnosis_context import (
    DiagnosisContext,
    Hypothesis,
    all_proven_inactive,
    measure_inactivity,
)
from lockstep.watch.diagnosis.evidence import CallTable, IntArray
from lockstep.watch.diagnosis.evidence_types import FROM_CPP, CollectiveCall, Liveness
from lockstep.watch.diagnosis.live_weights import Answers
from lockstep.watch.diagnosis.member_lists import CERTAIN, LIKELY, UNDECIDED, find_different_member_lists
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel
from lockstep.watch.diagnosis.wait_graph import mask_of

WINDOW = 64
"""The size of the comparison table per communicator, indexed by the sequence number modulo this power of two."""
MAX_SITES = 20_000
"""The search visits all call sites; it is skipped if there are more than this."""
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SignatureArray = NDArray[np.uint64]
SitesByMember = Mapping[int, Mapping[int, str]]
"""Call sites by member and sequence number."""


@dataclass(frozen=True, slots=True)
class _Divergence:
    """The first sequence number of a communicator at which members differ, and the known calls at that number; one
    element of the arrays per call."""

    communicator: int
    seq: int
    process: IntArray
    signature: SignatureArray

    def of(self, signature: int) -> IntArray:
        """The processes that made this call."""
        found: IntArray = self.process[self.signature == np.uint64(signature)]
        return found

    def votes(self) -> list[tuple[int, int]]:
        """(signature, number of processes), the most frequent first."""
        values, counts = np.unique(self.signature, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return [(int(values[i]), int(counts[i])) for i in order]


def find_mismatches(context: DiagnosisContext) -> list[Hypothesis]:
    """Hypotheses about all communicators whose members' calls or member lists do not match."""
    divergences = _find_divergences(context)
    found = [_mismatch_hypothesis(context, each) for each in divergences]
    stalled = context.graph.communicator[context.relevant & context.graph.stalled]
    known = {each.communicator for each in divergences}
    found += _find_off_by_one(context, set(stalled[stalled >= 0].tolist()) - known)
    return found + find_different_member_lists(context)


def _find_divergences(context: DiagnosisContext) -> list[_Divergence]:
    """The first diverging sequence number of each communicator whose members differ."""
    calls = context.evidence.calls
    if not len(calls.seq):
        return []
    communicator = context.pending.communicator[calls.membership]
    # One cell for each communicator and number modulo WINDOW. All members write to their cells, and the last one wins:
    # a member that then finds another key in its cell differs from some other member. The cells are ordered by number,
    # because most members are at the same few numbers, so that few cache lines are used.
    cell = (calls.seq & (WINDOW - 1)) * len(context.evidence.communicators.info) + communicator
    # A key combines number and signature: it differs if either of them does.
    keys = calls.signature ^ (np.asarray(calls.seq, dtype=np.int64).view(np.uint64) * _HASH_MULTIPLIER)
    table = np.empty(len(context.evidence.communicators.info) * WINDOW, dtype=np.uint64)
    table[cell] = keys
    differs = table[cell] != keys
    if not differs.any():
        return []
    has_difference = mask_of(len(context.evidence.communicators.info), communicator[differs])
    rows = np.flatnonzero(has_difference[communicator])
    numbers = np.empty(len(table), dtype=np.int64)
    numbers[cell[rows]] = calls.seq[rows]
    if (numbers[cell[rows]] == calls.seq[rows]).all():  # no two numbers share a cell: only cells that differ matter
        suspect = mask_of(len(table), cell[differs])
        rows = rows[suspect[cell[rows]]]
    return _sorted_divergences(context, rows, communicator)


def _sorted_divergences(context: DiagnosisContext, rows: IntArray, communicator: IntArray) -> list[_Divergence]:
    calls = context.evidence.calls
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
        process = context.evidence.communicators.process[calls.membership[rows[there]]]
        found.append(_Divergence(int(communicator[at]), int(seq[at]), process, signature[there]))
    return found


def _comparable(calls: CallTable, rows: IntArray) -> SignatureArray:
    """The signatures to compare. If shapes may differ between ranks, a signature covers only operation and root."""
    signature = calls.signature[rows].copy()
    for each in np.unique(signature).tolist():
        call = calls.by_signature.get(each)
        if call is not None and call.operation in calls.sizes_vary:
            signature[signature == np.uint64(each)] = hash((call.operation, call.root)) & (2**63 - 1)
    return signature


def _mismatch_hypothesis(context: DiagnosisContext, divergence: _Divergence) -> Hypothesis:
    right, answers, why = _correct_signature(context, divergence)
    if np.uint64(FROM_CPP) in divergence.signature:  # it may be the same call, and the stall have another cause
        answers = LIKELY if right is not None else UNDECIDED
    wrong = divergence.process if right is None else divergence.process[divergence.signature != np.uint64(right)]
    culprits = tuple(sorted(wrong.tolist()))
    culprit_signature = int(divergence.signature[divergence.process == culprits[0]][0])
    shown = [*culprits[:4], *[p for p in divergence.process[:8].tolist() if p not in culprits]]
    return Hypothesis(
        VerdictKind.MISMATCH,
        VerdictLevel.CONFIRMED if _is_decided(context, divergence, right) else VerdictLevel.NOTICE,
        answers,
        _difference_text(context, divergence, right, culprit_signature),
        culprits,
        collective=(divergence.communicator, divergence.seq),
        cause="rank_divergent_branch",
        alternatives=(Alternative("uneven_data", 0.2),),
        facts=tuple(_call_fact(context, divergence, p) for p in shown[:8]),
        collect=() if answers != UNDECIDED else ("the schedule of the step, or the calls of a third rank",),
        details=why,
        proven_by_structure=True,
    )


def _correct_signature(context: DiagnosisContext, divergence: _Divergence) -> tuple[int | None, Answers, str]:
    """The signature of the correct call (None if unknown), what speaks for it, and a sentence with the reason."""
    scheduled = context.evidence.calls.schedule.get((divergence.communicator, divergence.seq))
    if scheduled is not None:
        return scheduled, CERTAIN, "The step's schedule expects the other call."
    rows = context.members(divergence.communicator)
    size = rows.stop - rows.start
    most, count = divergence.votes()[0]
    if 2 * count > len(divergence.process) and count >= 2:
        sure = CERTAIN if 2 * count > size else LIKELY
        return most, sure, f"{count} of {len(divergence.process)} members agree on the other call."
    parallel = _parallel_signature(context, divergence)
    if parallel is not None and len(divergence.of(parallel)):
        return parallel, LIKELY, "The parallel groups made the other call at that number."
    in_order = _signature_in_order(context, divergence)
    if in_order is not None:
        return (
            in_order,
            LIKELY,
            "A member that has not reached this call waits in a collective that the culprits skipped.",
        )
    return None, UNDECIDED, "There is no majority, so it is unknown which call is correct."


def _signature_in_order(context: DiagnosisContext, divergence: _Divergence) -> int | None:
    """The correct call of two, if a member that has not reached this call waits in a collective of another
    communicator: the processes (or devices) that have not reached that collective skipped it, so the call of the others
    is correct."""
    members, inside = context.evidence.communicators, context.pending
    rows, votes = context.members(divergence.communicator), divergence.votes()
    not_arrived = members.process[rows][(members.entered[rows] >= 0) & (members.entered[rows] < divergence.seq)]
    if len(votes) != 2 or not len(not_arrived):
        return None
    skippers: set[int] = set()
    for row in np.flatnonzero(inside.waits & np.isin(members.process, not_arrived[:WINDOW])).tolist():
        rows_there = context.members(int(inside.communicator[row]))
        not_reached = (inside.reached[rows_there] >= 0) & (inside.reached[rows_there] < inside.seq[row])
        skippers |= {*members.process[rows_there][not_reached].tolist()}
    sides = [signature for signature, _ in votes if skippers & {*divergence.of(signature).tolist()}]
    return next(signature for signature, _ in votes if signature != sides[0]) if len(sides) == 1 else None


def _is_decided(context: DiagnosisContext, divergence: _Divergence, right: int | None) -> bool:
    """Whether the divergence is proven, and its culprits will not change. A call from C++ may be the same as one from
    Python (one rank makes it in a compiled graph, another does not), so that only inactivity shows that they differ."""
    if np.uint64(FROM_CPP) in divergence.signature:
        members, rows = context.evidence.communicators, context.members(divergence.communicator)
        since = float(np.nanmax(members.entered_at[rows]))
        return all_proven_inactive(context, divergence.process.tolist(), since)
    return right is not None or not _may_still_be_decided(context, divergence)


def _may_still_be_decided(context: DiagnosisContext, divergence: _Divergence) -> bool:
    """Whether a further member may still decide: it runs, and its call is not known yet. One that waits for no other
    process will make its call unless it is proven inactive, however late a loaded host lets it; one that waits, or has
    made its call already, is not waited for once it is inactive, because only active members report few calls."""
    rows, members = context.members(divergence.communicator), context.evidence.communicators
    rows_of = {int(members.process[row]): row for row in range(rows.start, rows.stop) if members.entered[row] >= 0}
    known = set(divergence.process.tolist())
    others = [p for p in rows_of if p not in known and context.liveness(p) is Liveness.RUNNING]
    return any(_may_still_call(context, p, divergence.seq, rows_of[p]) for p in others[:WINDOW])


def _may_still_call(context: DiagnosisContext, process: int, seq: int, row: int) -> bool:
    found = measure_inactivity(context, process)
    if found.is_active(context.thresholds.notice_s):
        return True
    waits = bool((context.graph.wait_process == process).any())
    arrived = context.evidence.communicators.entered[row] >= seq
    return not (arrived or waits) and found.is_active(context.inactivity_limit_s(process))


def _parallel_signature(context: DiagnosisContext, divergence: _Divergence) -> int | None:
    """The call that all members of all parallel groups made at that number; None if they differ."""
    calls = context.evidence.calls
    parallel = context.parallel_groups(divergence.communicator)
    rows = np.flatnonzero(calls.seq == divergence.seq)
    rows = rows[np.isin(context.pending.communicator[calls.membership[rows]], parallel)]
    found = np.unique(calls.signature[rows])
    return int(found[0]) if len(found) == 1 and len(rows) >= 2 else None


def _difference_text(context: DiagnosisContext, divergence: _Divergence, right: int | None, wrong: int) -> str:
    """What the culprits did instead of the correct call, as a verb phrase."""
    about = context.evidence.calls.by_signature
    if right is None:
        both = " and ".join(sorted({_call_name(about.get(each)) for each, _ in divergence.votes()}))
        return f"called different things ({both}) as {{collective}}"
    ours, theirs = about.get(wrong), about.get(right)
    instead = f"called {_call_name(ours)} where the others called {_call_name(theirs)} as {{collective}}"
    shift = _shift_text(context, divergence, right, wrong)
    if shift == "skipped":
        return f"skipped {_call_name(theirs)} and {instead}"
    if shift == "extra":
        return f"made an extra call and {instead}"
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
        return "a different call"
    with_ = ", ".join(str(each) for each in (call.shapes, call.dtype) if each)
    root = "" if call.root is None else f" from {call.root}"
    return f"{call.operation}({with_}){root}" if with_ else f"{call.operation}{root}"


def _shift_text(context: DiagnosisContext, divergence: _Divergence, right: int, wrong: int) -> str:
    """`skipped` if the culprits are one call ahead of the others from the divergence on, `extra` if they are one call
    behind, else empty."""
    if not len(divergence.of(right)):
        return ""
    majority, culprit = int(divergence.of(right)[0]), int(divergence.of(wrong)[0])
    theirs, ours = _signatures_by_seq(context, divergence, majority), _signatures_by_seq(context, divergence, culprit)
    ahead, behind = _shifts(ours, theirs, divergence.seq)
    return "" if ahead == behind else "skipped" if ahead else "extra"


def _shifts(own: Mapping[int, object], usual: Mapping[int, object], first: int, least: int = 1) -> tuple[bool, bool]:
    """Whether the calls of a member from a sequence number on are the usual ones, one call ahead or one behind; at
    least `least` of them must be comparable."""
    ahead = [own[seq] == usual[seq + 1] for seq in own if seq >= first and seq + 1 in usual]
    behind = [own[seq + 1] == usual[seq] for seq in usual if seq >= first and seq + 1 in own]
    return len(ahead) >= least and all(ahead), len(behind) >= least and all(behind)


def _signatures_by_seq(context: DiagnosisContext, divergence: _Divergence, process: int) -> dict[int, int]:
    calls = context.evidence.calls
    member = context.membership(process, divergence.communicator)
    own = np.flatnonzero(calls.membership == member)
    return dict(zip(calls.seq[own].tolist(), calls.signature[own].tolist(), strict=True))


def _call_fact(context: DiagnosisContext, divergence: _Divergence, process: int) -> Fact:
    calls = context.evidence.calls
    member = context.membership(process, divergence.communicator)
    call = calls.by_signature.get(_signatures_by_seq(context, divergence, process).get(divergence.seq, -1))
    site = calls.sites.get((member, divergence.seq)) or (call.site if call else "")
    info = context.evidence.processes.info[process]
    return Fact(f"{info.name} called {_call_name(call)} as #{divergence.seq}{f' at {site}' if site else ''}", "calls")


def _find_off_by_one(context: DiagnosisContext, communicators: Collection[int]) -> list[Hypothesis]:
    """A hypothesis for each member of the given communicators that is one call ahead or behind."""
    sites = context.evidence.calls.sites
    if not sites or len(sites) > MAX_SITES or not communicators:
        return []
    sites_of: dict[int, dict[int, dict[int, str]]] = {}
    communicator_of = context.pending.communicator
    for (member, seq), site in sites.items():
        sites_of.setdefault(int(communicator_of[member]), {}).setdefault(member, {})[seq] = site
    found = []
    for communicator in sorted(communicators):
        own = sites_of.get(communicator)
        if own:
            usual = _majority_sites(context, communicator, own, sites_of)
            found += [
                each
                for member in sorted(own)
                if (each := _detect_shift(context, communicator, member, own[member], usual))
            ]
    return found


def _majority_sites(
    context: DiagnosisContext, communicator: int, own: SitesByMember, sites_of: Mapping[int, SitesByMember]
) -> dict[int, str]:
    """The call site of most members, by sequence number. For pairs, the members of all parallel groups vote."""
    rows = context.members(communicator)
    voters, size = list(own.values()), rows.stop - rows.start
    if size < 3:
        parallel = context.parallel_groups(communicator)
        voters += [each for other in parallel for each in sites_of.get(other, {}).values()]
        size += size * len(parallel)
    if size < 3:
        return {}
    usual = {}
    for seq in sorted({seq for each in own.values() for seq in each}):
        site, count = Counter(each[seq] for each in voters if seq in each).most_common(1)[0]
        if 2 * count > size:
            usual[seq] = site
    return usual


def _detect_shift(
    context: DiagnosisContext, communicator: int, member: int, own: Mapping[int, str], usual: Mapping[int, str]
) -> Hypothesis | None:
    """A hypothesis if the call sites of a member are those of the majority, shifted by one call; else None."""
    diverged_at = next((seq for seq in sorted(own) if seq in usual and own[seq] != usual[seq]), None)
    if diverged_at is None:
        return None
    skipped, extra = _shifts(own, usual, diverged_at, least=2)
    if skipped:
        text = f"skipped the call at {usual[diverged_at]} before {{collective}}"
    elif extra:
        text = f"made an extra call at {own[diverged_at]}, as {{collective}}"
    else:
        return None
    return Hypothesis(
        VerdictKind.MISMATCH,
        VerdictLevel.CONFIRMED,
        {"most_of_known": True},
        text,
        (int(context.evidence.communicators.process[member]),),
        collective=(communicator, diverged_at),
        cause="unknown",
        alternatives=(Alternative("rank_divergent_branch", 0.6), Alternative("uneven_data", 0.3)),
        facts=(Fact(f"#{diverged_at} came from {own[diverged_at]}, the others' from {usual[diverged_at]}", "calls"),),
        details="Operations and shapes matched, so the backend silently paired the wrong calls.",
        proven_by_structure=True,
    )
