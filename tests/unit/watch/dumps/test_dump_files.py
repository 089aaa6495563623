"""Finding dumps in a folder, and their ranks."""

from pathlib import Path

import pytest

from lockstep.watch.dumps.dump_files import find_dump_files, rank_in_path
from lockstep.watch.dumps.explain_dumps import NoDumps, read_dumps


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_0", 0), ("nccl_trace_rank_17", 17), ("comm_lib_trace_rank_3", 3), ("_0", 0), ("trace_12", 12),
        ("rank0.pickle", 0), ("rank_4.json", 4), ("rank-5.pkl", 5), ("fr.rank=6.bin", 6), ("host7_rank_3", 3),
        ("nccl_trace_rank_3_20260101120000", 3), ("node1.global_rank_9.pickle", 9), ("rank3.pickle.json", 3),
        ("job_1/attempt_0/3/fr.pickle", 3), ("rank2/fr_trace.json", 2), ("host-b/nccl_trace_rank_1", 1), ("7/dump", 7),
        ("fr.pickle", None), ("dump_20260101120000", None), ("frank_x", None), ("attempt_0/fr.pickle", None),
    ],
)  # fmt: skip
def test_the_rank_is_read_from_the_usual_names(name: str, rank: int | None) -> None:
    assert rank_in_path(name) == rank


def dump(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x80\x02}X\x09\x00\x00\x00pg_config}s.")
    return path


def test_other_files_of_the_folder_are_ignored(tmp_path: Path) -> None:
    wanted = [dump(tmp_path / "a" / "nccl_trace_rank_1"), dump(tmp_path / "b" / "x.7")]
    (tmp_path / "verdict.json").write_text('{"kind": "absent"}')
    (tmp_path / "train.log").write_text("rank 3: nothing")
    (tmp_path / "model.pickle").write_bytes(b"\x80\x04\x95")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nccl_trace_rank_2").touch()
    (tmp_path / "link_rank_9").symlink_to(wanted[0])
    assert [(found.path.name, found.rank) for found in find_dump_files(tmp_path)] == [
        ("nccl_trace_rank_2", 2), ("nccl_trace_rank_1", 1), ("x.7", 7),
    ]  # fmt: skip
    assert [found.path for found in find_dump_files(wanted[0])] == [wanted[0]]


def test_a_pattern_shows_where_the_rank_is(tmp_path: Path) -> None:
    for number in (3, 11):
        dump(tmp_path / f"node-{number % 2}" / f"p{number:04d}.trace")
    dump(tmp_path / "node-0" / "other_5")
    assert sorted(found.rank or -1 for found in find_dump_files(tmp_path, "node-*/p{rank}.trace")) == [3, 11]
    assert sorted(found.rank or -1 for found in find_dump_files(tmp_path, "p{rank}.trace")) == [3, 11]
    with pytest.raises(ValueError, match=r"must contain \{rank\} exactly once"):
        find_dump_files(tmp_path, "p*.trace")


def test_the_error_names_what_was_searched_for(tmp_path: Path) -> None:
    with pytest.raises(NoDumps, match="does not exist"):
        read_dumps(tmp_path / "nowhere")
    with pytest.raises(NoDumps, match="nccl_trace_rank_0"):
        read_dumps(tmp_path)
    with pytest.raises(NoDumps, match=r"matches --ranks 'x\{rank\}'"):
        read_dumps(tmp_path, ranks="x{rank}")
    (tmp_path / "nccl_trace_rank_0").touch()
    with pytest.raises(NoDumps, match=r"nccl_trace_rank_0 \(rank 0\) is empty"):
        read_dumps(tmp_path)
