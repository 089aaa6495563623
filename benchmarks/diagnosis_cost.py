"""What a verdict costs at scale: `python -m benchmarks.diagnosis_cost`. Prints a table.

16,384 ranks in 4 communicators each (all, data, tensor and pipeline parallel: 8 x 16 x 128), with two calls per
membership, healthy and with each kind of fault, one culprit, everybody else waiting for it directly or in turn. Beside
`diagnose` from arrays stands the same with building the arrays from the 2,048 agents' messages (JSON text of one tick,
8 processes each; their rosters, and what the signatures mean, came before). Median and worst of several runs,
milliseconds of one core.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lockstep.watch.agent.report_messages import (
    Roster,
    RosterCommunicator,
    RosterMember,
    StateReport,
    encode_report,
    pack_calls,
    pack_member,
    pack_process,
)
from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence import CallTable, Evidence, MembershipTable, ProcessTable, WaitEdge
from lockstep.watch.diagnosis.evidence_types import (
    NO_EXIT_CODE,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
    WaitCondition,
)
from lockstep.watch.diagnosis.verdict import StallThresholds, Verdict
from lockstep.watch.supervisor.agent_connections import parse_report
from lockstep.watch.supervisor.message_store import MessageStore

TP, PP = 8, 16
AT = 1000.0
SEQ = 411
"""The last collective that everybody has completed, everywhere."""
PER_HOST = 8
CALL = CollectiveCall("all_reduce", "[1048576]", "bfloat16")
OTHER = CollectiveCall("all_gather", "[1048576]", "bfloat16")
ABOUT = {str(key): [call.operation, call.shapes, call.dtype, None, ""] for key, call in ((11, CALL), (12, OTHER))}
"""What the signatures mean, as agents report it."""


def groups(ranks: int) -> list[tuple[str, np.ndarray]]:
    """Name and members `[communicators, size]` of each kind of communicator."""
    dp = ranks // (TP * PP)
    grid = np.arange(ranks).reshape(PP, dp, TP)
    return [
        ("world", grid.reshape(1, -1)),
        ("dp", np.moveaxis(grid, 1, -1).reshape(-1, dp)),
        ("tp", grid.reshape(-1, TP)),
        ("pp", np.moveaxis(grid, 0, -1).reshape(-1, PP)),
    ]


def healthy(ranks: int) -> Evidence:
    """Everybody between two collectives or just in one; nobody waits for long."""
    rng = np.random.default_rng(7)
    kinds = groups(ranks)
    about, sizes, members = [], [], []
    for name, table in kinds:
        about += [CommunicatorInfo(f"{name}{i}", name, "nccl") for i in range(len(table))]
        sizes += [table.shape[1]] * len(table)
        members.append(table.reshape(-1))
    process = np.concatenate(members)
    rows = len(process)
    processes = ProcessTable(
        info=[ProcessInfo(f"policy-{i}", "policy", i, f"host{i // PER_HOST}", 1000 + i) for i in range(ranks)],
        liveness=np.zeros(ranks, dtype=np.int8),
        exit_code=np.full(ranks, NO_EXIT_CODE, dtype=np.int32),
        ended_at=np.full(ranks, np.nan),
        progressed_at=AT - rng.uniform(0.0, 0.5, ranks),
        active_at=AT - rng.uniform(0.0, 0.2, ranks),
        same_stack_since=np.full(ranks, np.nan),
        stage=["train"] * ranks,
    )
    inside = rng.random(rows) < 0.3
    communicators = MembershipTable(
        info=about,
        starts=np.concatenate([[0], np.cumsum(sizes)]),
        process=process,
        entered=SEQ + inside.astype(np.int64),
        completed=np.full(rows, SEQ),
        entered_at=AT - rng.uniform(0.0, 0.05, rows),
        completed_at=AT - rng.uniform(0.05, 0.1, rows),
        member_list=np.repeat(sizes, sizes),
        uncertain=np.zeros(rows, dtype=np.bool_),
        blocked=np.full(rows, -1, dtype=np.int8),
    )
    seqs = np.stack([communicators.entered - 1, communicators.entered], axis=1).reshape(-1)
    calls = CallTable(
        np.repeat(np.arange(rows), 2), seqs, np.full(2 * rows, 11, dtype=np.uint64), {11: CALL, 12: OTHER}
    )
    return Evidence(AT, processes, communicators, calls)


def stalled(evidence: Evidence, culprit: int, waits_s: float = 60.0, everybody: bool = False) -> Evidence:
    """All wait since `waits_s`: the culprit's tensor and pipeline mates for it, theirs of other data parallel groups
    for those, the rest in the world's collective. With `everybody` the culprit is inside as well."""
    members, ranks = evidence.communicators, len(evidence.processes.info)
    entered = np.full(len(members.process), SEQ)
    free = np.ones(ranks, dtype=np.bool_)
    free[culprit] = everybody
    sizes = np.diff(members.starts)
    kind = np.repeat([0 if each.description == "world" else 1 for each in members.info], sizes)
    for name in ("tp", "pp", "dp", "world"):
        for communicator in [i for i, each in enumerate(members.info) if each.description == name]:
            rows = slice(int(members.starts[communicator]), int(members.starts[communicator + 1]))
            process = members.process[rows]
            if name == "world" or (~free[process]).any():
                here = free[process]
                entered[rows] += here
                if name != "world":
                    free[process[here]] = False
        if name in ("tp", "pp"):
            free[culprit] = False
    if everybody:
        own = np.flatnonzero((members.process == culprit) & (kind == 1))
        entered[own[len(own) // 2]] += 1
    still = np.full(ranks, AT - waits_s)
    return replace(
        evidence,
        processes=replace(evidence.processes, progressed_at=still, active_at=still, same_stack_since=still),
        communicators=replace(
            members, entered=entered, entered_at=np.full(len(entered), AT - waits_s),
            completed_at=np.full(len(entered), AT - waits_s - 1),
        ),
        calls=replace(evidence.calls, seq=np.stack([entered - 1, entered], axis=1).reshape(-1)),
    )  # fmt: skip


def with_liveness(evidence: Evidence, process: int, liveness: Liveness, code: int = NO_EXIT_CODE) -> Evidence:
    liveness_column, codes = evidence.processes.liveness.copy(), evidence.processes.exit_code.copy()
    ended = evidence.processes.ended_at.copy()
    liveness_column[process], codes[process] = liveness, code
    if liveness is Liveness.DEAD:
        ended[process] = AT - 60
    return replace(
        evidence, processes=replace(evidence.processes, liveness=liveness_column, exit_code=codes, ended_at=ended)
    )


def in_world(evidence: Evidence, completed: int) -> Evidence:
    """Everybody inside of the world's collective, which the first `completed` members have completed."""
    members, ranks = evidence.communicators, len(evidence.processes.info)
    entered = np.full(len(members.process), SEQ)
    entered[:ranks] += 1
    done = np.full(len(members.process), SEQ)
    done[:completed] += 1
    since = np.full(len(entered), AT - 60.0)
    still = np.full(ranks, AT - 60.0)
    return replace(
        evidence,
        processes=replace(evidence.processes, progressed_at=still, active_at=still, same_stack_since=still),
        communicators=replace(members, entered=entered, completed=done, entered_at=since, completed_at=since - 1),
        calls=replace(evidence.calls, seq=np.stack([entered - 1, entered], axis=1).reshape(-1)),
    )


def scenarios(ranks: int) -> dict[str, Evidence]:
    """A snapshot of each kind."""
    base, odd = healthy(ranks), ranks // 3
    waiting = stalled(base, odd)
    found = {"healthy": base}
    found["dead"] = with_liveness(waiting, odd, Liveness.DEAD, -9)
    found["absent (stopped)"] = with_liveness(waiting, odd, Liveness.STOPPED)
    found["absent (still)"] = waiting
    moving = waiting.processes.active_at.copy()
    moving[odd] = AT
    entered_at = np.full(len(waiting.communicators.entered), AT - 60.0)
    found["slow"] = replace(
        waiting,
        processes=replace(waiting.processes, active_at=moving, same_stack_since=np.full(ranks, np.nan)),
        communicators=replace(waiting.communicators, entered_at=entered_at, completed_at=entered_at - 0.1),
    )
    signature = waiting.calls.signature.copy()
    everybody = in_world(base, 0)
    signature[2 * odd + 1] = 12
    found["mismatch"] = replace(everybody, calls=replace(everybody.calls, signature=signature))
    found["device_lag"] = in_world(base, ranks - 1)
    found["in_flight"] = everybody
    found["cycle"] = in_circle(everybody, odd)
    edges = [WaitEdge(odd, (), kind="queue", why="the next batch", since=AT - 60, needs=WaitCondition.ANY)]
    found["starved"] = replace(waiting, edges=edges)
    unknown = waiting.communicators.entered.copy()
    unknown[waiting.communicators.process == odd] = -1
    found["unknown"] = replace(waiting, communicators=replace(waiting.communicators, entered=unknown))
    return found


def in_circle(evidence: Evidence, odd: int) -> Evidence:
    """One rank in a tensor parallel collective, all others in the world's."""
    members, entered = evidence.communicators, evidence.communicators.entered.copy()
    entered[odd] = SEQ
    tensor = [i for i, each in enumerate(members.info) if each.description == "tp"]
    rows = [i for c in tensor for i in range(int(members.starts[c]), int(members.starts[c + 1]))]
    own = next(i for i in rows if members.process[i] == odd)
    entered[own] = SEQ + 1
    return replace(
        evidence,
        communicators=replace(members, entered=entered),
        calls=replace(evidence.calls, seq=np.stack([entered - 1, entered], axis=1).reshape(-1)),
    )


def messages(evidence: Evidence) -> tuple[list[bytes], list[bytes]]:
    """Rosters and states of all hosts, as they come out of their sockets."""
    members, processes = evidence.communicators, evidence.processes
    order = np.argsort(members.process, kind="stable")
    first = np.searchsorted(members.process[order], np.arange(len(processes.info) + 1))
    place = np.arange(len(members.process)) - np.repeat(members.starts[:-1], np.diff(members.starts))
    communicator = np.repeat(np.arange(len(members.info)), np.diff(members.starts))
    sizes = np.diff(members.starts)
    seqs, signatures = evidence.calls.seq.reshape(-1, 2), evidence.calls.signature.reshape(-1, 2)
    rosters, states = [], []
    for begin in range(0, len(processes.info), PER_HOST):
        own = range(begin, min(begin + PER_HOST, len(processes.info)))
        rows = order[first[begin] : first[own[-1] + 1]]
        known = sorted(set(communicator[rows].tolist()))
        host = processes.info[begin].host
        rosters.append(
            Roster(
                host, 1, tuple(processes.info[i] for i in own),
                tuple(RosterCommunicator(members.info[c].name, members.info[c], int(sizes[c])) for c in known),
                tuple(
                    RosterMember(int(members.process[r]) - begin, known.index(c), int(place[r]), int(sizes[c]))
                    for r, c in zip(rows, communicator[rows].tolist(), strict=True)
                ),
            )
        )  # fmt: skip
        states.append(
            StateReport(
                host, 1,
                b"".join(
                    pack_process(
                        Liveness(int(processes.liveness[i])), int(processes.exit_code[i]), AT - processes.ended_at[i],
                        AT - processes.progressed_at[i], AT - processes.active_at[i],
                        AT - processes.same_stack_since[i],
                    )
                    for i in own
                ),
                b"".join(
                    pack_member(
                        int(members.entered[r]), int(members.completed[r]), AT - members.entered_at[r],
                        AT - members.completed_at[r],
                    )
                    for r in rows
                ),
                tuple(processes.stage[i] for i in own),
                calls=pack_calls(
                    (number, int(seqs[r, k]), int(signatures[r, k])) for number, r in enumerate(rows) for k in range(2)
                ),
            )
        )  # fmt: skip
    return [json.dumps(encode_report(each)).encode() for each in rosters], [
        json.dumps(encode_report(each)).encode() for each in states
    ]


def timed(call: Callable[[], list[Verdict]], runs: int) -> tuple[float, float, list[Verdict]]:
    """Median and worst milliseconds of CPU, and what came out."""
    taken: list[float] = []
    verdicts: list[Verdict] = []
    for _ in range(runs):
        began = time.process_time()
        verdicts = call()
        taken.append((time.process_time() - began) * 1e3)
    return statistics.median(taken), max(taken), verdicts


def from_messages(
    inbox: MessageStore, frames: list[bytes], evidence: Evidence, patience: StallThresholds
) -> list[Verdict]:
    for frame in frames:
        inbox.receive(parse_report(frame), AT)
    built = inbox.evidence(AT)
    return diagnose(replace(built, edges=evidence.edges), patience)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("only", nargs="*", help="some of the scenarios")
    chosen = parser.parse_args()
    patience = StallThresholds()
    print(f"{chosen.ranks} ranks x 4 communicators; milliseconds of one core, median (worst) of {chosen.runs}; load "
          f"{os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}, numpy {np.__version__}")  # fmt: skip
    print(f"{'':18}{'from arrays':>18}{'with messages':>18}   verdict")
    for name, evidence in scenarios(chosen.ranks).items():
        if not chosen.only or name in chosen.only:
            print(line(name, evidence, patience, chosen.runs), flush=True)


def line(name: str, evidence: Evidence, patience: StallThresholds, runs: int) -> str:
    """A row of the table."""
    median, worst, verdicts = timed(lambda: diagnose(evidence, patience), runs)
    inbox = MessageStore()
    rosters, states = messages(evidence)
    for frame in rosters:
        inbox.receive(parse_report(frame), AT)
    inbox.receive({**parse_report(states[0]), "about": ABOUT}, AT)
    from_messages(inbox, states, evidence, patience)
    whole, slowest, _ = timed(lambda: from_messages(inbox, states, evidence, patience), max(3, runs // 3))
    said = f"{verdicts[0].kind}: {verdicts[0].explanation[:70]}" if verdicts else "nothing"
    return f"{name:18}{median:9.2f} ({worst:6.2f}){whole:9.1f} ({slowest:6.1f})   {said}"


if __name__ == "__main__":
    main()
