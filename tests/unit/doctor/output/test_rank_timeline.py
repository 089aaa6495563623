"""A line of time per rank: what is on it, where, and which rows are folded."""

from pathlib import Path

import pytest

from lockstep.doctor.output.job_answer import answer_job
from lockstep.doctor.output.rank_timeline import MAX_ROWS_SHOWN, RankTimeline, build_rank_timeline
from tests.unit.doctor.job_logs import raised, state, steps, watchdog, write


def timeline(folder: Path, culprits: tuple[int, ...] = (), **files: list[str]) -> RankTimeline:
    return build_rank_timeline(answer_job([write(folder, **files)]).logs, culprits)


def test_steps_errors_and_the_wait_are_at_their_times(tmp_path: Path) -> None:
    found = timeline(
        tmp_path, (1,), rank_0=[*steps(0, 60), *watchdog(0, 7)], rank_1=[*steps(1, 60), *raised(1, "KeyError: 'a'")]
    )
    assert [row.label for row in found.rows] == ["rank 1", "rank 0"], "the culprit is first"
    culprit, waiting = found.rows
    assert culprit.culprit and culprit.steps == 60 and culprit.errors == 1 and culprit.end == "raises KeyError"
    (wait,) = [mark for mark in waiting.marks if mark.kind == "wait"]
    life = waiting.marks[0]
    assert life.kind == "life" and (life.at, life.until) == (0, 1000)
    assert wait.until == 1000 and wait.at == pytest.approx(500, abs=1), "it waited 600 s, the second half of 1200 s"
    assert found.ticks[0] == "+0.0s" and found.ticks[-1] == "+20m00s"
    assert "60 steps" in waiting.summary and "gives up waiting" in waiting.summary


def test_the_ranks_of_a_merged_log_have_a_row_each(tmp_path: Path) -> None:
    found = timeline(tmp_path, job=[line for pair in zip(steps(0, 30), steps(1, 30), strict=True) for line in pair])
    assert sorted(row.label for row in found.rows) == ["rank 0", "rank 1"]


def test_clocks_are_aligned(tmp_path: Path) -> None:
    later = [line.replace("2026-11-21 14:", "2026-11-21 16:") for line in steps(1, 60)]
    found = timeline(tmp_path, rank_0=steps(0, 60), rank_1=later)
    assert all(row.marks[0].at == 0 and row.marks[0].until == 1000 for row in found.rows)


def test_many_rows_that_end_alike_are_folded(tmp_path: Path) -> None:
    many = {f"rank_{rank}": [*steps(rank, 3), *watchdog(rank, 7)] for rank in range(100)}
    found = timeline(tmp_path, (42,), **many, rank_100=[*steps(100, 3), *state(100, 6, 6)])
    assert len(found.rows) <= MAX_ROWS_SHOWN and found.rows[0].rank == 42
    assert len(found.rows) + sum(len(group.rows) for group in found.groups) == 101
    assert any("gives up waiting" in group.label for group in found.groups)


def test_files_without_timestamps_are_counted(tmp_path: Path) -> None:
    found = timeline(tmp_path, rank_0=["step 1 loss 0.5", "step 2 loss 0.5", *raised(0, "KeyError: 'a'")])
    assert not found.rows and found.undated == 1 and not found.ticks
