"""Finds ranks that are one call ahead of or behind the others although operations and shapes match.

If a rank skips a call or makes an extra one, and the next call has the same operation and shape, gloo and NCCL pair
the wrong calls silently from then on. Only the call sites reveal it.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel

MAX_SITES = 20_000
"""The search visits all call sites; it is skipped if there are more than this."""

SitesByMember = Mapping[int, Mapping[int, str]]
"""Call sites by member and sequence number."""


def find_off_by_one(context: DiagnosisContext, communicators: Collection[int]) -> list[Hypothesis]:
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
    later = [seq for seq in own if seq >= diverged_at]
    skipped = [own[seq] == usual[seq + 1] for seq in later if seq + 1 in usual]
    extra = [own[seq] == usual[seq - 1] for seq in later if seq - 1 in usual and seq > diverged_at]
    if len(skipped) >= 2 and all(skipped):
        text = f"skipped the call at {usual[diverged_at]} before {{collective}}"
    elif len(extra) >= 2 and all(extra):
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
