"""Candidates from differences between ranks and hosts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.judge.detectors.rank_differences import minority_ranks
from lockstep.doctor.judge.log_diagnosis import explain
from tests.unit.doctor.job_logs import raised, steps, write


@pytest.mark.parametrize(
    ("reports", "minority"),
    [
        ([(0, 2, "a")], (2,)),
        ([(0, 2, "a"), (1, 2, "a"), (2, 0, "b")], (2,)),
        ([(3, 0, "a"), (1, 0, "a")], (0,)),
        ([(0, 3, "a"), (3, 0, "b"), (1, 3, "a"), (2, 3, "a")], (3,)),
        ([(0, 1, "a")], ()),
        ([(0, 1, "a"), (1, 0, "b")], ()),
        ([(1, None, "a")], ()),
        ([], ()),
    ],
)
def test_a_minority_of_one(reports: list[tuple[int, int | None, str]], minority: tuple[int, ...]) -> None:
    assert minority_ranks(reports) == minority


@given(st.lists(st.sampled_from("aab"), min_size=2, max_size=12))
def test_the_minority_is_named_if_all_ranks_report(shapes: list[str]) -> None:
    reports = [(rank, next(peer for peer, shape in enumerate(shapes) if shape != own), own)
            for rank, own in enumerate(shapes) if len(set(shapes)) > 1]  # fmt: skip
    fewer = min("ab", key=shapes.count)
    tie = shapes.count("a") == shapes.count("b") or not reports
    assert minority_ranks(reports) == (() if tie else tuple(rank for rank, own in enumerate(shapes) if own == fewer))


def _print(shape: int) -> str:
    return f"CollectiveFingerPrint(SequenceNumber=9, OpType=ALLREDUCE, TensorShape=[{shape}], TensorDtypes=Float)"


def test_the_rank_with_another_shape_is_the_culprit(tmp_path: Path) -> None:
    said = "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective: {}, but Rank {} is running collective: {}."  # noqa: E501
    lines = [line for rank in range(4) for line in steps(rank, 5)]
    lines += raised(0, said.format(0, _print(4096), 3, _print(1)))
    verdict = explain([write(tmp_path, train=lines)]).verdict
    assert verdict.cause == "uneven_data" and [each.rank for each in verdict.culprits] == [3]


def _banner(host: str, version: str) -> str:
    return f"{host}:700:731 [0] NCCL INFO NCCL version {version}+cuda12.4"


def test_hosts_with_different_versions_of_nccl(tmp_path: Path) -> None:
    lines = [_banner("gn1", "2.21.5"), _banner("gn2", "2.21.5"), _banner("gn3", "2.18.3")]
    lines += ["gn3:700:731 [0] bootstrap.cc:77 NCCL WARN Message truncated : received 1024 bytes instead of 256"]
    verdict = explain([write(tmp_path, train=lines)]).verdict
    assert verdict.cause == "version_mismatch"
    assert [each.host for each in verdict.culprits] == ["gn3"]


def test_working_version_differences_are_not_a_fault(tmp_path: Path) -> None:
    lines = [_banner("gn1", "2.21.5"), _banner("gn2", "2.21.6"), *steps(0, 400), "Training completed"]
    assert explain([write(tmp_path, train=lines)]).verdict.cause == "benign"
    same = [_banner("gn1", "2.21.5"), _banner("gn2", "2.21.5")]
    assert explain([write(tmp_path / "b", train=same)]).verdict.cause != "version_mismatch"


def test_hosts_with_other_versions_of_a_library_are_named(tmp_path: Path) -> None:
    versions = {f"n-{at}": [f"[n-{at}] torch==2.{7 if at == 3 else 8}.0+cu128", "starting"] for at in (1, 2, 3)}
    verdict = explain([write(tmp_path, **versions)]).verdict
    assert verdict.cause == "version_mismatch" and [each.host for each in verdict.culprits] == ["n-3"]


def test_equal_shapes_of_other_types_are_no_uneven_data(tmp_path: Path) -> None:
    def reported(rank: int, types: tuple[str, str]) -> list[str]:
        own, other = (f"CollectiveFingerPrint(SequenceNumber=5, OpType=ALLREDUCE, TensorShape=[4], TensorDtypes={each})"
                      for each in types)  # fmt: skip
        text = f"Rank {rank} is running collective: {own}, but Rank {1 - rank} is running collective: {other}"
        return raised(rank, f"RuntimeError: Detected mismatch between collectives on ranks. {text}")

    types = ("Float", "Double")
    verdict = explain([write(tmp_path, rank0=reported(0, types), rank1=reported(1, types[::-1]))]).verdict
    assert verdict.cause == "rank_divergent_branch"


def test_a_rank_that_never_announced_itself_is_missing(tmp_path: Path) -> None:
    lines = [f"2026-11-21 14:10:0{at} joining the group as trainer{at} of 3" for at in (2, 0)]
    verdict = explain([write(tmp_path / "waits", job=lines)]).verdict
    assert verdict.cause == "rendezvous_incomplete" and [each.rank for each in verdict.culprits] == [1]
    assert explain([write(tmp_path / "runs", job=[*lines, *steps(0, 9)])]).verdict.cause != "rendezvous_incomplete"


def test_shapes_that_differ_where_ranks_call_different_lines_are_another_branch(tmp_path: Path) -> None:
    error = "DistributedOperationException: Cannot apply desired operation due to shape mismatches. All shapes differ."

    def rank(number: int, line: int) -> list[str]:
        return raised(number, f"accelerate.utils.operations.{error}", ("/home/u/train.py", line, "score", "gather(x)"))

    assert explain([write(tmp_path / "same", job=[*rank(0, 7), *rank(1, 7)])]).verdict.cause == "uneven_data"
    other = explain([write(tmp_path / "other", job=[*rank(0, 7), *rank(1, 9)])]).verdict
    assert other.cause == "rank_divergent_branch"
