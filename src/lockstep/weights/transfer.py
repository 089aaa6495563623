"""One transfer between two nodes, watched by the controller."""

import math
import threading
import time
from dataclasses import dataclass, field
from typing import Literal

from lockstep.cluster.protocol import NodeInfo, Pending, RemoteError, Worker, WorkerDied
from lockstep.watch.errors import first_line
from lockstep.weights.api import CourierAPI, Link, Received, Sent
from lockstep.weights.errors import LinkFailed

Verdict = Literal["done", "sender", "refused", "receiver"]
"""How it ended: well, or which side is to be left out. A sender that refused is alive, and has said why."""

ANSWER_S = 5.0
"""A sender that does not say within this time how far it is, once its receiver has failed or stands still, is at fault
itself."""
_FINAL = ("plan_mismatch", "no_room_for_weights", "stale_weights_generation")


def final(error: Exception) -> bool:
    """Whether a courier's error is one that no second try would mend."""
    return isinstance(error, RemoteError) and error.code in _FINAL


@dataclass(slots=True)
class Hiring:
    """A node's courier on its way."""

    over: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Node:
    """A node that holds weights, as the controller knows it."""

    info: NodeInfo
    courier: Worker | None = None
    folder: str = ""
    """Of the store that its courier has open."""
    served: tuple[str, int] | None = None
    """The folder of the store with its newest version, and which."""
    claim: object | None = None
    """Whose it is to bring it weights, now."""
    urgent: bool = False
    """The trainer wants to write there: what else is under way ends."""
    hiring: Hiring | None = None
    behind: bool = False
    """Whether it was left behind when it was brought weights last."""
    stuck: bool = False
    """Its courier owes an answer that nobody waits for any more."""

    def call(self) -> Worker:
        """Its courier. Raises LinkFailed where there is none, as it is being replaced."""
        courier = self.courier
        if courier is None:
            raise LinkFailed(f"weights to {self.info.name}", self.info.name, "no courier runs there now")
        return courier

    @property
    def fit(self) -> bool:
        """Whether nothing is known against its courier; one that was never started is fit."""
        return self.courier is None or (self.courier.alive() and not self.stuck)

    @property
    def version(self) -> int | None:
        return None if self.served is None else self.served[1]


@dataclass(slots=True)
class Transfer:
    """A transfer under way; `look` tells how it ended."""

    source: Node
    target: Node
    link: Link
    sender: Worker
    """The courier that sends: its node may have another by the time this ends."""
    receiver: Worker
    receiving: Pending[Received]
    bytes: int = 0
    summed: int = 0
    received: Received | None = None
    problem: str = ""
    _asked: Pending[Sent] | None = None
    _asked_at: float = 0.0
    _failed_at: float | None = field(default=None)

    @classmethod
    def begin(cls, source: Node, target: Node, version: int, ranks: list[int], number: int) -> "Transfer":
        """Tells both couriers."""
        link = Link(number, source.info.name, target.info.name)
        sender, receiver = source.call(), target.call()
        sender.submit(CourierAPI.send, version, ranks, link)
        receiving = receiver.submit(CourierAPI.receive, version, ranks, link)
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

    def look(self) -> Verdict | None:
        """None while it is under way. Raises RemoteError for what no other try would mend."""
        if self._failed_at is None and self.receiving.done():
            try:
                self.received = self.receiving.result(why=self.link.name)
            except WorkerDied as error:
                self.problem = first_line(error)
                return "receiver"
            except RemoteError as error:
                if final(error):
                    raise
                self.problem, self._failed_at = error.message, time.monotonic()
            else:
                return "done"
        return self._judge()

    def _judge(self) -> Verdict | None:
        """By what the sender says."""
        if self._asked is None:
            self._asked, self._asked_at = self.sender.submit(CourierAPI.sent, self.link.number), time.monotonic()
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
        elif self._failed_at is not None and time.monotonic() - self._failed_at > ANSWER_S:
            self.problem = f"{self.sender.spec.name} does not answer"
            return "sender"
        return None
