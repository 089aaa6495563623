"""What failed in a run, on a line of time."""

from typing import Any

from lockstep.ledger import EventRow
from lockstep.report.faults import faults_of


def event(at: float, kind: str = "recovery", **fields: Any) -> EventRow:
    return EventRow(at, 1, kind, {"at": at, **fields} if kind == "recovery" else fields)


def test_a_run_without_a_fault_has_none() -> None:
    assert faults_of([]) == []
    assert faults_of([event(0, "start"), event(9, "end")]) == []


def test_each_is_where_it_happened_with_what_was_done() -> None:
    died = {"what": "died (SIGKILL)", "step": 3}
    found = faults_of(
        [
            event(1000, "start"),
            event(1018, action="failed", worker="engine-0", **died),
            event(1020, action="restarted", worker="engine-0", seconds=2.0, requests=7, **died),
            event(1060, action="fewer ranks", worker="policy-1", ranks=1),
            event(1070, action="restarted", worker="policy-1", seconds=10.0, restored=2, again=1, **died),
            event(1100, action="gave up", worker="policy-0", reason="5 restarts are spent", **died),
        ]
    )
    assert [each.done for each in found] == [
        "restarted in 2.0 s, 7 requests re-issued",
        "training goes on with ranks=1",
        "restarted in 10.0 s, state of 2 steps, 1 trained again",
        "5 restarts are spent",
    ]
    assert [(round(each.left, 1), round(each.width, 1)) for each in found] == [
        (18.0, 2.0), (60.0, 0.4), (60.0, 10.0), (99.6, 0.4)
    ]  # fmt: skip
    assert [each.healed for each in found] == [True, True, True, False]
    assert found[0].what == "engine-0 died (SIGKILL) in step 4"
