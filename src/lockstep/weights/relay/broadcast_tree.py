"""One version on its way to several nodes: a tree of transfers; a node that has the version passes it on.

What each transfer's end says about sender and receiver decides which nodes are left behind.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.base.bounded_wait import WaitTimeout
from lockstep.base.text import first_line
from lockstep.cluster.protocol import PendingResult, RemoteError, Worker, WorkerDied
from lockstep.watch.agent.agent_client import AgentError
from lockstep.weights.errors import LinkFailed
from lockstep.weights.relay.api import ReceiveResult, RelayAPI, RelayLink, SendProgress
from lockstep.weights.relay.relay_manager import RelayNode

TransferOutcome = Literal["done", "sender", "refused", "receiver"]
"""How it ended: well, or which side is to be left out. A sender that refused is alive, and has said why."""

SENDER_ANSWER_S = 5.0
"""A sender that does not say within this time how far it is, once its receiver has failed or stands still, is at fault
itself."""
_PERMANENT = ("plan_mismatch", "no_room_for_weights", "stale_weights_generation")


def is_permanent(error: Exception) -> bool:
    """Whether a courier's error is one that no second try would mend."""
    return isinstance(error, RemoteError) and error.code in _PERMANENT


@dataclass(slots=True)
class RelayTransfer:
    """A transfer under way; `look` tells how it ended."""

    source: RelayNode
    target: RelayNode
    link: RelayLink
    sender: Worker
    """The courier that sends: its node may have another by the time this ends."""
    receiver: Worker
    receiving: PendingResult[ReceiveResult]
    bytes: int = 0
    summed: int = 0
    received: ReceiveResult | None = None
    problem: str = ""
    _asked: PendingResult[SendProgress] | None = None
    _asked_at: float = 0.0
    _failed_at: float | None = field(default=None)

    @classmethod
    def begin(
        cls, source: RelayNode, target: RelayNode, version: int, ranks: list[int], number: int
    ) -> "RelayTransfer":
        """Tells both couriers."""
        link = RelayLink(number, source.info.name, target.info.name)
        sender, receiver = source.call(), target.call()
        sender.submit(RelayAPI.send, version, ranks, link)
        receiving = receiver.submit(RelayAPI.receive, version, ranks, link)
        return cls(source, target, link, sender, receiver, receiving)

    @property
    def progress(self) -> object:
        """Changes as long as bytes travel, or the receiver does something with them."""
        return self.bytes, self.summed, self.receiver.moves

    def silent_s(self) -> float:
        """How long the sender has owed an answer; one that has ended gives none."""
        if not self.sender.alive():
            return math.inf
        return time.monotonic() - self._asked_at if self._asked is not None and not self._asked.done() else 0.0

    def superseded(self) -> bool:
        """Whether the sender's node has another courier by now."""
        return self.source.courier is not self.sender

    def look(self) -> TransferOutcome | None:
        """None while it is under way. Raises RemoteError for what no other try would mend."""
        if self._failed_at is None and self.receiving.done():
            try:
                self.received = self.receiving.result(why=self.link.name)
            except WorkerDied as error:
                self.problem = first_line(error)
                return "receiver"
            except RemoteError as error:
                if is_permanent(error):
                    raise
                self.problem, self._failed_at = error.message, time.monotonic()
            else:
                return "done"
        return self._judge()

    def _judge(self) -> TransferOutcome | None:
        """By what the sender says."""
        if self._asked is None:
            self._asked, self._asked_at = self.sender.submit(RelayAPI.sent, self.link.number), time.monotonic()
        asked = self._asked
        if asked.done():
            self._asked = None
            try:
                sent = asked.result(why=self.link.name)
            except WorkerDied as error:
                self.problem = first_line(error)
                return "sender" if self.receiving.done() else None  # it will notice
            self.bytes, self.summed = sent.bytes, sent.summed
            if sent.outcome and not sent.outcome.startswith(LinkFailed.__name__):
                self.problem = sent.outcome  # the sender's own; what the receiver says of it is an effect
                return "refused" if self.receiving.done() else None  # it will notice
            if sent.outcome or self._failed_at is not None:
                self.problem = self.problem or sent.outcome or "it failed"
                return "receiver"
        elif self._failed_at is not None and time.monotonic() - self._failed_at > SENDER_ANSWER_S:
            self.problem = f"{self.sender.spec.name} does not answer"
            return "sender"
        return None


log = logging.getLogger(__name__)

FANOUT = 2
"""Nodes that one courier sends to at the same time."""
MAX_SENDER_FAILURES = 5
"""How often senders may fail in one round."""

RELAY_ERRORS = (RemoteError, WorkerDied, WaitTimeout, LinkFailed, AgentError)
"""What getting a courier ready, or asking it, fails with."""

RelayReady = Callable[[RelayNode], bool]
BeginTransfer = Callable[[RelayNode, RelayNode, int, list[int]], RelayTransfer]
OnTransferDone = Callable[[RelayTransfer, int], None]


class BroadcastTree:
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
        self, version: int, missing: Sequence[RelayNode], holders: Sequence[RelayNode], ranks: list[int], ready: RelayReady,
        begin: BeginTransfer, arrived: OnTransferDone, limit_s: float, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._version, self._ranks, self._limit_s, self._clock = version, ranks, limit_s, clock
        self._ready, self._begin, self._arrived = ready, begin, arrived
        self._waiting = list(missing)
        self._holders = list(holders)
        self._running: list[RelayTransfer] = []
        self._failures = self._ended = 0
        self._moved_at = clock()
        """When anything moved last."""
        self._last: dict[str, tuple[object, float]] = {}
        """By target: its transfer's progress, and when that changed."""
        self.behind: list[RelayNode] = []
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

    def _overdue(self, transfer: RelayTransfer) -> tuple[TransferOutcome | None, bool]:
        """Whose fault it is that nothing moves for the target of a transfer, and whether the target's time is over."""
        name, now = transfer.target.info.name, self._clock()
        progress, moved_at = self._last[name]
        if transfer.progress != progress:
            self._last[name], self._moved_at = (transfer.progress, now), now
            return None, False
        still_s, half_s = now - moved_at, self._limit_s / 2
        late = still_s > self._limit_s
        if still_s > half_s and transfer.silent_s() > (min(SENDER_ANSWER_S, half_s) if late else half_s):
            transfer.problem = f"{transfer.sender.spec.name} does not answer"
            return "sender", late
        transfer.problem = f"nothing has moved for {self._limit_s:g} s" if late else transfer.problem
        return ("receiver" if late else None), late

    def _start(self, target: RelayNode) -> None:
        """Begins a transfer to a node, where it and one that has the version can."""
        source = self._sender()
        if source is None:
            return
        try:
            if not self._ready(target):
                return
            transfer = self._begin(source, target, self._version, self._ranks)
        except RELAY_ERRORS as error:
            if is_permanent(error):
                raise
            self._tell(f"{target.info.name}: no courier: {error}")
            self._waiting.remove(target)
            self.behind.append(target)
            return
        self._waiting.remove(target)
        _, moved_at = self._last.get(target.info.name, (None, 0.0))
        self._last[target.info.name] = transfer.progress, max(moved_at, self._moved_at)
        self._running.append(transfer)

    def _sender(self) -> RelayNode | None:
        """The holder that sends to fewest, of those that can send to one more."""
        load = dict.fromkeys(self._holders, 0)
        for transfer in self._running:
            load[transfer.source] = load.get(transfer.source, 0) + 1
        for source in sorted(self._holders, key=lambda node: load[node]):
            try:
                if load[source] < FANOUT and self._ready(source):
                    return source
            except RELAY_ERRORS as error:
                if is_permanent(error):
                    raise
                self._tell(f"{source.info.name}: no courier: {error}")
                self._holders.remove(source)
        return None

    def _settle(self, transfer: RelayTransfer, verdict: TransferOutcome, late: bool) -> None:
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

    def _without(self, source: RelayNode, target: RelayNode, again: bool) -> None:
        """A sender has failed: the target gets it from another, or from this one's next courier."""
        self._failures += 1
        if len(self._holders) > 1 and source in self._holders:
            self._holders.remove(source)
        (self._waiting if again and self._failures < MAX_SENDER_FAILURES else self.behind).append(target)

    def _tell(self, problem: str) -> None:
        self.problem = problem
        log.warning("%s", problem)
