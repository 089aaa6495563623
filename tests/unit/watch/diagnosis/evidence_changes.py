"""Changes of evidence that must not change verdicts, or may only weaken them."""

import random
from dataclasses import replace

import numpy as np

from lockstep.watch.diagnosis.evidence import CallTable, Evidence, MembershipTable, ProcessTable
from lockstep.watch.diagnosis.evidence_types import CollectiveCall, CommunicatorInfo, Liveness, ProcessInfo


def shifted(evidence: Evidence, by: float) -> Evidence:
    """The same evidence at another time."""
    processes, members = evidence.processes, evidence.communicators
    return replace(
        evidence,
        at=evidence.at + by,
        processes=replace(
            processes, ended_at=processes.ended_at + by, progressed_at=processes.progressed_at + by,
            active_at=processes.active_at + by, same_stack_since=processes.same_stack_since + by,
            seen_at=None if processes.seen_at is None else processes.seen_at + by,
        ),
        communicators=replace(
            members, entered_at=members.entered_at + by, completed_at=members.completed_at + by
        ),
        edges=[
            replace(edge, since=edge.since + by, progressed_at=edge.progressed_at + by, until=edge.until + by)
            for edge in evidence.edges
        ],
    )  # fmt: skip


def permuted(evidence: Evidence, rng: random.Random) -> Evidence:
    """The same evidence with processes, communicators, members and calls in another order."""
    processes, members, calls = evidence.processes, evidence.communicators, evidence.calls
    new_to_old = list(range(len(processes.info)))
    rng.shuffle(new_to_old)
    place = np.argsort(new_to_old)
    order = list(range(len(members.info)))
    rng.shuffle(order)
    rows: list[int] = []
    starts = [0]
    for communicator in order:
        own = list(range(int(members.starts[communicator]), int(members.starts[communicator + 1])))
        rng.shuffle(own)
        rows += own
        starts.append(len(rows))
    moved = np.argsort(rows)
    shuffled = list(range(len(calls.seq)))
    rng.shuffle(shuffled)
    pick = np.array(new_to_old)
    return replace(
        evidence,
        processes=ProcessTable(
            info=[processes.info[i] for i in new_to_old], liveness=processes.liveness[pick],
            exit_code=processes.exit_code[pick], ended_at=processes.ended_at[pick],
            progressed_at=processes.progressed_at[pick], active_at=processes.active_at[pick],
            same_stack_since=processes.same_stack_since[pick], stage=[processes.stage[i] for i in new_to_old],
            notes={int(place[i]): note for i, note in processes.notes.items()},
            seen_at=None if processes.seen_at is None else processes.seen_at[pick],
        ),
        communicators=replace(
            members, info=[members.info[i] for i in order], starts=np.array(starts),
            process=place[members.process[rows]], entered=members.entered[rows], completed=members.completed[rows],
            entered_at=members.entered_at[rows], completed_at=members.completed_at[rows],
            member_list=None if members.member_list is None else members.member_list[rows],
        ),
        calls=replace(
            calls, membership=moved[calls.membership[shuffled]], seq=calls.seq[shuffled],
            signature=calls.signature[shuffled],
            sites={(int(moved[member]), seq): site for (member, seq), site in calls.sites.items()},
        ),
        edges=[
            replace(edge, process=int(place[edge.process]), on=tuple(int(place[each]) for each in edge.on))
            for edge in rng.sample(list(evidence.edges), len(evidence.edges))
        ],
    )  # fmt: skip


def renamed(evidence: Evidence) -> Evidence:
    """The same evidence with other names; ranks and structure stay."""
    return replace(
        evidence,
        processes=replace(
            evidence.processes,
            info=[
                ProcessInfo(f"x-{p.name}", f"x-{p.role}", p.rank, f"x-{p.host}", p.pid) for p in evidence.processes.info
            ],
        ),
        communicators=replace(
            evidence.communicators,
            info=[
                CommunicatorInfo(f"x-{c.name}", f"x-{c.description}", c.backend) for c in evidence.communicators.info
            ],
        ),
    )


def with_healthy(evidence: Evidence, count: int) -> Evidence:
    """The evidence with `count` more processes, which are active and share a communicator."""
    processes, members, calls, at = evidence.processes, evidence.communicators, evidence.calls, evidence.at
    first = len(processes.info)
    now = np.full(count, at - 0.05)
    signature = np.uint64(77)
    return replace(
        evidence,
        processes=ProcessTable(
            info=[*processes.info, *(ProcessInfo(f"more-{i}", "critic", i, "hx", 5000 + i) for i in range(count))],
            liveness=np.append(processes.liveness, np.zeros(count, dtype=np.int8)),
            exit_code=np.append(processes.exit_code, np.full(count, processes.exit_code.min())),
            ended_at=np.append(processes.ended_at, np.full(count, np.nan)),
            progressed_at=np.append(processes.progressed_at, now), active_at=np.append(processes.active_at, now),
            same_stack_since=np.append(processes.same_stack_since, now), stage=[*processes.stage, *["train"] * count],
            notes=processes.notes,
        ),
        communicators=MembershipTable(
            info=[*members.info, CommunicatorInfo("more", "more", "gloo")],
            starts=np.append(members.starts, members.starts[-1] + count),
            process=np.append(members.process, np.arange(first, first + count)),
            entered=np.append(members.entered, np.full(count, 9) + (np.arange(count) % 2)),
            completed=np.append(members.completed, np.full(count, 9)),
            entered_at=np.append(members.entered_at, now), completed_at=np.append(members.completed_at, now),
            member_list=None if members.member_list is None else np.append(members.member_list, np.full(count, count)),
        ),
        calls=CallTable(
            np.append(calls.membership, np.arange(len(members.process), len(members.process) + count)),
            np.append(calls.seq, np.full(count, 9)), np.append(calls.signature, np.full(count, signature)),
            {**calls.by_signature, 77: CollectiveCall("barrier")}, calls.sites,
        ),
    )  # fmt: skip


def without_some(evidence: Evidence, rng: random.Random) -> Evidence:
    """The evidence without some counts, times, calls, call sites, waits and notes; some processes are unseen."""
    processes, members, calls = evidence.processes, evidence.communicators, evidence.calls
    share = rng.choice([0.1, 0.3, 0.6])

    def lost(count: int) -> np.ndarray:
        chosen = rng.random() < 0.6
        return np.array([chosen and rng.random() < share for _ in range(count)], dtype=np.bool_)

    liveness = processes.liveness.copy()
    unseen = lost(len(liveness))
    liveness[unseen] = Liveness.UNSEEN
    hidden = unseen[members.process] | lost(len(members.process))
    entered, completed = members.entered.copy(), members.completed.copy()
    entered[hidden] = completed[hidden] = -1
    moved, active, stack = (
        each.copy() for each in (processes.progressed_at, processes.active_at, processes.same_stack_since)
    )
    for column in (moved, active, stack):
        column[unseen | lost(len(column))] = np.nan
    kept = ~lost(len(calls.seq)) & ~hidden[calls.membership]
    gone = lost(len(processes.info))
    return replace(
        evidence,
        processes=replace(
            processes, liveness=liveness, progressed_at=moved, active_at=active, same_stack_since=stack,
            notes={i: note for i, note in processes.notes.items() if not unseen[i] and not gone[i]},
        ),
        communicators=replace(members, entered=entered, completed=completed),
        calls=replace(
            calls, membership=calls.membership[kept], seq=calls.seq[kept], signature=calls.signature[kept],
            sites={key: site for key, site in calls.sites.items() if not hidden[key[0]] and rng.random() > share},
        ),
        edges=[edge for edge in evidence.edges if not unseen[edge.process] and rng.random() > share / 2],
    )  # fmt: skip
