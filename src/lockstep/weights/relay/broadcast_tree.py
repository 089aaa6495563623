"""One version on its way to several nodes: a tree of transfers; a node that has the version passes it on.

What each transfer's end says about sender and receiver decides which nodes are left behind.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.base.text import first_line
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.protocol import PendingResult, RemoteError, Worker, WorkerDied
from lockstep.watch.agent.agent_client import AgentError
from lockstep.weights.errors import LinkFailed
from lockstep.weights.relay.relay_api import ReceiveResult, RelayAPI, RelayLink, SendProgress
from lockstep.weights.relay.relay_manager import RelayNode

TransferOutcome = Literal["done", "sender", "refused", "receiver"]
"""How it ended: successfully, or which side failed. A sender that refused is alive and gave its reason."""

SENDER_ANSWER_S = 5.0
"""A sender whose receiver has failed or stalled must report its progress within this time, or it is at fault itself."""
_PERMANENT = ("plan_mismatch", "no_room_for_weights", "stale_weights_generation")


def is_permanent(error: Exception) -> bool:
    """Whether a relay's error would recur at every retry."""
    return isinstance(error, RemoteError) and error.code in _PERMANENT


@dataclass(slots=True)
class RelayTransfer:
    """A running transfer; `poll` returns how it ended."""

    source: RelayNode
    target: RelayNode
    link: RelayLink
    sender: Worker
    """The relay that sends; its node may have a new one by the time this transfer ends."""
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
        """Starts the transfer on both relays."""
        link = RelayLink(number, source.info.name, target.info.name)
        sender, receiver = source.require_relay(), target.require_relay()
        sender.submit(RelayAPI.send, version, ranks, link)
        receiving = receiver.submit(RelayAPI.receive, version, ranks, link)
        return cls(source, target, link, sender, receiver, receiving)

    @property
    def progress(self) -> object:
        """Changes while bytes move or the receiver processes them."""
        return self.bytes, self.summed, self.receiver.moves

    def silent_s(self) -> float:
        """Seconds for which the sender has not answered; infinite once it has ended."""
        if not self.sender.alive():
            return math.inf
        return time.monotonic() - self._asked_at if self._asked is not None and not self._asked.done() else 0.0

    def superseded(self) -> bool:
        """Whether another relay has replaced the sender."""
        return self.source.relay is not self.sender

    def poll(self) -> TransferOutcome | None:
        """None while it runs. Raises RemoteError for a permanent error."""
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
        return self._poll_sender()

    def _poll_sender(self) -> TransferOutcome | None:
        """The outcome by the sender's report."""
        if self._asked is None:
            self._asked, self._asked_at = self.sender.submit(RelayAPI.sent, self.link.number), time.monotonic()
        asked = self._asked
        if asked.done():
            self._asked = None
            try:
                sent = asked.result(why=self.link.name)
            except WorkerDied as error:
                self.problem = first_line(error)
                return "sender" if self.receiving.done() else None  # the receiver will notice
            self.bytes, self.summed = sent.bytes, sent.summed
            if sent.outcome and not sent.outcome.startswith(LinkFailed.__name__):
                self.problem = sent.outcome  # the cause; the receiver's error is only its effect
                return "refused" if self.receiving.done() else None  # the receiver will notice
            if sent.outcome or self._failed_at is not None:
                self.problem = self.problem or sent.outcome or "it failed"
                return "receiver"
        elif self._failed_at is not None and time.monotonic() - self._failed_at > SENDER_ANSWER_S:
            self.problem = f"{self.sender.spec.name} does not answer"
            return "sender"
        return None


log = logging.getLogger(__name__)

FANOUT = 2
"""Nodes that one relay sends to at once."""
MAX_SENDER_FAILURES = 5
"""Failures of senders that one broadcast tolerates."""

RELAY_ERRORS = (RemoteError, WorkerDied, WaitTimeout, LinkFailed, AgentError)
"""Errors of starting or calling a relay."""

RelayReady = Callable[[RelayNode], bool]
BeginTransfer = Callable[[RelayNode, RelayNode, int, list[int]], RelayTransfer]
OnTransferDone = Callable[[RelayTransfer, int], None]


class BroadcastTree:
    """Brings what `ranks` wrote of a version to the nodes that lack it. Every node that has it sends it on, so a
    broadcast to n nodes takes about log(n) transfers in sequence.

    A node is left behind if none of its bytes move for `limit_s`, whichever side is at fault. A sender that is silent
    for half of that is replaced, which leaves time for another.

    Args:
        ready: returns whether a node has a relay and, if not, starts one. Does not wait.
        begin: starts a transfer from one node to another.
        arrived: called after every successful transfer.
    """

    def __init__(
        self, version: int, missing: Sequence[RelayNode], holders: Sequence[RelayNode], ranks: list[int],
        ready: RelayReady, begin: BeginTransfer, arrived: OnTransferDone, limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._version, self._ranks, self._limit_s, self._clock = version, ranks, limit_s, clock
        self._ready, self._begin, self._arrived = ready, begin, arrived
        self._waiting = list(missing)
        self._holders = list(holders)
        self._running: list[RelayTransfer] = []
        self._failures = self._ended = 0
        self._moved_at = clock()
        """When any byte moved last."""
        self._last: dict[str, tuple[object, float]] = {}
        """By target: its transfer's progress, and when it changed last."""
        self.behind: list[RelayNode] = []
        self.problem = ""
        """The latest problem."""

    def poll(self) -> bool | None:
        """Advances all transfers; true once every node has the version or is left behind."""
        for transfer in list(self._running):
            verdict, late = transfer.poll(), False
            if verdict is None:
                verdict, late = self._check_stalled(transfer)
            if verdict is not None:
                self._running.remove(transfer)
                self._finish_transfer(transfer, verdict, late)
        for target in list(self._waiting):
            self._start(target)
        still = self._clock() - self._moved_at > self._limit_s
        if self._waiting and not self._running and (still or not self._holders):
            self.give_up(f"no progress for {self._limit_s:g} s" if still else self.problem)
        return None if self._running or self._waiting else True

    def progress(self) -> object:
        """Changes while bytes move."""
        return self._ended, len(self._waiting), [transfer.progress for transfer in self._running]

    def give_up(self, why: str) -> None:
        """Leaves all unfinished nodes behind; their relays are not expected to answer."""
        self.problem = why
        for transfer in self._running:
            transfer.target.stuck = True
            self.behind.append(transfer.target)
        self.behind += self._waiting
        self._running.clear()
        self._waiting.clear()

    def _check_stalled(self, transfer: RelayTransfer) -> tuple[TransferOutcome | None, bool]:
        """Which side is at fault if a transfer stalls, and whether the target's time is over."""
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
        transfer.problem = f"no progress for {self._limit_s:g} s" if late else transfer.problem
        return ("receiver" if late else None), late

    def _start(self, target: RelayNode) -> None:
        """Starts a transfer to a node if it and a holder of the version are ready."""
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
            self._report(f"{target.info.name}: its relay is not available: {error}")
            self._waiting.remove(target)
            self.behind.append(target)
            return
        self._waiting.remove(target)
        _, moved_at = self._last.get(target.info.name, (None, 0.0))
        self._last[target.info.name] = transfer.progress, max(moved_at, self._moved_at)
        self._running.append(transfer)

    def _sender(self) -> RelayNode | None:
        """The holder with the fewest transfers, of those that can take one more."""
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
                self._report(f"{source.info.name}: its relay is not available: {error}")
                self._holders.remove(source)
        return None

    def _finish_transfer(self, transfer: RelayTransfer, verdict: TransferOutcome, late: bool) -> None:
        """`late`: the target's time is over, whichever side is at fault."""
        self._ended += 1
        source, target = transfer.source, transfer.target
        if verdict == "done":
            self._moved_at = self._clock()
            self._arrived(transfer, self._version)
            if transfer.received is not None and transfer.received.whole:
                self._holders.append(target)
            return
        self._report(f"{transfer.link.name} failed: {transfer.problem}")
        if verdict == "receiver":
            target.stuck = not transfer.receiving.done()
            self.behind.append(target)
            return
        if verdict == "refused":  # the same relay would refuse again
            self._replace_sender(source, target, again=len(self._holders) > 1)
            return
        if not transfer.superseded():  # otherwise another receiver saw the failure, and the relay was replaced
            source.stuck = True
        if late:
            self.behind.append(target)
        elif transfer.superseded():
            self._waiting.append(target)
        else:
            self._replace_sender(source, target, again=True)

    def _replace_sender(self, source: RelayNode, target: RelayNode, again: bool) -> None:
        """A sender has failed: the target gets the version from another node, or from this node's next relay."""
        self._failures += 1
        if len(self._holders) > 1 and source in self._holders:
            self._holders.remove(source)
        (self._waiting if again and self._failures < MAX_SENDER_FAILURES else self.behind).append(target)

    def _report(self, problem: str) -> None:
        self.problem = problem
        log.warning("%s", problem)
