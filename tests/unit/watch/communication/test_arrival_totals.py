"""The totals of collectives, against an independent computation from the same calls."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.report.communication.communication_summary import communication_summary
from lockstep.watch.agent.call_timings import MOST_CALLS, MOST_ENTRIES, is_sampled, sampling_shift
from lockstep.watch.communication import arrival_totals
from lockstep.watch.communication.arrival_totals import ArrivalTotals, Entry
from lockstep.watch.communication.time_histogram import RELATIVE_ERROR

MIB = 1 << 20


def feed(
    totals: ArrivalTotals, entered: np.ndarray, took: np.ndarray, hosts: int = 1, offsets: tuple[int, ...] = (0, 0, 0)
) -> None:
    """Adds calls in a random order of their members.

    Args:
        entered, took: int64 `[calls, ranks]`; times on the supervisor's clock.
    """
    calls, ranks = entered.shape
    totals.describe({1: ("all_reduce", MIB)})
    for host in range(hosts):
        totals.set_offset(f"h{host}", offsets[host])
    order = [(call, rank) for call in range(calls) for rank in range(ranks)]
    np.random.default_rng(0).shuffle(order)
    order.sort(key=lambda each: each[0] // 50)  # members are at most 50 calls apart
    for call, rank in order:
        host = rank % hosts
        at = int(entered[call, rank]) + offsets[host]
        entry = Entry(f"h{host}", at, int(took[call, rank]), 1, 0, False)
        totals.add("k", "dp", "gloo", ranks, (0, int(call)), int(rank), f"rank-{rank}", entry)


def expected(entered: np.ndarray) -> dict[tuple[str, str], list[int]]:
    """The waits of each pair (late, waiting), by a plain loop."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in entered:
        late = int(np.flatnonzero(row == row.max())[-1])
        for rank, at in enumerate(row):
            if rank != late:
                found[f"rank-{late}", f"rank-{rank}"].append(int(row[late] - at))
    return dict(found)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 120), st.integers(1, 3))
def test_waits_are_those_of_a_plain_computation(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int, calls: int, hosts: int
) -> None:
    random = np.random.default_rng(seed)
    entered = np.arange(calls)[:, None] * 10**8 + random.integers(0, 10**7, (calls, ranks))
    left = entered.max(axis=1, keepdims=True) + random.integers(10**5, 10**6, (calls, ranks))
    path = tmp_path_factory.mktemp("run") / "communication.json"
    totals = ArrivalTotals(path, "r")
    feed(totals, entered, left - entered, hosts, (0, 3 * 10**12, -(10**11)))
    totals.write(0.0, last=True)
    summary = communication_summary(path)
    (communicator,) = summary["communicators"]
    waits = expected(entered)
    found = {(each["late"], each["waiting"]): each for each in communicator["pairs"]}
    assert found.keys() == waits.keys()
    for key, values in waits.items():
        assert found[key]["calls"] == len(values)
        assert found[key]["seconds"] == pytest.approx(sum(values) / 1e9)
        median = sorted(values)[-(-len(values) // 2) - 1] / 1e6
        assert found[key]["wait_ms"]["p50"] == pytest.approx(median, rel=RELATIVE_ERROR + 1e-6, abs=2e-6)
    (operation,) = communicator["operations"]
    assert (operation["operation"], operation["size"], operation["calls"]) == ("all_reduce", MIB, calls)
    assert operation["bytes"] == calls * MIB
    assert operation["waiting_s"] == pytest.approx(sum(map(sum, waits.values())) / 1e9)
    assert operation["moving_s"] == pytest.approx((left - entered.max(axis=1, keepdims=True)).sum() / 1e9)
    slowest = (left.max(axis=1) - entered.max(axis=1)).sum()
    assert operation["bus_gb_s"] == pytest.approx(calls * MIB * 2 * (ranks - 1) / ranks / slowest)
    matrix = summary["matrix"]
    places = {name: number for number, name in enumerate(matrix["processes"])}
    for (late, waiting), values in waits.items():
        assert matrix["seconds"][places[late]][places[waiting]] == pytest.approx(sum(values) / 1e9)
    for each in communicator["ranks"]:
        assert each["waited_s"] == pytest.approx(sum(sum(v) for k, v in waits.items() if k[1] == each["process"]) / 1e9)
        assert each["caused_s"] == pytest.approx(sum(sum(v) for k, v in waits.items() if k[0] == each["process"]) / 1e9)


def test_a_later_attempt_of_the_run_continues_the_file(tmp_path: Path) -> None:
    entered = np.array([[0, 5_000_000], [100_000_000, 107_000_000]])
    path = tmp_path / "communication.json"
    for run, calls in (("r", 2), ("r", 4), ("other", 2)):
        totals = ArrivalTotals(path, run)
        feed(totals, entered, np.full((2, 2), 10**7))
        totals.write(0.0, last=True)
        (communicator,) = communication_summary(path)["communicators"]
        assert communicator["operations"][0]["calls"] == calls
    path.write_text('{"format": 1, "run": "other", "communicators": [{}], "windows": []}')
    assert ArrivalTotals(path, "other").to_json()["communicators"] == [], "a damaged file is written anew"


def test_members_that_differ_in_who_is_one_are_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator has the same key on all its members, also where one was made with other ranks: a mismatch, which
    the diagnosis reports."""
    monkeypatch.setattr(arrival_totals, "MOST_PENDING", 1)
    totals = ArrivalTotals(tmp_path / "communication.json", "r")
    for call in range(4):
        for rank, size in ((0, 3), (2, 3), (0, 2)):
            totals.add("k", "dp", "gloo", size, (0, call), rank, f"rank-{rank}", Entry("h", call, 1, 1, 0, False))
    assert totals.to_json()["communicators"] == []


def test_large_communicators_keep_the_longest_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_totals, "MOST_PAIRS", 20)
    random = np.random.default_rng(1)
    entered = np.arange(400)[:, None] * 10**9 + random.integers(0, 10**6, (400, 40))
    entered[:, 7] += 10**8  # always late
    totals = ArrivalTotals(tmp_path / "communication.json", "r")
    feed(totals, entered, np.full(entered.shape, 10**9))
    totals.write(0.0, last=True)
    summary = communication_summary(tmp_path)
    (communicator,) = summary["communicators"]
    assert not communicator["all_pairs"] and len(communicator["pairs"]) <= 20
    assert {each["late"] for each in communicator["pairs"]} == {"rank-7"}
    by_name = {each["process"]: each for each in communicator["ranks"]}
    assert by_name["rank-7"]["last"] == 400, "each rank's own totals are complete"
    assert by_name["rank-7"]["caused_s"] == pytest.approx(39 * 400 * 0.1, rel=0.01)
    assert summary["matrix"] is not None and not summary["matrix"]["complete"]


def test_calls_of_which_entries_are_missing_are_counted_and_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_totals, "MOST_PENDING", 10)
    totals = ArrivalTotals(None, "r")
    entry = Entry("h0", 0, 0, 1, 0, False)
    for call in range(100):
        totals.add("k", "dp", "gloo", 2, (0, call), 0, "rank-0", entry)
    totals.add("k", "dp", "gloo", 2, (0, 95), 1, "rank-1", entry)
    totals.add("k", "dp", "gloo", 2, (0, 200), 1, "rank-1", entry)
    totals.add("k", "dp", "gloo", 2, (0, 201), 1, "rank-1", entry)
    (communicator,) = totals.to_json()["communicators"]
    assert communicator["unmatched"] == 1 and len(totals._live["k"].pending) <= 10


def test_memory_is_bounded_whatever_is_new_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_totals, "MOST_DESCRIBED", 20)
    monkeypatch.setattr(arrival_totals, "MOST_LIVE", 8)
    totals = ArrivalTotals(None, "r")
    totals.describe({1: ("all_reduce", MIB)})
    for call in range(200):
        totals.describe({1000 + call: ("all_gather", call)})  # the shape of this step's batch
        for rank in range(2):
            totals.add("k", "dp", "gloo", 2, (0, call), rank, f"rank-{rank}", Entry("h0", call, 0, 1, 0, False))
        totals.add(f"short-{call}", "dp", "gloo", 2, (0, 0), 0, "rank-0", Entry("h0", call, 0, 1, 0, False))
    (communicator,) = totals.to_json()["communicators"]
    assert [(each["operation"], each["calls"]) for each in communicator["operations"]] == [("all_reduce", 200)]
    assert len(totals._described) <= 20 and len(totals._live) <= 8


def test_totals_of_communicators_with_ever_new_names_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_totals, "MOST_TOTALS", 8)
    path = tmp_path / "communication.json"
    totals = ArrivalTotals(path, "r")
    for step in range(100):
        for name in ("dp", f"step-{step}"):
            for rank in range(2):
                entry = Entry("h0", step, 0, 1, 0, False)
                totals.add(name, name, "gloo", 2, (0, step), rank, f"rank-{rank}", entry)
    totals.write(0.0, last=True)
    for each in (totals, ArrivalTotals(path, "r")):
        found = each.to_json()
        names = {communicator["name"] for communicator in found["communicators"]}
        assert names == {"dp", *(f"step-{step}" for step in range(93, 100))} and found["left_out"] == 93


def test_entries_of_a_large_communicator_that_wait_for_others_are_bounded() -> None:
    totals = ArrivalTotals(None, "r")
    size, entry = 1024, Entry("h0", 0, 0, 1, 0, False)
    for call in range(200):
        for rank in range(size // 2):
            totals.add("k", "dp", "gloo", size, (0, call), rank, f"rank-{rank}", entry)
    assert sum(map(len, totals._live["k"].pending.values())) <= 1024 * arrival_totals.MOST_MEMBERS


def windows(waits: np.ndarray) -> list[dict[str, Any]]:
    """Args:
    waits: int64 `[windows, processes]`: for how many ns of a second the others waited for each.
    """
    return [
        {
            "began": float(at),
            "ended": at + 1.0,
            "waited_ns": {},
            "caused_ns": {f"p{n}": int(v) for n, v in enumerate(row)},
        }
        for at, row in enumerate(waits)
    ]


def summarised(folder: Path, waits: np.ndarray) -> list[str]:
    import json

    content = {"format": 1, "run": "r", "written": 0.0, "communicators": [], "windows": windows(waits)}
    (folder / "communication.json").write_text(json.dumps(content))
    remarks: list[str] = communication_summary(folder)["remarks"]
    return remarks


def test_a_process_that_is_always_late_is_remarked_upon_and_balanced_noise_is_not(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    for processes in (2, 3, 8, 30):
        noise = random.lognormal(18, 2, (100, processes))
        assert summarised(tmp_path, noise) == []
    noise = random.lognormal(15, 0.5, (60, 4))
    noise[:, 2] += 9e8
    (remark,) = summarised(tmp_path, noise)
    assert "wait for p2 for 30% of the time" in remark


def test_samples_of_hosts_are_nested_and_bounded() -> None:
    for shift in range(1, 8):
        sampled = {issued for issued in range(20_000) if is_sampled(issued, shift)}
        assert sampled <= {issued for issued in range(20_000) if is_sampled(issued, shift - 1)}
        assert len(sampled) == pytest.approx(20_000 / 2**shift, rel=0.1)
    for calls in (1, 64, 65, 1000, 4096):
        for size in (2, 16, 64, 5000):
            most = max(1, min(MOST_CALLS, MOST_ENTRIES // size))
            assert calls / 2 ** sampling_shift(calls, size) <= most
    assert sampling_shift(64, 2) == 0
