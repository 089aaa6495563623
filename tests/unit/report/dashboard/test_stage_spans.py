"""The bars of the Gantt chart: from durations in the ledger, from captures, and merged where there are too many."""

import random
from pathlib import Path

import pytest
from dashboard_helpers import make_run

from benchmarks.dashboard import write_capture
from lockstep.report.dashboard.metric_history import MetricHistory
from lockstep.report.dashboard.shown_run import ShownRun
from lockstep.report.dashboard.stage_spans import (
    CLOCK,
    CapturedStages,
    StageRow,
    StageSpan,
    gantt,
    joined_rows,
    merged_spans,
    run_row,
    shown_times,
)


def history(steps: int) -> tuple[MetricHistory, MetricHistory]:
    """Steps of 10 s that end at 10, 20, ...: 6 s rollout, 3 s training."""
    metrics, clock = MetricHistory(), MetricHistory()
    for step in range(1, steps + 1):
        metrics.add(step, {"time/rollout_s": 6.0, "time/train_s": 3.0, "time/step_s": 9.0, "reward/mean": 1.0})
        clock.add(step, {CLOCK: step * 10.0})
    return metrics, clock


def test_the_stages_of_a_step_follow_each_other_until_its_end() -> None:
    metrics, clock = history(3)
    row = run_row(metrics, clock, 15.0, 18.0, 100)
    assert [(each.stage, each.start, each.end) for each in row.spans] == [("rollout", 11, 17), ("train", 17, 20)]


def test_the_newest_steps_are_shown_without_a_time() -> None:
    _, clock = history(100)
    assert shown_times(clock, None, None, 2000.0) == (800.0, 2000.0)
    assert shown_times(clock, 5.0, 6.0, 2000.0) == (5.0, 6.0)


@pytest.mark.parametrize("most", [1, 7, 50])
def test_many_steps_become_few_spans_without_a_gap(most: int) -> None:
    metrics, clock = history(1000)
    row = run_row(metrics, clock, 0.0, 1e9, most)
    assert 0 < len(row.spans) <= most
    assert all(each.state == "merged" and each.stage == "rollout" for each in row.spans)
    assert row.spans[0].start == 1.0 and row.spans[-1].end == 10_000.0
    assert sum(each.count for each in row.spans) == 2000


def test_neighbours_are_merged_under_the_longest_stage() -> None:
    spans = [StageSpan("a", 0, 1), StageSpan("b", 1, 4), StageSpan("a", 4, 5), StageSpan("c", 5, 6)]
    assert merged_spans(spans, 2) == [StageSpan("b", 0, 4, "merged", 2), StageSpan("a", 4, 6, "merged", 2)]
    assert merged_spans(spans, 4) is spans


def test_rows_of_ranks_are_ordered_and_share_the_room() -> None:
    metrics, clock = history(20)
    ranks = [StageRow(f"policy-{rank}", "policy", rank, [StageSpan("train", t, t + 1) for t in range(200)])
             for rank in range(30)]  # fmt: skip
    chart = gantt(run_row(metrics, clock, 0, 1e9, 100), ranks, clock, most=400)
    assert chart["rows"][0] == {"role": "run", "name": "run"}
    assert chart["rows"][1] == {"role": "policy", "name": "policy-0", "rank": 0}
    assert len(chart["rows"]) == 31 and len(chart["spans"]) <= 400
    assert {span["row"] for span in chart["spans"]} == set(range(31))
    last = [span for span in chart["spans"] if span["row"] == 0][-1]
    assert last["step"] == 20


def test_what_two_captures_have_is_shown_once_and_ends_when_it_has_ended() -> None:
    running = StageRow("a", "policy", 0, [StageSpan("train", 1.0, 2.0, "running")])
    done = StageRow("a", "policy", 0, [StageSpan("train", 1.001, 3.0)])
    (row,) = joined_rows([running, done])
    assert [(each.end, each.state) for each in row.spans] == [(3.0, "done")]


def test_captured_timelines_are_read_once_and_damaged_ones_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 3)
    write_capture(folder, 9, 1000.0, random.Random(0))
    (folder / "timeline" / "broken.jsonl").write_text('{"lockstep_timeline": 77}\n')
    captured = CapturedStages(folder)
    rows = captured.rows()
    assert [row.name for row in rows] == [f"policy-{rank}" for rank in range(9)]
    assert rows[0].spans[0].stage == "logprobs" and rows[0].spans[0].start == pytest.approx(1000.0)
    chart = ShownRun(folder).stages(990.0, 2000.0)
    assert len(chart["rows"]) == 9 and {span["stage"] for span in chart["spans"]} == {"logprobs", "train"}
    for file in (folder / "timeline").iterdir():
        file.unlink()
    assert captured.rows() == []
