"""The controller's end of a process that runs users' code: how long it may load, and what it said before it ended."""

import logging
from collections.abc import Callable
from typing import TypeVar

from lockstep.cluster.protocol import Pending, RemoteError, WorkerDied
from lockstep.watch.errors import Carried, first_line
from lockstep.watch.waits import Stalled, WaitTimeout

log = logging.getLogger(__name__)

R = TypeVar("R")

LOADING_S = 300.0
"""Longest time without progress for importing the users' modules, which may import anything."""
LAST_WORDS_S = 5.0
"""Within this time the cluster knows that a killed process is dead."""
NODES_LOST = 4
"""Nodes in a row that may go with the process of one call on them; that is nobody's fault who called."""


class NotLoaded(Carried):
    """The process ended, or had to be ended, while it loaded users' code."""

    def __init__(self, problem: str, log_tail: str) -> None:
        super().__init__(problem)
        self.problem, self.log_tail = problem, log_tail


def loaded(pending: Pending[R], what: str, name: str, kill: Callable[[], None]) -> R:
    """What the process `name` answers once it has loaded `what`.

    Args:
        kill: ends the process, where it makes no progress.

    Raises:
        NotLoaded: there is no process any more.
        WorkerDied: it only went with its node.
    """
    try:
        return pending.result(why=f"loading {what}", stall_s=LOADING_S)
    except Stalled as error:
        kill()
        problem = f"could not be loaded within {error.waited_s:.0f} s"
        raise NotLoaded(problem, last_words(pending, name)) from error
    except WorkerDied as error:
        if error.with_node:
            raise
        raise NotLoaded(f"its process {error.how} while loading", error.last_words) from error


def despite_lost_nodes(work: Callable[[], R], does: str) -> R:
    """What `work` gives; it is done again, in another process, where one only went with its node.

    Args:
        does: what the other one does in its place, for people.

    Raises:
        WorkerDied: it ended by itself, or went with its node again and again.
    """
    for _ in range(NODES_LOST - 1):
        try:
            return work()
        except WorkerDied as error:
            if not error.with_node:
                raise
            log.warning("%s; another %s in its place", first_line(error), does)
    return work()


def last_words(pending: Pending[object], name: str) -> str:
    """The end of the log of a process that was killed while it owed an answer: the stack of what it was in is there.
    Empty where it left none."""
    try:
        pending.result(why=f"the last words of {name}", stall_s=LAST_WORDS_S)
    except WorkerDied as error:
        return error.last_words
    except (WaitTimeout, RemoteError):
        log.warning("%s left no last words", name)
    return ""
