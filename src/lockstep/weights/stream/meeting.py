"""The two sides of a channel agree before bytes move, at the run's rendezvous store.

Every receiver leaves a card under its name: the digest of what it expects. The sender waits for all of them, and tells
who is missing or expects something else; only then does anybody enter a communicator.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from torch._C._distributed_c10d import Store

from lockstep.weights.errors import LinkFailed, PlanMismatch
from lockstep.weights.meeting import word
from lockstep.weights.stream.channel import Channel


@dataclass(frozen=True, slots=True)
class Card:
    """What a receiver tells of itself."""

    agreement: str
    device: str
    """What its device is known by on the whole host, such as a GPU's UUID."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def present(store: Store, channel: Channel, name: str, card: Card) -> None:
    """A receiver's part: shows its card, and waits until the sender has those of all.

    Raises:
        PlanMismatch: they do not mean the same.
        LinkFailed: the sender did not come, or refuses; names who is missing.
    """
    store.set(f"{channel.number}/card/{name}", json.dumps(asdict(card)))
    answer = json.loads(
        word(store, f"{channel.number}/answer", channel.name, "the trainer", timeout_s=2 * channel.limit_s)
    )
    if answer["agreement"] != card.agreement:
        raise PlanMismatch("the trainer has another plan, or other buckets", answer["agreement"], card.agreement)
    if answer["problem"]:
        raise LinkFailed(channel.name, "the trainer", answer["problem"])


def convene(store: Store, channel: Channel, agreement: str, answers: bool) -> dict[str, Card]:
    """The sender's part: the cards of all receivers, by name.

    Args:
        answers: whether this rank tells the receivers (one of the trainer's ranks does).

    Raises:
        LinkFailed: some did not come, or expect something else.
    """
    cards: dict[str, Card] = {}
    until = time.monotonic() + channel.limit_s
    missing = []
    for name in channel.members:
        try:
            left_s = max(0.01, until - time.monotonic())
            raw = word(store, f"{channel.number}/card/{name}", channel.name, name, timeout_s=left_s)
            cards[name] = Card(**json.loads(raw))
        except LinkFailed:
            missing.append(name)
    problem = f"no word of {', '.join(missing)} within {channel.limit_s:g} s" if missing else ""
    others = [name for name, card in cards.items() if card.agreement != agreement]
    if others and not problem:
        problem = f"{', '.join(others)} expect other tensors, types or buckets"
    if answers:
        forget(store, channel.number - 1)  # who was late for the last one is to find its answer
        store.set(f"{channel.number}/answer", json.dumps({"agreement": agreement, "problem": problem}))
    if problem:
        raise LinkFailed(channel.name, ", ".join(missing or others), problem)
    return cards


def forget(store: Store, below: int) -> None:
    """Removes all keys of channels of lower numbers."""
    for key in store.list_keys():
        number = key.partition("/")[0]
        if number.isdigit() and int(number) < below:
            store.delete_key(key)


def same_device(cards: Mapping[str, Card], device: str) -> list[str]:
    """Names of those on this device of this host."""
    here = socket.gethostname()
    return [name for name, card in cards.items() if (card.host, card.device) == (here, device)]
