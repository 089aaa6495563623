"""The queue under a tight cache: every request is served, and admitted ones always fit."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.builtin.scheduler import DecodeRows, Scheduler
from lockstep.rollout.engine_protocol import Request

BUDGET = 12


@st.composite
def queues(draw: st.DrawFn) -> list[tuple[int, Request]]:
    """(step in which it arrives, request). Each request fits alone; requests of a group share a prompt."""
    prompts = draw(st.lists(st.integers(1, BUDGET - 1), min_size=1, max_size=4))
    found = []
    for number in range(draw(st.integers(1, 8))):
        group, priority = draw(st.integers(0, len(prompts) - 1)), draw(st.integers(0, 1))
        prompt, tokens = np.zeros(prompts[group], np.int32), draw(st.integers(1, BUDGET - prompts[group]))
        request = Request(str(number), f"g{group}", prompt, seed=0, max_tokens=tokens, priority=priority)
        found.append((draw(st.integers(0, 4)), request))
    return found


def reserved(rows: DecodeRows, scheduler: Scheduler) -> int:
    """Tokens of the cache that the running rows and their prompts may take."""
    longest = int(rows.limit[: len(rows)].max(initial=0))
    return len(rows) * longest + len(scheduler.groups) * max(
        (group.cached_tokens for group in scheduler.groups), default=0
    )


@settings(max_examples=150, deadline=None)
@given(queues(), st.integers(1, 4), st.sets(st.integers(0, 10)))
def test_whatever_fits_alone_is_served_within_the_cache(
    queue: list[tuple[int, Request]], capacity: int, published: set[int]
) -> None:
    scheduler, rows = Scheduler(BUDGET), DecodeRows(capacity)
    done: set[str] = set()
    version = 0
    for step in range(5 + sum(request.max_tokens for _, request in queue)):
        scheduler.add([request for at, request in queue if at == step])
        running = len(rows)
        new = scheduler.admit(rows, version)
        assert scheduler.groups[len(scheduler.groups) - len(new) :] == new
        assert len(rows) == running or reserved(rows, scheduler) <= BUDGET
        assert [scheduler.groups[slot].name for slot in rows.group_slot[: len(rows)]] == [
            r.group for r in rows.requests
        ]
        rows.counts[: len(rows)] += 1
        ended = [row for row in range(len(rows)) if rows.counts[row] == rows.limit[row]]
        done |= {rows.requests[row].id for row in ended}
        slots = rows.group_slot[ended].tolist()
        rows.remove(ended)
        scheduler.remove_groups(slots, rows, version)
        if step in published:
            version += 1
            scheduler.remove_groups((), rows, version)
    assert done == {request.id for _, request in queue}


def test_groups_without_waiting_requests_are_forgotten() -> None:
    scheduler, rows = Scheduler(None), DecodeRows(4)
    prompt = np.zeros(3, np.int32)
    scheduler.add([Request(f"r{number}", f"g{number}", prompt, seed=0, max_tokens=1) for number in range(4)])
    scheduler.admit(rows, version=0)
    assert not scheduler.waiting and not scheduler._waiting_in_group
