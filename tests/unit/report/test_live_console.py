import io
import json
import re
from pathlib import Path

import pytest
from report_helpers import make_run
from rich.console import Console as RichConsole

from lockstep.base.text import format_duration
from lockstep.ledger import Ledger
from lockstep.report.live_console import LiveConsole, StageActivity, format_number, sparkline
from lockstep.report.run_summary import build_summary, write_summary
from lockstep.report.top_table import follow_processes, render_processes
from lockstep.watch.beacon.beacon_table import CommunicatorRow, CounterRow, ProcessRow, WaitRow
from lockstep.watch.diagnosis.verdict import Culprit, Verdict, VerdictKind, VerdictLevel


def shown(renderable: object, width: int = 160) -> str:
    stream = io.StringIO()
    RichConsole(file=stream, width=width).print(renderable)
    return stream.getvalue()


METRICS = {"reward/mean": 0.5, "policy/loss": 0.01, "throughput/tokens_per_s": 5123.4, "time/rollout_s": 0.25}


def test_plain_lines_without_a_terminal():
    stream = io.StringIO()
    console = LiveConsole("sort", Path("runs/sort"), 20, stream=stream, terminal=False)
    console.start(10)
    console.evaluation(10, {"eval/exact_match": 0.5})
    console.stage("rollout")
    console.step(10, METRICS)
    console.evaluation(11, {"eval/exact_match": 0.75})
    console.message("see [/etc/x]")
    console.finish("finished", Path("runs/sort/report.html"))
    text = stream.getvalue()
    assert "\x1b" not in text and "\r" not in text
    assert text.splitlines()[:3] == [
        "sort in runs/sort, after step 10 of 20",
        "evaluation after step 10: exact_match 0.5",
        "step 11/20  reward 0.5  loss 0.01  tokens/s 5,123  [rollout 0.2s]",
    ]
    assert "see [/etc/x]" in text
    last = text.splitlines()[-1]
    assert last.startswith("finished after 11 of 20 steps in ")
    assert last.endswith("exact match 0.5 → 0.75; run: runs/sort, report: runs/sort/report.html")


def test_a_step_without_signal_says_so():
    stream = io.StringIO()
    console = LiveConsole("sort", Path("runs/sort"), 20, stream=stream, terminal=False)
    console.step(0, {"reward/mean": 1.0, "policy/loss": 0.0, "policy/tokens": 0.0})
    assert stream.getvalue().startswith(
        "step 1/20  reward 1  nothing learned: no group has completions with different rewards"
    )


def test_quiet_prints_warnings_and_the_last_line():
    stream = io.StringIO()
    console = LiveConsole("sort", Path("runs/sort"), 20, stream=stream, terminal=False, quiet=True)
    console.start()
    console.step(0, METRICS)
    console.message("nothing of note")
    console.warning("engine-0 was restarted")
    console.finish("interrupted")
    assert [line.split(" ")[0] for line in stream.getvalue().splitlines()] == ["engine-0", "interrupted"]


def on_terminal(monkeypatch, width: int, steps: int = 30, **options: object) -> tuple[LiveConsole, io.StringIO]:
    """A console on a terminal of this width, and what it writes there."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    return LiveConsole("sort", Path("runs/sort"), steps, terminal=True, stream=stream, **options), stream


def test_the_live_line(monkeypatch):
    activity = StageActivity(128, 512, "tokens", "reward-0 (queue) for 12s: scores of step 3")
    console, _ = on_terminal(monkeypatch, 200, activity=lambda: activity)
    console.start()
    for step in range(5):
        console.step(step, METRICS | {"reward/mean": step / 4})
    console.stage("rollout")
    text = shown(console.render(), 200)
    console.close()
    assert text.startswith("step 5/30 ━━──────────────") and " left  rollout 128/512 tokens " in text
    assert "  waits for reward-0 (queue) for 12s: scores of step 3  reward 1  loss 0.01" in text
    assert "▁▃▅▆█" in text, "half a height is rounded to the even one"
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("width", [1, 12, 40, 60, 80, 120])
def test_the_live_line_fits_any_terminal(monkeypatch, width):
    hostile = "reward\n-0\x1b[2J\u202e 好好好 " * 3
    console, _ = on_terminal(monkeypatch, width, activity=lambda: StageActivity(1, 2, hostile, hostile))
    console.start()
    console.step(0, METRICS)
    console.stage(hostile)
    line = console.render()
    console.close()
    assert "\n" not in line.plain and line.cell_len <= width
    assert line.plain.startswith("step 1/30"[: width - 1]) and line.plain.endswith("…")


def test_lines_that_stay_on_a_terminal(monkeypatch):
    console, stream = on_terminal(monkeypatch, 80, lines_every=10)
    console.start()
    for step in range(25):
        console.step(step, METRICS)
    console.finish("interrupted")
    steps = [line.split()[1] for line in plain(stream.getvalue()).splitlines() if "[rollout" in line]
    assert steps == ["1/30", "10/30", "20/30", "25/30"], "the last step that was done has a line"


def plain(written: str) -> str:
    """What is written, without styles and without lines that are erased again."""
    return re.sub(r"[^\n]*\r\x1b\[2K", "", re.sub(r"\x1b\[[\d;?]*[mhl]", "", written))


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    console, stream = on_terminal(monkeypatch, 80)
    monkeypatch.setenv("TERM", "dumb")
    console = LiveConsole("sort", Path("runs/sort"), 3, terminal=True, stream=stream)
    console.start()
    console.show_wait("engine-0")
    for step in range(3):
        console.step(step, METRICS)
    console.finish("finished")
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    assert [line.split()[1] for line in stream.getvalue().splitlines()[1:-1]] == ["1/3", "3/3"]


@pytest.mark.parametrize(("every_s", "steps"), [(10.0, [1, 11, 21, 25]), (0.0, list(range(1, 26))), (3.5, None)])
def test_lines_of_steps_in_a_pipe_are_rare(monkeypatch, every_s, steps):
    now = [0.0]
    monkeypatch.setattr("lockstep.report.live_console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = LiveConsole("sort", Path("runs/sort"), 30, stream=stream, terminal=False, lines_every_s=every_s)
    console.start()
    for step in range(25):
        now[0] += 1.0
        console.step(step, METRICS)
    console.finish("failed")
    found = [int(line.split()[1].partition("/")[0]) for line in stream.getvalue().splitlines() if "[rollout" in line]
    assert found == (steps or [1, 5, 9, 13, 17, 21, 25])


def test_waits_are_printed_rarely_without_a_live_line(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("lockstep.report.live_console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    console = LiveConsole("sort", Path("runs/sort"), 20, stream=stream, terminal=False)
    console.stage("start")
    for tick in range(40):
        now[0] = tick / 2
        console.show_wait(f"engine-0 (start) for {tick / 2:g}s")
    console.show_wait("")
    console.stage("")
    assert [line.rpartition(" ")[2] for line in stream.getvalue().splitlines()] == ["2s", "4s", "8s", "16s"]
    assert stream.getvalue().startswith("start waits for engine-0 (start) for 2s")


def test_waits_before_the_first_step(monkeypatch):
    console, _ = on_terminal(monkeypatch, 120)
    console.stage("start")
    console.show_wait("policy-0 (load the model) for 3s: policy-0 is in stage setup")
    text = shown(console.render())
    assert "start" in text and "waits for policy-0 (load the model) for 3s: policy-0 is in stage setup" in text
    assert "step" not in text
    console.start()
    assert "step 0/30" in shown(console.render())
    console.close()
    quiet = io.StringIO()
    console = LiveConsole("sort", Path("runs/sort"), 20, terminal=True, stream=quiet, quiet=True)
    console.show_wait("policy-0 (load the model) for 3s")
    console.close()
    assert quiet.getvalue() == ""


def test_the_live_line_is_removed(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    with LiveConsole("sort", Path("runs/sort"), 20, terminal=True, stream=stream) as console:
        console.start()
        console.stage("rollout")
        console.progress(5)
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1  # the cursor


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([1.0], "▁"), ([2, 2, 2], "▁▁▁"), ([0, 7], "▁█"), ([0, float("nan"), 7], "▁ █")],
)
def test_sparkline(values, bars):
    assert sparkline(values) == bars


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5123, "0.512"), (12.34, "12.3"), (1204.4, "1,204"), (3.2e-6, "3.2e-06"), (float("nan"), "nan")],
)
def test_number(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (0.012, "12ms"),
        (0.42, "0.4s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (7620, "2h07m"),
        (273600, "3d04h"),
    ],
)
def test_duration(seconds, text):
    assert format_duration(seconds) == text


def row(name: str, **fields: object) -> ProcessRow:
    given = {"role": "policy", "rank": 0, "pid": 7, "alive": True, "state": "running", "stage": "train"}
    given |= {"stage_s": 3.0, "beat_s": 0.1, "counters": (), "waits": ()}
    return ProcessRow(name=name, **(given | fields))


def test_top():
    wait = WaitRow("future", "engine-0", "completions of step 7", 12.0, 11.0, 48.0, "MainThread")
    rows = [
        row("controller", role="controller", waits=(wait,), stage="rollout"),
        row("engine-0", counters=(CounterRow("tokens", 512, 4096, 230.4, 0.0),)),
        row("policy-1", alive=False, state="gone"),
    ]
    text = shown(render_processes(rows), 200)
    assert "tokens 512/4,096 230/s" in text
    assert "engine-0 12s (future): completions of step 7 [at most 48s more]" in text
    assert "dead: policy-1. controller waits for engine-0 (12s)." in text
    assert "no process waits" in shown(render_processes([row("policy-0")]))
    assert "no process of sort was found on this host" in shown(render_processes([], "sort"))


def test_follow_ends(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    stream = io.StringIO()
    follow_processes("nobody", RichConsole(file=stream), every_s=0.01, refreshes=2)
    assert "no process of nobody" in stream.getvalue()


def test_summary(tmp_path):
    with make_run(tmp_path / "run", steps=40) as ledger:
        path = write_summary(ledger, "interrupted")
        summary = json.loads(path.read_text())
        assert summary == build_summary(ledger, "interrupted")
    assert summary["exit_reason"] == "interrupted" and summary["steps"] == {"done": 40, "wanted": 120}
    exact = summary["eval/exact_match"]
    assert exact["first"] == 0.531 and exact["best"] == exact["final"] > 0.7 and exact["best_step"] == 40
    assert summary["seconds"]["reward"] == pytest.approx(40 * 0.012) and "step" not in summary["seconds"]
    assert summary["tokens"] > 40 * 256 * 9 and summary["versions"]["torch"]


def test_the_summary_of_a_resumed_run_covers_this_attempt(tmp_path):
    """A process that was killed after step 5 leaves metrics of steps that the resumed run has not reached again."""
    folder = tmp_path / "run"
    with Ledger.create(folder, {"name": "x", "steps": 9}) as ledger:
        for step in range(5):
            ledger.commit(step, {})
            ledger.record_metrics(step, {"tokens/total": 10.0 * (step + 1)})
        ledger.record_checkpoint(1, folder / "checkpoints" / "00000002")
        for version, exact in ((0, 0.1), (2, 0.2), (4, 0.9)):
            ledger.record_evaluation(version - 1, {"eval/exact_match": exact, "eval/reward_mean": 1 - exact})
        assert build_summary(ledger, "")["steps"]["done"] == 5
    with Ledger.resume(folder) as ledger:
        assert build_summary(ledger, "")["steps"]["done"] == 2, "nothing is done again yet"
        ledger.commit(2, {})
        found = build_summary(ledger, "interrupted")
    assert (found["steps"]["done"], found["tokens"]) == (3, 30)
    assert (found["eval/exact_match"]["final"], found["eval/exact_match"]["best_step"]) == (0.2, 2)
    assert found["eval/reward_mean"] == {"first": 0.9, "final": 0.8, "best": 0.9, "best_step": 0}


def test_summary_of_a_run_that_did_nothing(tmp_path):
    with make_run(tmp_path / "run", steps=0) as ledger:
        summary = build_summary(ledger, "failed: no memory")
    assert summary["steps"]["done"] == 0 and summary["tokens"] == 0 and summary["last"] == {}


def test_top_lists_suspects_first_and_marks_late_ranks():
    def rank(number: int, entered: int, operation: str) -> ProcessRow:
        behind = (CommunicatorRow("fsdp", entered, entered, operation, 41.0),)
        return ProcessRow(
            f"policy-{number}", "policy", number, 100 + number, True, "running", "train", 1.0, None, (), (), behind
        )  # fmt: skip

    verdict = Verdict(
        VerdictKind.ABSENT,
        VerdictLevel.CONFIRMED,
        (Culprit(1, "policy", "", 101, name="policy-1"),),
        explanation="policy-1 is late.",
    )
    lines = shown(render_processes([rank(0, 412, "all_reduce"), rank(1, 411, "")], "run", [verdict]), 200).splitlines()
    assert lines[0] == "confirmed: policy-1 is late."
    assert [line.split()[0] for line in lines[2:5]] == ["process", "policy-1", "policy-0"]
    assert "fsdp #411" in lines[3] and "fsdp #412 in all_reduce 41s" in lines[4]
