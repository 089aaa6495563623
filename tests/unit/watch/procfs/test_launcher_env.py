"""Ranks from launchers' environments, and the ranks that a rendezvous expects."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.base.wait_state import WaitRecord
from lockstep.watch.agent.process_monitor import UNKNOWN_RANK, ProcessMonitor
from lockstep.watch.agent.report_messages import (
    Roster,
    StateReport,
    decode_report,
    encode_report,
    pack_process,
    wait_report,
)
from lockstep.watch.attach.enroll import _RendezvousArguments
from lockstep.watch.beacon.beacon_records import BeaconState
from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence_types import Liveness, ProcessInfo, ProcessNote
from lockstep.watch.diagnosis.verdict import VerdictKind, VerdictLevel
from lockstep.watch.procfs.launcher_env import (
    certain_rank,
    find_unregistered_ranks,
    launcher_rank,
    launcher_world_size,
    ranks_on_this_host,
)
from lockstep.watch.recorder.rendezvous_wait import (
    ExpectedRanks,
    parse_rendezvous,
    rendezvous_reason,
    rendezvous_target,
)
from lockstep.watch.supervisor.message_store import MessageStore

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a.example"}


@pytest.mark.parametrize(
    ("variables", "rank", "sure", "world"),
    [
        ({}, None, None, None),
        (TORCHRUN, (5, 0), 5, 8),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 1), None, 2),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 2), None, 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2), None, 2),
        ({**TORCHRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (5, 0), 5, 8),
        ({"RANK": "none", "SLURM_PROCID": "1"}, (1, 2), None, None),
    ],
    ids=["nothing", "torchrun", "by hand", "Open MPI", "Hydra", "torchrun in Slurm", "nonsense"],
)
def test_variables_of_launchers(
    variables: dict[str, str], rank: tuple[int, int] | None, sure: int | None, world: int | None
) -> None:
    assert (launcher_rank(variables), certain_rank(variables), launcher_world_size(variables)) == (rank, sure, world)


@pytest.mark.parametrize(
    ("rank", "world", "url", "variables", "here"),
    [
        (5, 8, "env://", TORCHRUN, (4, 7)),
        (1, 4, "tcp://127.0.0.1:29500", {}, (0, 3)),
        (1, 4, "tcp://localhost:29500", TORCHRUN, (0, 3)),
        (1, 4, "tcp://10.0.0.1:29500", {}, (1, 1)),
        (1, 4, "env://", {**TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, (0, 3)),
        (5, 8, "file:///shared/store", {}, (5, 5)),
        (1, 2, "", {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, (0, 1)),
    ],
    ids=["two nodes", "loopback", "localhost", "another host", "more than were started", "file", "deepspeed"],
)
def test_ranks_on_this_host(rank: int, world: int, url: str, variables: dict[str, str], here: tuple[int, int]) -> None:
    assert ranks_on_this_host(rank, world, url, variables) == here


@pytest.mark.parametrize(
    ("args", "given", "variables", "joins"),
    [
        ((), {}, TORCHRUN, _RendezvousArguments(5, 8, "env://")),
        (
            ("gloo",),
            {"rank": 1, "world_size": 3, "init_method": "tcp://b:1"},
            {},
            _RendezvousArguments(1, 3, "tcp://b:1"),
        ),
        (
            ("gloo", "tcp://b:1?rank=2&world_size=3"),
            {},
            {},
            _RendezvousArguments(2, 3, "tcp://b:1?rank=2&world_size=3"),
        ),
        (("gloo", None, None, 4, 0), {}, TORCHRUN, _RendezvousArguments(0, 4, "env://")),
        ((), {"store": object(), "rank": 0, "world_size": 2}, {}, _RendezvousArguments(0, 2, "")),
        (("mpi",), {}, {"PMI_RANK": "1", "PMI_SIZE": "2"}, _RendezvousArguments(1, 2, "env://")),
        (("gloo",), {}, {}, _RendezvousArguments(-1, -1, "env://")),
    ],
    ids=["environment", "arguments", "query", "positional", "store", "mpi", "nothing"],
)
def test_arguments_of_init_process_group(
    args: tuple[object, ...], given: dict[str, object], variables: dict[str, str], joins: _RendezvousArguments
) -> None:
    assert _RendezvousArguments.read(args, given, variables) == joins


def test_a_rendezvous_as_text_and_back() -> None:
    expected = ExpectedRanks(4, 7, 8)
    assert parse_rendezvous("rendezvous", rendezvous_target(expected), rendezvous_reason(5, "the rendezvous")) == (
        "the rendezvous",
        "",
        expected,
    )
    assert parse_rendezvous("rendezvous", "4 trainer ranks", rendezvous_reason(5, "policy-3")) == ("policy-3", "", None)
    assert parse_rendezvous("rendezvous", "policy-1", rendezvous_reason(0, "dp (3)", [0, 1])) == (
        "dp (3)",
        "0, 1",
        None,
    )
    assert parse_rendezvous("future", rendezvous_target(expected), rendezvous_reason(5, "it")) == ("", "", None)


def evidence_of(here: list[int], waiting: list[int], expected: ExpectedRanks) -> MessageStore:
    """Evidence of a host with the ranks `here`, of which those in `waiting` have been in the rendezvous for 10 s."""
    inbox = MessageStore()
    processes = tuple(ProcessInfo(f"rank-{rank}", "rank", rank, "a", 100 + rank) for rank in here)
    packed = pack_process(moved=10.0, active=10.0, same_stack=10.0)
    record = WaitRecord(
        "rendezvous",
        rendezvous_target(expected),
        rendezvous_reason(0, "the rendezvous"),
        10**9,
        None,
        10**9,
        1,
        "MainThread",
    )
    waits = tuple(wait_report(here.index(rank), record, 11 * 10**9) for rank in waiting)
    for message in (Roster("a", 1, processes), StateReport("a", 1, packed * len(here), waits=waits)):
        inbox.receive(encode_report(message), 100.0)
    return inbox


def test_a_missing_rank_of_this_host_is_named() -> None:
    (verdict,) = diagnose(evidence_of([0, 1, 2], [0, 1, 2], ExpectedRanks(0, 3, 4)).evidence(100.0))
    assert (verdict.kind, verdict.level, verdict.cause) == (
        VerdictKind.ABSENT,
        VerdictLevel.NOTICE,
        "rendezvous_incomplete",
    )
    assert [each.rank for each in verdict.culprits] == [3]
    assert "rank 3 has not joined the rendezvous; no such process is known" in verdict.explanation


def test_several_missing_ranks_are_named() -> None:
    (verdict,) = diagnose(evidence_of([1], [1], ExpectedRanks(0, 3, 4)).evidence(100.0))
    assert [each.rank for each in verdict.culprits] == [0, 2, 3]
    assert "ranks 0, 2 and 3 have not joined the rendezvous" in verdict.explanation


def test_candidates_for_a_missing_rank_are_named_without_confirmation() -> None:
    inbox = evidence_of([0, -1], [0], ExpectedRanks(0, 1, 2))
    state = StateReport("a", 1, pack_process(moved=90.0, active=90.0, same_stack=90.0) * 2)
    record = WaitRecord(
        "rendezvous",
        rendezvous_target(ExpectedRanks(0, 1, 2)),
        rendezvous_reason(0, "the rendezvous"),
        10**9,
        None,
        10**9,
        1,
        "x",
    )
    inbox.receive(
        encode_report(
            replace(state, waits=(wait_report(0, record, 91 * 10**9),), notes={1: ProcessNote("load() at job.py:7")})
        ),
        100.0,
    )
    (verdict,) = diagnose(inbox.evidence(100.0))
    assert verdict.level == VerdictLevel.NOTICE
    assert "rank 1 has not joined the rendezvous; it may be rank--1 in load() at job.py:7." in verdict.explanation


def test_ranks_of_unwatched_hosts_are_no_culprits() -> None:
    (verdict,) = diagnose(evidence_of([0, 1], [0, 1], ExpectedRanks(0, 1, 4)).evidence(100.0))
    assert (verdict.kind, verdict.level, verdict.culprits) == (VerdictKind.UNKNOWN, VerdictLevel.NOTICE, ())
    assert verdict.explanation.startswith(
        "All watched ranks have joined the rendezvous; 2 of its ranks are on hosts that are not watched"
    )


def test_a_late_rank_of_this_host_is_named_whatever_the_other_hosts_do() -> None:
    (verdict,) = diagnose(evidence_of([0, 1], [0], ExpectedRanks(0, 1, 4)).evidence(100.0))
    assert [each.rank for each in verdict.culprits] == [1]
    assert "has not joined the rendezvous" in verdict.explanation


def test_a_finished_rendezvous_expects_no_rank() -> None:
    inbox = evidence_of([0, 1, 2], [0, 1, 2], ExpectedRanks(0, 3, 4))
    assert Liveness.UNSEEN in inbox.evidence(100.0).processes.liveness
    inbox.receive(encode_report(StateReport("a", 1, pack_process() * 3)), 101.0)
    assert len(inbox.evidence(101.0).processes.info) == 3


def test_expected_ranks_survive_encoding() -> None:
    record = WaitRecord(
        "rendezvous", rendezvous_target(ExpectedRanks(0, 3, 4)), rendezvous_reason(0, "it"), 1, None, 1, 1, "MainThread"
    )
    state = StateReport("a", 1, waits=(wait_report(0, record, 2),))
    decoded = decode_report(encode_report(state))
    assert isinstance(decoded, StateReport)
    assert decoded.waits[0].expected == ExpectedRanks(0, 3, 4)


# --- processes without a beacon

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


class Started:
    """Sleeping processes of a watched run, which a fixture ends."""

    def __init__(self) -> None:
        self.run = f"unregistered-{os.getpid()}-{time.monotonic_ns()}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *wrapper: str, **variables: str) -> int:
        environment = {**os.environ, "LOCKSTEP_WATCH": self.run, **variables}
        self.processes.append(subprocess.Popen([*wrapper, *SLEEP], env=environment))
        pid = self.processes[-1].pid
        deadline = time.monotonic() + 20
        while not Path(f"/proc/{pid}/environ").read_bytes():  # the kernel fills it in shortly after the exec
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return pid


@pytest.fixture
def started() -> Iterator[Started]:
    made = Started()
    yield made
    for each in made.processes:
        each.kill()
        each.wait(10)


def test_unregistered_ranks_by_the_launchers_environment(started: Started) -> None:
    waits = started.start(RANK="0", LOCAL_RANK="0")
    late = started.start(RANK="1", LOCAL_RANK="1")
    started.start(RANK="1")  # a launcher of that node
    assert find_unregistered_ranks(started.run, {0: waits}, [1], {waits}) == ({1: late}, [])


def test_unregistered_ranks_by_their_order_among_siblings(started: Started) -> None:
    waits, second, third = (started.start() for _ in range(3))
    assert find_unregistered_ranks(started.run, {0: waits}, [1, 2], {waits}) == ({1: second, 2: third}, [])
    assert find_unregistered_ranks(started.run, {0: waits}, [1], {waits}) == ({}, [second, third]), (
        "either could be the missing rank"
    )


def test_an_environment_that_is_wrong_about_waiting_ranks_is_ignored(started: Started) -> None:
    """The environment of `torch.multiprocessing.spawn` on a Kubeflow node: all processes have the node's number."""
    waits, late = started.start(RANK="0"), started.start(RANK="0")
    assert find_unregistered_ranks(started.run, {1: waits}, [0], {waits}) == ({0: late}, [])


def test_processes_of_other_runs_are_ignored(started: Started) -> None:
    waits = started.start()
    started.start(LOCKSTEP_WATCH="another")
    assert find_unregistered_ranks(started.run, {0: waits}, [1], {waits}) == ({}, [])


def test_a_misidentified_process_is_not_counted_twice(started: Started, tmp_path: Path) -> None:
    """Two processes had each other's ranks until their beacons identified them."""
    monitor = ProcessMonitor(started.run)
    first, second = started.start(), started.start()
    for pid in (first, second):
        monitor._add_missing_rank("rank", UNKNOWN_RANK, pid)
    assert [(each.rank, each.pid) for each in monitor.tracked.values()] == [(-1, first), (-1, second)]
    monitor._add_missing_rank("rank", 1, second)
    monitor._read(BeaconState(tmp_path, started.run, "rank-2", "rank", 2, second, 0, 1, 0.0, 0, "", 1))
    assert {(each.name, each.pid) for each in monitor.tracked.values()} == {
        (f"process {first}", first),
        ("rank-2", second),
    }
