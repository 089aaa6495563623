"""Evidence from the dumps of many ranks: alignment, membership, gaps."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.dump_files import STUCK_S, Call, Comm, Entry, Job, steps, write
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.evidence_types import UNKNOWN, Liveness
from lockstep.watch.dumps.explain_dumps import read_dumps


def world(size: int) -> Comm:
    return Comm("0", tuple(range(size)), "default_pg")


def stopped(size: int, calls: int, rank: int, at: int, backend: str = "nccl") -> Job:
    job = steps(size, [world(size)], calls)
    job.programs[rank] = job.programs[rank][:at]
    job.backend = backend
    return job.play()


def counts(evidence: Evidence, communicator: int = 0) -> tuple[list[int], list[int]]:
    members = evidence.communicators
    rows = slice(*members.starts[communicator : communicator + 2])
    return members.entered[rows].tolist(), members.completed[rows].tolist()


def names(evidence: Evidence) -> list[tuple[str, list[int]]]:
    """Communicators and the ranks of their members."""
    members, who = evidence.communicators, evidence.processes.info
    return [
        (about.name, [who[p].rank for p in members.process[members.starts[i] : members.starts[i + 1]]])
        for i, about in enumerate(members.info)
    ]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("name", ["nccl_trace_rank_{rank}", "rank{rank}.json", "attempt_0/{rank}/fr.pickle"])
def test_the_rank_that_has_not_entered_is_named(tmp_path: Path, backend: str, name: str) -> None:
    write(stopped(4, 50, 2, 30, backend), tmp_path, name=name)
    evidence = read_dumps(tmp_path, readers=1)
    assert names(evidence) == [("default_pg", [0, 1, 2, 3])]
    assert counts(evidence) == ([31, 31, 30, 31], [30, 30, 30, 30])
    assert evidence.source == "dumps" and evidence.gaps == ()
    assert math.isclose(evidence.at - np.nanmax(evidence.processes.progressed_at), STUCK_S, abs_tol=0.1)
    assert (evidence.processes.liveness == Liveness.RUNNING).all()
    assert [each.rank for each in evidence.processes.info] == [0, 1, 2, 3]


def test_a_rank_without_a_dump_is_unknown(tmp_path: Path) -> None:
    write(stopped(4, 50, 2, 30), tmp_path, ranks=[0, 2, 3])
    evidence = read_dumps(tmp_path)
    assert counts(evidence) == ([31, UNKNOWN, 30, 31], [30, UNKNOWN, 30, 30])
    assert evidence.gaps == ("no dump of rank 1",)
    assert evidence.processes.liveness[1] == Liveness.RUNNING and np.isnan(evidence.processes.progressed_at[1])


def test_gloo_dumps_without_member_lists(tmp_path: Path) -> None:
    """All ranks are members of the default group; of other groups, the ranks that have used it."""
    job = steps(4, [world(4), Comm("1", (0, 1), "undefined"), Comm("2", (2, 3), "undefined")], 40)
    job.backend = "gloo"
    write(job.play(), tmp_path, ranks=[0, 1, 3])
    evidence = read_dumps(tmp_path)
    assert names(evidence) == [("default_pg", [0, 1, 2, 3]), ("1", [0, 1]), ("2", [3])]
    write(job, tmp_path / "more", ranks=[0, 1])
    assert names(read_dumps(tmp_path / "more", world_size=4))[0] == ("default_pg", [0, 1, 2, 3])
    assert read_dumps(tmp_path / "more", world_size=4).gaps == ("no dump of ranks 2, 3",)


def test_collectives_of_gloo_that_timed_out_are_not_completed(tmp_path: Path) -> None:
    job = stopped(3, 20, 1, 12, "gloo")
    for entries in job.entries:
        entries[-1].completed = entries[-1].created + 1
    write(job, tmp_path)
    assert counts(read_dumps(tmp_path)) == ([13, 12, 13], [12, 12, 12])


def test_dumps_align_in_spite_of_wrapped_rings_and_uneven_record_ids(tmp_path: Path) -> None:
    """Ranks 0 and 1 have a communicator of their own, so their record ids run ahead: a healthy job."""
    pair, everybody = Comm("1", (0, 1), "pair"), world(8)
    programs = [[Call(1), Call(1), Call(0)] * 40 if rank < 2 else [Call(0)] * 40 for rank in range(8)]
    job = Job([everybody, pair], programs).play()
    write(job, tmp_path, ring=20)
    evidence = read_dumps(tmp_path)
    assert counts(evidence) == ([40] * 8, [40] * 8) and counts(evidence, 1) == ([80, 80], [80, 80])
    assert len(np.unique(evidence.calls.signature)) == 1


def test_a_member_without_entries_in_the_ring_is_as_far_as_the_others(tmp_path: Path) -> None:
    programs = [[Call(0)] * 3 + [Call(1)] * (30 if rank < 2 else 0) for rank in range(3)]
    write(Job([world(3), Comm("1", (0, 1), "pair")], programs).play(), tmp_path, ring=10)
    evidence = read_dumps(tmp_path)
    assert counts(evidence) == ([3, 3, 3], [3, 3, 3])


def test_a_communicator_outside_all_rings_is_as_far_as_its_status_says(tmp_path: Path) -> None:
    comms = [world(2), Comm("1", (0, 1), "x"), Comm("2", (0, 1), "y"), Comm("3", (0, 1), "z")]
    write(Job(comms, [[Call(0), Call(1), Call(2)] + [Call(3)] * 30] * 2).play(), tmp_path, ring=10)
    evidence = read_dumps(tmp_path)
    assert names(evidence) == [(name, [0, 1]) for name in ("default_pg", "x", "y", "z")]
    assert all(counts(evidence, number) == ([1, 1], [1, 1]) for number in range(3)), "numbered in the order of creation"


def test_one_name_may_stand_for_several_communicators(tmp_path: Path) -> None:
    """This happens after `split_group`."""
    comms = [Comm("tp", (0, 1), "tp"), Comm("tp", (2, 3), "tp")]
    write(Job(comms, [[Call(rank // 2)] * 5 for rank in range(4)]).play(), tmp_path)
    assert names(read_dumps(tmp_path)) == [("tp [0, 1]", [0, 1]), ("tp [2, 3]", [2, 3])]


def test_members_with_other_lists_are_in_one_communicator_and_differ(tmp_path: Path) -> None:
    job = stopped(3, 10, 0, 9)
    write(job, tmp_path, ranks=[0, 1])
    job.comms[0] = Comm("0", (1, 2), "default_pg")
    write(job, tmp_path, ranks=[2])
    members = read_dumps(tmp_path).communicators
    assert members.member_list is not None and len(members.member_list) == 3
    assert members.member_list[0] == members.member_list[1] != members.member_list[2]


def test_the_calls_from_the_first_divergence_on_are_kept(tmp_path: Path) -> None:
    job = steps(8, [world(8)], 1000)
    job.programs[5][400] = Call(0, "broadcast", line=77)
    write(job.play(), tmp_path)
    calls = read_dumps(tmp_path).calls
    at = calls.seq == 401
    assert at.sum() == 8 and len(np.unique(calls.signature[at])) == 2
    odd = int(calls.signature[at & (calls.membership == 5)][0])
    assert calls.by_signature[odd].operation == "broadcast" and calls.sites[5, 401] == "train.py:77 in training_step"


def test_an_old_divergence_is_found_by_decoding_in_full(tmp_path: Path) -> None:
    """The backend paired them silently: no rank waits, and only older calls, digested at first, reveal it."""
    job = steps(4, [world(4)], 1000)
    job.play()
    odd = Call(0, "broadcast", line=77)
    job.entries[2][300].call = odd
    job.programs[2][300] = odd
    write(job, tmp_path)
    calls = read_dumps(tmp_path).calls
    at = calls.seq == 301
    assert (
        at.sum() == 4
        and calls.by_signature[int(calls.signature[at & (calls.membership == 2)][0])].operation == "broadcast"
    )
    assert calls.sites[2, 301] == "train.py:77 in training_step" and calls.sites[0, 301] != calls.sites[2, 301]


def test_a_rank_far_behind_is_compared_at_its_position(tmp_path: Path) -> None:
    """The others have enqueued five hundred more collectives, which NCCL allows."""
    job = stopped(4, 1000, 1, 300)
    call = Call(0, line=5)
    for rank in (0, 2, 3):
        entries = job.entries[rank]
        last = entries[-1]
        job.programs[rank] = [*job.programs[rank], call]
        entries += [Entry(call, 301 + more, last.created + more) for more in range(1, 500)]
    write(job, tmp_path)
    evidence = read_dumps(tmp_path)
    assert counts(evidence) == ([301, 300, 301, 301], [300, 300, 300, 300]), "a rank waits in its oldest one only"
    assert evidence.extra["issued"] == [800, 300, 800, 800]
    calls = evidence.calls
    assert (calls.seq == 300).sum() == 4, "the newest of the one is there for all"


def test_an_older_dump_does_not_prove_later_progress(tmp_path: Path) -> None:
    early = steps(4, [world(4)], 20).play()
    late = steps(4, [world(4)], 60).play()
    write(late, tmp_path, ranks=[0, 1, 3])
    write(early, tmp_path, ranks=[2])
    evidence = read_dumps(tmp_path)
    assert counts(evidence)[0] == [60, 60, UNKNOWN, 60]
    assert evidence.gaps == (
        "the dump of rank 2 is older than the others: on '0' they finished #60 with it, it knows of #20",
    )


def test_dumps_of_an_earlier_run_are_left_out(tmp_path: Path) -> None:
    job = stopped(4, 50, 2, 30)
    write(job, tmp_path / "old")
    for entries in job.entries:
        for entry in entries:
            entry.created += 7_200 * 10**9
            entry.completed = entry.completed and entry.completed + 7_200 * 10**9
    write(job, tmp_path / "new", ranks=[0, 1, 2])
    evidence = read_dumps(tmp_path)
    assert counts(evidence) == ([31, 31, 30, UNKNOWN], [30, 30, 30, UNKNOWN])
    assert len([gap for gap in evidence.gaps if "has 2 dumps: read nccl_trace_rank" in gap]) == 3
    assert any("nccl_trace_rank_3 (rank 3) is of an earlier run" in gap for gap in evidence.gaps)
    assert evidence.gaps[-1] == "no dump of rank 3"


def test_damaged_dumps_are_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    write(stopped(6, 50, 2, 30), tmp_path)
    cut = tmp_path / "nccl_trace_rank_4"
    cut.write_bytes(cut.read_bytes()[:1000])
    (tmp_path / "nccl_trace_rank_5").write_bytes(b"")
    (tmp_path / "fr_dump").write_bytes((tmp_path / "nccl_trace_rank_0").read_bytes())
    evidence = read_dumps(tmp_path)
    assert counts(evidence)[0] == [31, 31, 30, 31, UNKNOWN, UNKNOWN]
    assert evidence.gaps[0].startswith("fr_dump: its name has no rank")
    assert evidence.gaps[1].startswith("nccl_trace_rank_4 (rank 4) is truncated or damaged: ")
    assert evidence.gaps[2:] == ("nccl_trace_rank_5 (rank 5) is empty", "no dump of ranks 4, 5")


def test_a_recorder_without_entries_proves_nothing(tmp_path: Path) -> None:
    """One rank runs with TORCH_FR_BUFFER_SIZE=0."""
    job = stopped(3, 20, 1, 12)
    write(job, tmp_path, ranks=[0, 1])
    job.entries[2] = []
    write(job, tmp_path, ranks=[2])
    evidence = read_dumps(tmp_path)
    assert counts(evidence)[0] == [13, 12, UNKNOWN] and evidence.gaps == ("no entries in the dump of rank 2",)


def test_dumps_of_several_versions(tmp_path: Path) -> None:
    write(stopped(3, 20, 1, 12), tmp_path)
    path = tmp_path / "nccl_trace_rank_0"
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"\x04\x00\x00\x002.10", b"\x03\x00\x00\x002.9"))
    os.utime(path, (stat.st_mtime, stat.st_mtime))
    evidence = read_dumps(tmp_path)
    assert counts(evidence) == ([13, 12, 13], [12, 12, 12])
    assert evidence.gaps == ("dumps of several versions: 2.9 of rank 0, 2.10 of ranks 1, 2",)
