"""Letting go of ranks that wait for somebody who will not come: the observer's side of `freeing`."""

from collections.abc import Iterable
from typing import Any

from lockstep.watch import freeing, orders
from lockstep.watch.records import BeaconState, CommunicatorRecord


def release(run: str, ranks: Iterable[BeaconState], text: str, verdict: dict[str, Any] | None = None) -> dict[str, int]:
    """Ends what these ranks of this host are blocked in; their calls raise CollectiveStalled with `text`.

    The verdict is given first, then the connections of the communicators that they are inside of are broken from
    outside, which needs no answer of the rank. A rank that may not be looked into, and one with NCCL, is asked to do it
    itself. All members of a communicator have to be released, those on other hosts too: one alone frees only those who
    happen to wait for it.

    Args:
        verdict: its JSON form.

    Returns:
        How many connections were broken from here, by beacon's name, for those that were inside of a collective.
    """
    states = {state.name: state for state in ranks}
    orders.give(run, "verdict", states, text=text, verdict=verdict or {}, freed=True)
    return {name: _break(run, state) for name, state in states.items() if _inside(state)}


def tell(run: str, names: Iterable[str], text: str, verdict: dict[str, Any] | None = None) -> None:
    """Gives these ranks the verdict for a collective that breaks by itself, as one does when a member of it dies."""
    orders.give(run, "verdict", names, text=text, verdict=verdict or {}, freed=False)


def _inside(state: BeaconState) -> list[CommunicatorRecord]:
    return [each for each in state.communicators if not each.closed and each.entered > each.completed]


def _break(run: str, state: BeaconState) -> int:
    lines = _inside(state)
    threads = [each.loop_thread for each in lines if each.loop_thread]
    asked = [each for each in lines if "nccl" in each.backend or not each.loop_thread]
    broken = 0
    try:
        broken = freeing.break_gloo(state.pid, threads) if threads else 0
    except PermissionError:
        asked = lines
    except ProcessLookupError:
        return 0
    for each in asked:
        orders.give(run, "free", [state.name], communicator=f"{each.identity:016x}")
    return broken
