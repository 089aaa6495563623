"""Before ranks make their communicators, each writes that it is there; who is missing is told meanwhile.

A communicator's own rendezvous says only that somebody did not come. Here rank 0 looks at one key for each rank in the
store, tells every second whose are not there, and writes one word for all: that they are complete, or who is missing.
Its wait names them as well, which the controller, who waits for it, shows to people.
"""

import json
import logging
import socket
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from lockstep.watch import waits
from lockstep.watch.naming import some

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0
LOOK_EVERY_S = 0.05
WORD_S = 10.0
"""So much later than rank 0, the others stop waiting for its word."""
_SHOWN = 8
_FEW = 4
"""So many names fit a beacon."""


class RanksMissing(RuntimeError):
    """Ranks that did not come to the rendezvous: which, of how many."""

    def __init__(self, missing: Sequence[str], world: int, after_s: float) -> None:
        super().__init__(
            f"{some(missing, _SHOWN)} of {world} ranks did not come to the rendezvous within {after_s:g} s: look for "
            "the end of those in their logs, and whether their nodes reach the store"
        )
        self.missing, self.world, self.after_s = tuple(missing), world, after_s


def meet(store: Store, rank: int, world: int, names: Sequence[str], bound_s: float) -> None:
    """Returns when all ranks are there.

    Args:
        store: of this meeting alone; rank r's key in it is `joined/r`, with its host.
        names: of all ranks, for people: `policy-3 on node-b`.

    Raises:
        RanksMissing: on every rank that came, with the same names.
    """
    store.set(f"joined/{rank}", json.dumps({"host": socket.gethostname()}))
    if rank == 0:
        _gather(store, world, names, bound_s)
        return
    try:
        word = waits.store_get(
            store, "over", whom=_short(names[:1]), why="all ranks are there", every_s=LOOK_EVERY_S,
            timeout_s=bound_s + WORD_S,
        )  # fmt: skip
        missing = json.loads(word)
    except waits.WaitTimeout:
        missing = _absent(store, range(world))  # rank 0 is one of them, or has ended
    if missing:
        raise RanksMissing([names[each] for each in missing], world, bound_s)


def _gather(store: Store, world: int, names: Sequence[str], bound_s: float) -> None:
    """What rank 0 does."""
    missing, told = list(range(world)), time.monotonic()

    def complete() -> bool | None:
        nonlocal missing, told
        missing = [] if store.check([f"joined/{each}" for each in missing]) else _absent(store, missing)
        waits.still_for(_short(_of(names, missing)))
        if missing and time.monotonic() - told >= TELL_EVERY_S:
            told = time.monotonic()
            log.warning(
                "%d of %d ranks are there, missing: %s", world - len(missing), world, some(_of(names, missing), _SHOWN)
            )
        return None if missing else True

    try:
        waits.poll(
            complete, kind="rendezvous", whom=_short(names), why="all ranks are there", every_s=LOOK_EVERY_S,
            timeout_s=bound_s,
        )  # fmt: skip
    except waits.WaitTimeout as error:
        store.set("over", json.dumps(missing))
        raise RanksMissing(_of(names, missing), world, bound_s) from error
    store.set("over", "[]")


def _absent(store: Store, ranks: Sequence[int]) -> list[int]:
    return [each for each in ranks if not store.check([f"joined/{each}"])]


def _of(names: Sequence[str], ranks: Sequence[int]) -> list[str]:
    return [names[each] for each in ranks]


def _short(names: Sequence[str]) -> str:
    """As waits name processes: without their nodes, by which who watches knows them."""
    return some(names, _FEW, lambda name: name.partition(" on ")[0])
