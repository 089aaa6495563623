"""Broadcasts a version to several nodes as a tree of transfers: nodes that have the version send it to others.

The outcome of each transfer, which says whether the sender or the receiver failed, decides which nodes are given up.
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
"""How a transfer ended: successfully, or which side failed. A sender that refused is alive and gave a reason."""

SENDER_ANSWER_S = 5.0
"""If a receiver has failed or stalled, the sender must report its progress within this time, or counts as failed
itself."""
_PERMANENT = ("plan_mismatch", "no_room_for_weights", "stale_weights_generation")


def is_permanent(error: Exception) -> bool:
    """Returns whether a relay's error would recur at every retry."""
    return isinstance(error, RemoteError) and error.code in _PERMANENT


@dataclass(slots=True)
class RelayTransfer:
    """A transfer between two relays."""

    source: RelayNode
    target: RelayNode
    link: RelayLink
    sender: Worker
    """The relay that sends. Its node may have a new relay when this transfer ends."""
    receiver: Worker
    receiving: PendingResult[ReceiveResult]
    bytes: int = 0
    summed: int = 0
    received: ReceiveResult | None = None
    problem: str = ""
    _pending_poll: PendingResult[SendProgress] | None = None
    _poll_sent_at: float = 0.0
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
        """A value that changes while bytes are sent, received or processed."""
        return self.bytes, self.summed, self.receiver.progress_count

    def silent_s(self) -> float:
        """Returns for how many seconds the sender has not answered; infinite if it has ended."""
        if not self.sender.alive():
            return math.inf
        return (
            time.monotonic() - self._poll_sent_at
            if self._pending_poll is not None and not self._pending_poll.done()
            else 0.0
        )

    def superseded(self) -> bool:
        """Returns whether another relay has replaced the sender."""
        return self.source.relay is not self.sender

    def poll(self) -> TransferOutcome | None:
        """Returns how the transfer ended, or None while it runs. Raises RemoteError for a permanent error."""
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
        """Determines the outcome from the sender's report.

        A receiver notices a broken connection before the controller learns that its sender has died. So the receiver is
        blamed only by a report that was asked for after its failure: an earlier one may be the last of a dead sender.
        """
        if self._pending_poll is not None and self._failed_at is not None and self._poll_sent_at < self._failed_at:
            self._pending_poll = None
        if self._pending_poll is None:
            self._pending_poll, self._poll_sent_at = (
                self.sender.submit(RelayAPI.sent, self.link.number),
                time.monotonic(),
            )
        pending = self._pending_poll
        if pending.done():
            self._pending_poll = None
            try:
                sent = pending.result(why=self.link.name)
            except WorkerDied as error:
                self.problem = first_line(error)
                return "sender" if self.receiving.done() else None  # the receiver will notice
            self.bytes, self.summed = sent.bytes, sent.summed
            if sent.outcome and not sent.outcome.startswith(LinkFailed.__name__):
                self.problem = sent.outcome  # this is the cause, and the receiver's error is its effect
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
"""Number of nodes to which one relay sends at the same time."""
MAX_SENDER_FAILURES = 5
"""Number of sender failures that one broadcast tolerates."""

RELAY_ERRORS = (RemoteError, WorkerDied, WaitTimeout, LinkFailed, AgentError)
"""Errors of starting or calling a relay."""

RelayReady = Callable[[RelayNode], bool]
BeginTransfer = Callable[[RelayNode, RelayNode, int, list[int]], RelayTransfer]
OnTransferDone = Callable[[RelayTransfer, int], None]


class BroadcastTree:
    """Broadcasts the parts of `ranks` of a version to nodes that lack it. Nodes that have it send it to others, so that
    a broadcast to n nodes takes about log(n) transfers in sequence.

    A node is given up (`behind`) if its transfer makes no progress for `limit_s`, whichever side is at fault. A sender
    that does not answer for half of that time is replaced, so that there is time for another one.

    Args:
        ready: returns whether a node has a relay and, if not, starts one. Does not wait.
        begin: starts a transfer from one node to another.
        arrived: is called after every successful transfer.
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
        self._transfers: list[RelayTransfer] = []
        self._failures = self._ended = 0
        self._progress_at = clock()
        """When any transfer last made progress."""
        self._target_progress: dict[str, tuple[object, float]] = {}
        """Progress of the transfer to each target, and when it last changed."""
        self.behind: list[RelayNode] = []
        self.problem = ""
        """Description of the latest failure."""

    def poll(self) -> bool | None:
        """Advances all transfers. Returns True when every node has the version or was given up, else None."""
        for transfer in list(self._transfers):
            verdict, late = transfer.poll(), False
            if verdict is None:
                verdict, late = self._check_stalled(transfer)
            if verdict is not None:
                self._transfers.remove(transfer)
                self._finish_transfer(transfer, verdict, late)
        for target in list(self._waiting):
            self._start(target)
        stalled = self._clock() - self._progress_at > self._limit_s
        if self._waiting and not self._transfers and (stalled or not self._holders):
            self.give_up(f"no progress for {self._limit_s:g} s" if stalled else self.problem)
        return None if self._transfers or self._waiting else True

    def progress(self) -> object:
        """Returns a value that changes while a transfer makes progress."""
        return self._ended, len(self._waiting), [transfer.progress for transfer in self._transfers]

    def give_up(self, why: str) -> None:
        """Gives up all unfinished nodes and marks the relays with running transfers as stuck."""
        self.problem = why
        for transfer in self._transfers:
            transfer.target.stuck = True
            self.behind.append(transfer.target)
        self.behind += self._waiting
        self._transfers.clear()
        self._waiting.clear()

    def _check_stalled(self, transfer: RelayTransfer) -> tuple[TransferOutcome | None, bool]:
        """Returns which side is at fault if a transfer stalls (else None), and whether the target's time is over."""
        name, now = transfer.target.info.name, self._clock()
        progress, progress_at = self._target_progress[name]
        if transfer.progress != progress:
            self._target_progress[name], self._progress_at = (transfer.progress, now), now
            return None, False
        stalled_s, half_s = now - progress_at, self._limit_s / 2
        late = stalled_s > self._limit_s
        if stalled_s > half_s and transfer.silent_s() > (min(SENDER_ANSWER_S, half_s) if late else half_s):
            transfer.problem = f"{transfer.sender.spec.name} does not answer"
            return "sender", late
        transfer.problem = f"no progress for {self._limit_s:g} s" if late else transfer.problem
        return ("receiver" if late else None), late

    def _start(self, target: RelayNode) -> None:
        """Starts a transfer to a node if its relay and that of a node with the version are ready."""
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
        _, progress_at = self._target_progress.get(target.info.name, (None, 0.0))
        self._target_progress[target.info.name] = transfer.progress, max(progress_at, self._progress_at)
        self._transfers.append(transfer)

    def _sender(self) -> RelayNode | None:
        """Returns, of the nodes that have the version and can send to one more node, the one with the fewest
        transfers."""
        load = dict.fromkeys(self._holders, 0)
        for transfer in self._transfers:
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
        """Handles the end of a transfer. `late`: the target's time is over, whichever side is at fault."""
        self._ended += 1
        source, target = transfer.source, transfer.target
        if verdict == "done":
            self._progress_at = self._clock()
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
            self._replace_sender(source, target, retry=len(self._holders) > 1)
            return
        if (
            not transfer.superseded()
        ):  # otherwise another transfer reported the failure already, and the relay was replaced
            source.stuck = True
        if late:
            self.behind.append(target)
        elif transfer.superseded():
            self._waiting.append(target)
        else:
            self._replace_sender(source, target, retry=True)

    def _replace_sender(self, source: RelayNode, target: RelayNode, retry: bool) -> None:
        """After a sender failed: queues the target again, for another sender or the new relay of this one."""
        self._failures += 1
        if len(self._holders) > 1 and source in self._holders:
            self._holders.remove(source)
        (self._waiting if retry and self._failures < MAX_SENDER_FAILURES else self.behind).append(target)

    def _report(self, problem: str) -> None:
        self.problem = problem
        log.warning("%s", problem)
