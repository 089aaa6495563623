"""A version on its way to several nodes: who sends to whom, and who is left behind."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.watch.agent_client import AgentError
from lockstep.watch.waits import WaitTimeout
from lockstep.weights.errors import LinkFailed
from lockstep.weights.transfer import Node, Transfer, Verdict, final

log = logging.getLogger(__name__)

FANOUT = 2
"""Nodes that one courier sends to at the same time."""
TRIES = 5
"""How often senders may fail in one round."""

FAILED = (RemoteError, WorkerDied, WaitTimeout, LinkFailed, AgentError)
"""What getting a courier ready, or asking it, fails with."""

Ready = Callable[[Node], None]
Begin = Callable[[Node, Node, int, list[int]], Transfer]
Arrived = Callable[[Transfer, int], None]


class Round:
    """Brings what `ranks` wrote of a version to the nodes that miss it. Who has it passes it on, so that a round to n
    nodes takes about log(n) transfers one after the other.

    Args:
        ready: sees to it that a node has a courier.
        begin: starts a transfer from a node to another.
        arrived: told of every one that ended well.
    """

    def __init__(
        self, version: int, missing: Sequence[Node], holders: Sequence[Node], ranks: list[int], ready: Ready,
        begin: Begin, arrived: Arrived,
    ) -> None:  # fmt: skip
        self._version, self._ranks = version, ranks
        self._ready, self._begin, self._arrived = ready, begin, arrived
        self._waiting = deque(missing)
        self._holders = list(holders)
        self._running: list[Transfer] = []
        self._failures = self._ended = 0
        self.behind: list[Node] = []
        self.problem = ""
        """What went wrong last."""

    def look(self) -> bool | None:
        """One look at everything; true once all nodes have it or are left behind."""
        for transfer in list(self._running):
            verdict = transfer.look()
            if verdict is not None:
                self._running.remove(transfer)
                self._settle(transfer, verdict)
        while self._waiting and (source := self._freest()) is not None:
            self._start(source, self._waiting.popleft())
        return None if self._running or self._waiting else True

    def progress(self) -> object:
        """Changes as long as bytes move."""
        return self._ended, len(self._waiting), [transfer.bytes for transfer in self._running]

    def give_up(self) -> None:
        """Nothing moves: whoever is not done is left behind, and is not expected to answer."""
        self.problem = "nothing moves"
        for transfer in self._running:
            transfer.target.stuck = True
            self.behind.append(transfer.target)
        self.behind += self._waiting
        self._running.clear()
        self._waiting.clear()

    def _start(self, source: Node, target: Node) -> None:
        try:
            self._ready(source)
        except FAILED as error:
            if final(error):
                raise
            self._tell(f"{source.info.name}: no courier: {error}")
            self._without(source, target, again=len(self._holders) > 1)
            return
        try:
            self._ready(target)
            self._running.append(self._begin(source, target, self._version, self._ranks))
        except FAILED as error:
            if final(error):
                raise
            self._tell(f"{target.info.name}: no courier: {error}")
            self.behind.append(target)

    def _settle(self, transfer: Transfer, verdict: Verdict) -> None:
        self._ended += 1
        source, target = transfer.source, transfer.target
        if verdict == "done":
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
        elif transfer.superseded():  # its failure was seen by another receiver, and mended
            self._waiting.append(target)
        else:
            source.stuck = True
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

    def _freest(self) -> Node | None:
        """The holder that sends to fewest."""
        load = {id(node): 0 for node in self._holders}
        for transfer in self._running:
            load[id(transfer.source)] = load.get(id(transfer.source), 0) + 1
        best = min(self._holders, key=lambda node: load[id(node)])
        return best if load[id(best)] < FANOUT else None
