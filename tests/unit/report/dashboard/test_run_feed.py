"""Following a ledger: what is new is read once, and what a resumed run did again replaces what it did before."""

import os
from pathlib import Path
from typing import Any

import pytest
from dashboard_helpers import CONFIG, add_steps, make_run

from lockstep.ledger import Ledger
from lockstep.report.dashboard.run_feed import REREAD_STEPS, RunFeed


def steps_of(feed: RunFeed, name: str = "policy/loss") -> list[int]:
    return list(feed.curves([name], None, None, 5000)[name]["steps"])


def settle(folder: Path) -> None:
    """Makes the ledger look as if its last write was a while ago."""
    for path in folder.glob("ledger.sqlite*"):
        facts = path.stat()
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns - 10**9))


@pytest.mark.parametrize(
    ("end", "state", "message"),
    [
        ("finished", "finished", ""),
        ("interrupted", "stopped", "interrupted"),
        ("RuntimeError: no memory", "failed", "RuntimeError: no memory"),
    ],
)
def test_an_ended_run_says_how(tmp_path: Path, end: str, state: str, message: str) -> None:
    overview = RunFeed(make_run(tmp_path / "run", 3, end=end)).overview()
    assert (overview.state, overview.message, overview.step, overview.steps) == (state, message, 3, 40)
    assert overview.name == "run" and overview.recipe == "grpo"
    assert overview.started is not None and overview.updated is not None and overview.started <= overview.updated


def test_a_run_without_an_end_runs_while_its_process_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = RunFeed(make_run(tmp_path / "run", 3))
    with Ledger.resume(tmp_path / "run"):
        assert feed.overview().state == "running" and feed.overview().message == ""
    assert "killed" in feed.overview().message
    monkeypatch.setattr("lockstep.report.dashboard.run_feed.REMOTE_S", 0.0)
    assert feed.overview().state == "failed"


def test_new_steps_are_read_and_old_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", 30)
    feed, read = RunFeed(folder), list[int]()
    original = Ledger.metrics_rows

    def counted(self: Ledger, after: int | None = None, until: int | None = None) -> Any:
        rows = original(self, after, until)
        read.extend(row.step for row in rows)
        return rows

    monkeypatch.setattr(Ledger, "metrics_rows", counted)
    assert steps_of(feed) == list(range(1, 31))
    settle(folder)
    feed.metric_names()
    read.clear()
    assert steps_of(feed)[-1] == 30 and read == [], "nothing was written, so nothing is opened"
    with Ledger.resume(folder) as ledger:
        feed.metric_names()
        read.clear()
        ledger.commit(29, {})  # this attempt has trained it again
        add_steps(ledger, 30, 33)
        assert steps_of(feed) == list(range(1, 34))
        read.clear()
        add_steps(ledger, 33, 34)
        assert steps_of(feed)[-1] == 34 and min(read) >= 33 - REREAD_STEPS


def test_metrics_that_a_step_gets_later_are_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 5)
    feed = RunFeed(folder)
    with Ledger.resume(folder) as ledger:
        ledger.commit(4, {})
        assert "late" not in feed.metric_names()[0]
        ledger.record_metrics(4, {"late": 1.0})
        assert steps_of(feed, "late") == [5]


def test_a_resumed_run_shows_only_what_its_weights_have_learned(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 6)
    feed = RunFeed(folder)
    assert steps_of(feed) == [1, 2, 3, 4, 5, 6]
    with Ledger.resume(folder) as ledger:
        assert feed.overview().step == 0 and steps_of_none(feed)
        for step in range(2):
            ledger.record_metrics(step, {"policy/loss": 50.0 + step})
            ledger.commit(step, {})
        assert feed.curves(["policy/loss"], None, None, 10)["policy/loss"]["values"] == [50.0, 51.0]


def steps_of_none(feed: RunFeed) -> bool:
    return feed.curves(["policy/loss"], None, None, 10) == {}


def test_what_json_lacks_is_named(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "run", CONFIG) as ledger:
        for step, value in enumerate([1.0, float("nan"), float("inf"), float("-inf")]):
            ledger.record_metrics(step, {"loss": value})
            ledger.commit(step, {})
    curve = RunFeed(tmp_path / "run").curves(["loss"], None, None, 10)["loss"]
    assert curve["values"] == curve["low"] == [1.0, "nan", "inf", "-inf"]


def test_evaluations_are_metrics_too_from_before_the_first_step(tmp_path: Path) -> None:
    feed = RunFeed(make_run(tmp_path / "run", 4))
    assert feed.curves(["eval/score", "unknown"], None, None, 10) == {
        "eval/score": {"steps": [0, 4], "values": [0.1, 0.9], "low": [0.1, 0.9], "high": [0.1, 0.9]}
    }


def test_the_newest_steps_are_news(tmp_path: Path) -> None:
    feed = RunFeed(make_run(tmp_path / "run", 10))
    assert list(feed.steps_after(7, 50)) == [8, 9, 10] and list(feed.steps_after(0, 2)) == [9, 10]
    assert feed.steps_after(9, 5)[10]["eval/score"] == 0.9
    assert feed.steps_after(10, 5) == {}


def test_a_removed_run_is_a_missing_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 2)
    feed = RunFeed(folder)
    feed.overview()
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    with pytest.raises(FileNotFoundError):
        feed.overview()
