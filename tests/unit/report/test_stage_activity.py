from test_live_console import row

from lockstep.report.live_console import StageActivity, stage_activity
from lockstep.watch.beacon.beacon_table import CounterRow, WaitRow


def tokens(value: int, total: int | None = 100, still_s: float = 0.1, name: str = "tokens") -> CounterRow:
    return CounterRow(name, value, total, None, still_s)


def test_progress_is_summed_over_the_role_that_moved_last():
    rows = [
        row("engine-0", role="engine", counters=(tokens(10), tokens(5, None, 0.0, "steps"))),
        row("engine-1", role="engine", counters=(tokens(30, still_s=4.0),)),
        row("policy-0", counters=(tokens(3, 8, 9.0, "micro-batches"),)),
    ]
    assert stage_activity(rows) == StageActivity(40, 200, "tokens", "")


def test_finished_counters_and_those_of_dead_processes_are_ignored():
    rows = [row("a", counters=(tokens(100),)), row("b", alive=False, counters=(tokens(5),)), row("c")]
    assert stage_activity(rows) == StageActivity()


def test_the_controllers_wait_is_shown_without_progress():
    def wait(stalled_s: float) -> WaitRow:
        return WaitRow("future", "engine-0", "completions", 12.0, stalled_s, None, "MainThread")

    controller = row("controller", role="controller", waits=(wait(11.0),))
    assert stage_activity([controller]).waiting == "engine-0 (future) for 12s: completions"
    assert stage_activity([row("controller", role="controller", waits=(wait(0.5),))]).waiting == ""


def test_progress_of_an_earlier_stage_and_of_the_controller_is_not_that_of_the_stage():
    step = tokens(3, 12, 0.0, "step")
    controller = row("controller", role="controller", stage="publish", stage_s=2.0, counters=(step,))
    for still_s, total in ((2.5, None), (1.5, 24)):
        policy = row("policy-0", counters=(tokens(20, 24, still_s, "optimizer steps"),))
        assert stage_activity([controller, policy]).total == total
