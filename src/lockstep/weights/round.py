"""A version on its way to several nodes: who sends to whom, and who is left behind."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from lockstep.cluster.protocol import RemoteError, WorkerDied
from lockstep.watch.agent_client import AgentError
from lockstep.watch.waits import WaitTimeout
from lockstep.weights.errors import LinkFailed
from lockstep.weights.transfer import FINAL, Node, Transfer

log = logging.getLogger(__name__)

FANOUT = 2
"""Nodes that one courier sends to at the same time."""
TRIES = 5
"""How often senders may fail in one round."""

Begin = Callable[[Node, Node, int, list[int]], Transfer]
Arrived = Callable[[Transfer, int], None]


class Round:
    """Brings what `ranks` wrote of a version to the nodes that miss it. Who has it passes it on, so that a round to n
    nodes takes about log(n) transfers one after the other.

    Args:
        begin: starts a transfer from a node to another; sees to it that both have couriers.
        arrived: told of every one that ended well.
    """

    def __init__(
        self, version: int, missing: Sequence[Node], holders: Sequence[Node], ranks: list[int], begin: Begin,
        arrived: Arrived,
    ) -> None:  # fmt: skip
        self._version, self._ranks, self._begin, self._arrived = version, ranks, begin, arrived
        self._waiting = deque(missing)
        self._holders = list(holders)
        self._running: list[Transfer] = []
        self._failures = self._ended = 0
        self.behind: list[Node] = []

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
        for transfer in self._running:
            transfer.target.stuck = True
            self.behind.append(transfer.target)
        self.behind += self._waiting
        self._running.clear()
        self._waiting.clear()

    def _start(self, source: Node, target: Node) -> None:
        try:
            self._running.append(self._begin(source, target, self._version, self._ranks))
        except (RemoteError, WorkerDied, WaitTimeout, LinkFailed, AgentError) as error:
            if isinstance(error, RemoteError) and error.kind.rpartition(".")[2] in FINAL:
                raise
            log.warning("%s: no courier: %s", target.info.name, error)
            self.behind.append(target)

    def _settle(self, transfer: Transfer, verdict: str) -> None:
        self._ended += 1
        source, target = transfer.source, transfer.target
        if verdict == "done":
            self._arrived(transfer, self._version)
            if transfer.received is not None and transfer.received.whole:
                self._holders.append(target)
            return
        log.warning("%s failed: %s", transfer.link.name, transfer.problem)
        if verdict == "receiver":
            target.stuck = not transfer.receiving.done()
            self.behind.append(target)
            return
        self._failures += 1
        source.stuck = True
        if len(self._holders) > 1 and source in self._holders:
            self._holders.remove(source)
        (self._waiting if self._failures < TRIES else self.behind).append(target)

    def _freest(self) -> Node | None:
        """The holder that sends to fewest."""
        load = {id(node): 0 for node in self._holders}
        for transfer in self._running:
            load[id(transfer.source)] = load.get(id(transfer.source), 0) + 1
        best = min(self._holders, key=lambda node: load[id(node)])
        return best if load[id(best)] < FANOUT else None
