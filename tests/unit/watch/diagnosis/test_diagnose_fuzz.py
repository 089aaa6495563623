"""The diagnosis never fails, however little sense the evidence makes."""

import random

import numpy as np
import pytest

from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence import CallTable, Evidence, MembershipTable, ProcessTable, WaitEdge
from lockstep.watch.diagnosis.evidence_types import (
    NO_EXIT_CODE,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
    ProcessNote,
    WaitCondition,
)

ERRORS = ("", "ValueError: x", "RuntimeError: Connection reset by peer", "Timed out waiting 3 ms", "CUDA out of memory")


def random_evidence(rng: random.Random) -> Evidence:
    """Evidence that consists of random numbers."""
    count = rng.randint(0, 7)

    def times(number: int) -> np.ndarray:
        return np.array([rng.choice([np.nan, 0.0, 50.0, 99.0, 99.9, 100.0, 101.0]) for _ in range(number)])

    def numbers(number: int) -> np.ndarray:
        return np.array([rng.choice([-1, 0, 1, 2, 3, 3, 3, 4, 10**12]) for _ in range(number)], dtype=np.int64)

    groups = [sorted(rng.sample(range(count), rng.randint(0, count))) for _ in range(rng.randint(0, 4))]
    process = np.array([p for group in groups for p in group], dtype=np.int64)
    rows = len(process)
    calls = rng.randint(0, 12) if rows else 0
    member = np.array([rng.randrange(rows) for _ in range(calls)], dtype=np.int64)
    edges = [
        WaitEdge(
            rng.randrange(count), tuple(rng.sample(range(count), rng.randint(0, min(3, count)))),
            rng.choice(["", "judge:80"]), rng.choice(list(WaitCondition)), rng.choice(["", "http", "rendezvous"]),
            "why", float(times(1)[0]), float(times(1)[0]), rng.random() < 0.9, rng.random() < 0.2,
            rng.choice(["", "", "join"]),
        )
        for _ in range(rng.randint(0, 5) if count else 0)
    ]  # fmt: skip
    return Evidence(
        rng.choice([100.0, np.nan]),
        ProcessTable(
            [
                ProcessInfo(f"p-{i}", rng.choice(["policy", ""]), i - 1, rng.choice(["", "a", "b"]))
                for i in range(count)
            ],
            np.array([rng.choice([0, 0, 0, *map(int, Liveness)]) for _ in range(count)], dtype=np.int8),
            np.array([rng.choice([NO_EXIT_CODE, 0, 1, -6, -9, -15, -99, 137]) for _ in range(count)], dtype=np.int32),
            times(count), times(count), times(count), times(count), rng.choice([(), ["train"] * count]),
            {i: ProcessNote("f() at x.py:1", rng.choice(ERRORS), "", rng.random() < 0.2) for i in range(count)},
            rng.choice([None, times(count)]),
        ),
        MembershipTable(
            [CommunicatorInfo(f"c{i}", rng.choice(["", "d"])) for i in range(len(groups))],
            np.cumsum([0, *(len(group) for group in groups)]), process, numbers(rows), numbers(rows), times(rows),
            times(rows), rng.choice([None, numbers(rows)]),
            rng.choice([None, np.array([rng.random() < 0.2 for _ in range(rows)], dtype=np.bool_)]),
            rng.choice([None, np.array([rng.choice([-1, 0, 1]) for _ in range(rows)], dtype=np.int8)]),
        ),
        CallTable(
            member, numbers(calls), np.array([rng.choice([5, 6, 7]) for _ in range(calls)], dtype=np.uint64),
            {5: CollectiveCall("all_reduce", "[4]"), 6: CollectiveCall("all_to_all", "[5]")},
            {(rng.randrange(rows), s): rng.choice(["a.py:1", "b.py:2"]) for s in range(5)} if rows else {},
            schedule={(0, 3): 5},
        ),
        edges,
        rng.choice(["beacons", "dumps"]),
    )  # fmt: skip


def check(seeds: range) -> None:
    for seed in seeds:
        for verdict in diagnose(random_evidence(random.Random(seed))):
            verdict.json()


def test_random_evidence_raises_no_error() -> None:
    check(range(1500))


@pytest.mark.slow
def test_much_random_evidence_raises_no_error() -> None:
    check(range(2000, 40_000))
