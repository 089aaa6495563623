"""What a run does within a step, as its beacons say: it moves while the controller itself waits."""

from lockstep.report.console import Activity
from lockstep.report.top import duration
from lockstep.watch import state
from lockstep.watch.state import CounterRow, Row

_TELL_WAIT_S = 2.0


def beacon_activity(run: str, controller: str = "controller") -> Activity:
    """Progress of whoever moved last, summed over its role, and the controller's longest wait."""
    return activity_of(state.rows(state.take_reading(run)), controller)


def activity_of(rows: list[Row], controller: str = "controller") -> Activity:
    """Pure part of `beacon_activity`. `controller` is the role of the process that waits for all others."""
    waiting = ""
    for row in rows:
        if row.role == controller and row.waits and row.waits[0].stalled_s >= _TELL_WAIT_S:
            wait = row.waits[0]
            waiting = f"{wait.whom} ({wait.kind}) for {duration(wait.since_s)}: {wait.why}"
    moving = [
        (counter.still_s, row.role, counter)
        for row in rows
        if row.alive
        for counter in row.counters
        if counter.total is not None and 0 < counter.value < counter.total
    ]
    if not moving:
        return Activity(waiting=waiting)
    _, role, latest = min(moving, key=lambda entry: entry[0])
    same = [one for row in rows if row.role == role and row.alive for one in row.counters if one.name == latest.name]
    return Activity(sum(one.value for one in same), _total(same), latest.name, waiting)


def _total(counters: list[CounterRow]) -> int | None:
    totals = [counter.total for counter in counters if counter.total is not None]
    return sum(totals) if len(totals) == len(counters) else None
