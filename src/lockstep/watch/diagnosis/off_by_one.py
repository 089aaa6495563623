"""Finds ranks that are one call ahead of or behind the others although operations and shapes match.

If a rank skips a call or makes an extra one, and the next call has the same operation and shape, gloo and NCCL pair
the wrong calls silently from then on. Only the lines that issue the calls reveal it.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from lockstep.watch.diagnosis.diagnosis_context import DiagnosisContext, Hypothesis
from lockstep.watch.diagnosis.verdict import Alternative, Fact, VerdictKind, VerdictLevel

OFF_BY_ONE_CONFIDENCE = 0.75
MAX_SITES = 20_000
"""With more call sites than this the search is skipped, because it would visit all of them."""

SitesByMember = Mapping[int, Mapping[int, str]]
"""Call sites by member and sequence number."""


def find_off_by_one(context: DiagnosisContext, communicators: Collection[int]) -> list[Hypothesis]:
    """Hypotheses about the given communicators."""
    sites = context.evidence.calls.sites
    if not sites or len(sites) > MAX_SITES or not communicators:
        return []
    lines: dict[int, dict[int, dict[int, str]]] = {}
    of = context.pending.communicator
    for (member, seq), site in sites.items():
        lines.setdefault(int(of[member]), {}).setdefault(member, {})[seq] = site
    found = []
    for communicator in sorted(communicators):
        own = lines.get(communicator)
        if own:
            usual = _majority_sites(context, communicator, own, lines)
            found += [
                each
                for member in sorted(own)
                if (each := _detect_shift(context, communicator, member, own[member], usual))
            ]
    return found


def _majority_sites(
    context: DiagnosisContext, communicator: int, own: SitesByMember, lines: Mapping[int, SitesByMember]
) -> dict[int, str]:
    """The line from which most members issue a call; for pairs, most members of all sister communicators."""
    rows = context.members(communicator)
    voters, size = list(own.values()), rows.stop - rows.start
    if size < 3:
        sisters = context.parallel_groups(communicator)
        voters += [each for sister in sisters for each in lines.get(sister, {}).values()]
        size += size * len(sisters)
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
    parted = next((seq for seq in sorted(own) if seq in usual and own[seq] != usual[seq]), None)
    if parted is None:
        return None
    later = [seq for seq in own if seq >= parted]
    skipped = [own[seq] == usual[seq + 1] for seq in later if seq + 1 in usual]
    extra = [own[seq] == usual[seq - 1] for seq in later if seq - 1 in usual and seq > parted]
    if len(skipped) >= 2 and all(skipped):
        text = f"skipped the call at {usual[parted]} before {{collective}}"
    elif len(extra) >= 2 and all(extra):
        text = f"made an extra call at {own[parted]}, as {{collective}}"
    else:
        return None
    return Hypothesis(
        VerdictKind.MISMATCH,
        VerdictLevel.CONFIRMED,
        OFF_BY_ONE_CONFIDENCE,
        text,
        (int(context.evidence.communicators.process[member]),),
        collective=(communicator, parted),
        cause="unknown",
        alternatives=(Alternative("rank_divergent_branch", 0.6), Alternative("uneven_data", 0.3)),
        facts=(Fact(f"#{parted} came from {own[parted]}, the others' from {usual[parted]}", "calls"),),
        more="Operations and shapes matched, so the backend silently paired the wrong calls.",
        proven_by_structure=True,
    )
