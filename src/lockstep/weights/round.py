"""A version on its way to several nodes: who sends to whom, and who is left behind."""

import logging
import time
from collections.abc import Callable, Sequence

from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.watch.agent_client import AgentError
from lockstep.watch.waits import WaitTimeout
from lockstep.weights.errors import LinkFailed
from lockstep.weights.transfer import ANSWER_S, Node, Transfer, Verdict, final

log = logging.getLogger(__name__)

FANOUT = 2
"""Nodes that one courier sends to at the same time."""
TRIES = 5
"""How often senders may fail in one round."""

FAILED = (RemoteError, WorkerDied, WaitTimeout, LinkFailed, AgentError)
"""What getting a courier ready, or asking it, fails with."""

Ready = Callable[[Node], bool]
Begin = Callable[[Node, Node, int, list[int]], Transfer]
Arrived = Callable[[Transfer, int], None]


class Round:
    """Brings what `ranks` wrote of a version to the nodes that miss it. Who has it passes it on, so that a round to n
    nodes takes about log(n) transfers one after the other.

    A node for which nothing has moved for `limit_s` is left behind, whoever is to blame. A sender that says nothing for
    half of that is replaced, so that there is time left for another.

    Args:
        ready: whether a node has a courier; where not, that is begun. Does not wait.
        begin: starts a transfer from a node to another.
        arrived: told of every one that ended well.
    """

    def __init__(
        self, version: int, missing: Sequence[Node], holders: Sequence[Node], ranks: list[int], ready: Ready,
        begin: Begin, arrived: Arrived, limit_s: float, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._version, self._ranks, self._limit_s, self._clock = version, ranks, limit_s, clock
        self._ready, self._begin, self._arrived = ready, begin, arrived
        self._waiting = list(missing)
        self._holders = list(holders)
        self._running: list[Transfer] = []
        self._failures = self._ended = 0
        self._moved_at = clock()
        """When anything moved last."""
        self._last: dict[str, tuple[object, float]] = {}
        """By target: its transfer's progress, and when that changed."""
        self.behind: list[Node] = []
        self.problem = ""
        """What went wrong last."""

    def look(self) -> bool | None:
        """One look at everything; true once all nodes have it or are left behind."""
        for transfer in list(self._running):
            verdict, late = transfer.look(), False
            if verdict is None:
                verdict, late = self._overdue(transfer)
            if verdict is not None:
                self._running.remove(transfer)
                self._settle(transfer, verdict, late)
        for target in list(self._waiting):
            self._start(target)
        still = self._clock() - self._moved_at > self._limit_s
        if self._waiting and not self._running and (still or not self._holders):
            self.give_up(f"nothing has moved for {self._limit_s:g} s" if still else self.problem)
        return None if self._running or self._waiting else True

    def progress(self) -> object:
        """Changes as long as bytes move."""
        return self._ended, len(self._waiting), [transfer.progress for transfer in self._running]

    def give_up(self, why: str) -> None:
        """Whoever is not done is left behind, and is not expected to answer."""
        self.problem = why
        for transfer in self._running:
            transfer.target.stuck = True
            self.behind.append(transfer.target)
        self.behind += self._waiting
        self._running.clear()
        self._waiting.clear()

    def _overdue(self, transfer: Transfer) -> tuple[Verdict | None, bool]:
        """Whose fault it is that nothing moves for the target of a transfer, and whether the target's time is over."""
        name, now = transfer.target.info.name, self._clock()
        progress, moved_at = self._last[name]
        if transfer.progress != progress:
            self._last[name], self._moved_at = (transfer.progress, now), now
            return None, False
        still_s, half_s = now - moved_at, self._limit_s / 2
        late = still_s > self._limit_s
        if still_s > half_s and transfer.silent_s() > (min(ANSWER_S, half_s) if late else half_s):
            transfer.problem = f"{transfer.sender.spec.name} does not answer"
            return "sender", late
        transfer.problem = f"nothing has moved for {self._limit_s:g} s" if late else transfer.problem
        return ("receiver" if late else None), late

    def _start(self, target: Node) -> None:
        """Begins a transfer to a node, where it and one that has the version can."""
        source = self._sender()
        if source is None:
            return
        try:
            if not self._ready(target):
                return
            transfer = self._begin(source, target, self._version, self._ranks)
        except FAILED as error:
            if final(error):
                raise
            self._tell(f"{target.info.name}: no courier: {error}")
            self._waiting.remove(target)
            self.behind.append(target)
            return
        self._waiting.remove(target)
        _, moved_at = self._last.get(target.info.name, (None, 0.0))
        self._last[target.info.name] = transfer.progress, max(moved_at, self._moved_at)
        self._running.append(transfer)

    def _sender(self) -> Node | None:
        """The holder that sends to fewest, of those that can send to one more."""
        load = dict.fromkeys(self._holders, 0)
        for transfer in self._running:
            load[transfer.source] = load.get(transfer.source, 0) + 1
        for source in sorted(self._holders, key=lambda node: load[node]):
            try:
                if load[source] < FANOUT and self._ready(source):
                    return source
            except FAILED as error:
                if final(error):
                    raise
                self._tell(f"{source.info.name}: no courier: {error}")
                self._holders.remove(source)
        return None

    def _settle(self, transfer: Transfer, verdict: Verdict, late: bool) -> None:
        """`late`: it is over for the target, whoever is to blame."""
        self._ended += 1
        source, target = transfer.source, transfer.target
        if verdict == "done":
            self._moved_at = self._clock()
            self._arrived(transfer, self._version)
            if transfer.received is not None and transfer.received.whole:
                self._holders.append(target)
            return
        self._tell(f"{transfer.link.name} failed: {transfer.problem}")
        if verdict == "receiver":
            target.stuck = not transfer.receiving.done()
            self.behind.append(target)
            return
        if verdict == "refused":  # the same courier would say the same
            self._without(source, target, again=len(self._holders) > 1)
            return
        if not transfer.superseded():  # else its failure was seen by another receiver, and mended
            source.stuck = True
        if late:
            self.behind.append(target)
        elif transfer.superseded():
            self._waiting.append(target)
        else:
            self._without(source, target, again=True)

    def _without(self, source: Node, target: Node, again: bool) -> None:
        """A sender has failed: the target gets it from another, or from this one's next courier."""
        self._failures += 1
        if len(self._holders) > 1 and source in self._holders:
            self._holders.remove(source)
        (self._waiting if again and self._failures < TRIES else self.behind).append(target)

    def _tell(self, problem: str) -> None:
        self.problem = problem
        log.warning("%s", problem)
