"""Letting go of ranks that wait for somebody who will not come: the observer's side of `freeing`."""

from collections.abc import Collection, Iterable
from typing import Any

from lockstep.watch import freeing, orders
from lockstep.watch.records import BeaconState, CommunicatorRecord


def release(
    run: str,
    ranks: Iterable[BeaconState],
    text: str,
    verdict: dict[str, Any] | None = None,
    communicators: Collection[int] | None = None,
) -> dict[str, int]:
    """Ends what these ranks of this host are blocked in; their calls raise CollectiveStalled with `text`.

    The verdict is given first, then the connections are broken from outside, which needs no answer of the rank. A rank
    that may not be looked into, and one with NCCL, is asked to do it itself. All members of a communicator have to be
    released, those on other hosts too: one alone frees only those who happen to wait for it.

    Args:
        communicators: identities of those to break (`CommunicatorRecord.identity`); None for all that are not closed.
        verdict: its JSON form.

    Returns:
        By beacon's name how many connections were broken from here.
    """
    states = {state.name: state for state in ranks}
    orders.give(run, "verdict", states, text=text, verdict=verdict or {})
    return {
        name: _break(run, state, [each for each in state.communicators if _wanted(each, communicators)])
        for name, state in states.items()
    }


def _wanted(record: CommunicatorRecord, communicators: Collection[int] | None) -> bool:
    return not record.closed and (communicators is None or record.identity in communicators)


def _break(run: str, state: BeaconState, lines: list[CommunicatorRecord]) -> int:
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
