"""Candidates from differences between ranks or hosts: collective fingerprints, progress totals, versions."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator

from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.judge.scoring import Candidate
from lockstep.doctor.logs.parsed_log import RuleMatch
from lockstep.doctor.logs.step_progress import last_step_by_rank
from lockstep.watch.diagnosis.verdict import Culprit, Fact

_MAX_FACTS = 3
_SIMILAR_TOTALS = 0.75
"""Progress bars whose totals differ by more count different things."""
_MAX_PEERS = 4096


def difference_candidates(history: JobHistory) -> Iterator[Candidate]:
    """Candidates from collective fingerprints, progress totals and versions."""
    yield from _different_operations(history)
    yield from _different_totals(history)
    yield from _different_versions(history)


def _different_operations(history: JobHistory) -> Iterator[Candidate]:
    """Ranks called different collectives under one sequence number; the same operation with other shapes is uneven
    data."""
    mismatches = [each for each in history.facts("mismatch") if not history.continued_after(each)]
    if not mismatches:
        return
    operations = {each.fields[key] for each in mismatches for key in ("op", "peer_op") if key in each.fields}
    first = [
        each for each in mismatches if each.fields.get("peer_seq", each.fields.get("seq")) == each.fields.get("seq")
    ]
    reports = [(int(each["rank"]), int(each["peer"]) if each.get("peer") else None, (each.get("op"), each.get("shape")))
            for each in (match.fields for match in first or mismatches) if each.get("rank")]  # fmt: skip
    ranks = minority_ranks(reports) or tuple(sorted({rank for rank, _, _ in reports}))
    operation = mismatches[0].fields.get("op", "").lower()
    if len(operations) == 1:
        yield Candidate("uneven_data", 0.7, list(mismatches), ranks, operation)
    else:
        yield Candidate("rank_divergent_branch", 0.8, list(mismatches), ranks, operation)


def minority_ranks(reports: Iterable[tuple[int, int | None, Hashable]]) -> tuple[int, ...]:
    """The minority among ranks that each report the first peer that differs from them.

    A rank compares itself with all others in rank order, so it agrees with those before the reported peer
    (`ProcessGroupWrapper.cpp`). Empty if no side is larger.

    Args:
        reports: The reporting rank, the peer that it names, and the reporting rank's own fingerprint.
    """
    group: dict[int, int] = {}
    same: dict[Hashable, int] = {}

    def root(rank: int) -> int:
        while group.setdefault(rank, rank) != rank:
            rank = group[rank]
        return rank

    for rank, peer, called in reports:
        group[root(rank)] = root(same.setdefault(called, rank))
        if peer is not None:
            root(peer)
        for other in range(min(peer or 0, _MAX_PEERS)):
            group[root(other)] = root(rank)
    sides: dict[int, list[int]] = defaultdict(list)
    for rank in group:
        sides[root(rank)].append(rank)
    sizes = sorted(map(len, sides.values()), reverse=True)
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return ()
    return tuple(sorted(rank for side in sides.values() if len(side) < sizes[0] for rank in side))


def _different_totals(history: JobHistory) -> Iterator[Candidate]:
    """Ranks count to different totals, and one with the smaller total has finished while others wait."""
    last = last_step_by_rank(each for each in history.counters if each.of)
    totals = Counter(counter.of for counter in last.values())
    if len(totals) < 2 or not history.traits & {"collective_timeout", "peer_lost"}:
        return
    least, most = min(totals), max(totals)
    through = any(counter.step + 1 >= counter.of for counter in last.values() if counter.of < most)
    if not through or least < _SIMILAR_TOTALS * most or len({counter.epoch for counter in last.values()}) > 1:
        return
    usual, _ = max(totals.items(), key=lambda each: (each[1], each[0]))
    odd = sorted(rank for rank, counter in last.items() if counter.of != usual)
    text = f"The ranks count to different totals, {least} and {most}: they have different numbers of batches."
    yield Candidate(
        "uneven_data",
        0.7,
        [],
        tuple(odd),
        "",
        text,
        [*_last_counter_facts(history, odd), *_last_counter_facts(history, last)][:4],
    )


def _last_counter_facts(history: JobHistory, ranks: Iterable[int]) -> Iterator[Fact]:
    """The last line of each rank with a counter."""
    for rank in ranks:
        counter = next(each for each in reversed(history.counters) if each.origin.rank == rank and each.of)
        for log in history.logs:
            tail = next((each for each in log.tail_lines.get(rank, ()) if each.line == counter.line), None)
            if tail is not None and any(each is counter for each in log.counters):
                yield Fact(tail.text, file=log.name, line=tail.line)


def _different_versions(history: JobHistory) -> Iterator[Candidate]:
    """Hosts with different NCCL versions; the culprits are the minority, or both of a pair."""
    by_host: dict[str, set[str]] = defaultdict(set)
    shown: dict[str, RuleMatch] = {}
    for each in history.facts("nccl_version"):
        if each.origin.host:
            by_host[each.origin.host].add(each.fields["version"])
            shown.setdefault(each.fields["version"], each)
    common = Counter(version for versions in by_host.values() for version in versions)
    if len(common) < 2 or max(common.values()) == len(by_host):
        return
    usual, many = common.most_common(1)[0]
    others = [host for host, versions in by_host.items() if usual not in versions]
    hosts = sorted(others if many > len(others) else by_host)
    worked = history.traits & {"progressed", "ended_well"}
    text = f"The hosts use different versions of NCCL: {', '.join(sorted(common))}."
    facts = [Fact(each.text, file=each.file, line=each.line) for each in list(shown.values())[:_MAX_FACTS]]
    culprits = tuple(Culprit(None, host=host, name=host) for host in hosts)
    yield Candidate("version_mismatch", 0.3 if worked else 0.7, [], culprits, "", text, facts)
