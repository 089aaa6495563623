"""The couriers of a link agree on the plan before bytes move, at the run's rendezvous store.

Keys are named by link and courier. The receiver tells who it is, its plan's digest and the version it has; the sender
answers with its consent, or with its own plan where the two do not fit.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Unpack

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lockstep.watch import waits
from lockstep.watch.waits import Bounds, WaitTimeout
from lockstep.weights.api import Link
from lockstep.weights.errors import LinkFailed, PlanMismatch
from lockstep.weights.plan import Plan

CONNECT_S = 60.0
EVERY_S = 0.002
"""How often it is looked at what a peer says."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a receiver tells of itself."""

    digest: str
    """Of its plan."""
    generation: int = 0
    """Of the version it has."""
    version: int | None = None
    """None where it has none that a transfer could build upon."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


def open_store(host: str, port: int, prefix: str) -> Store:
    """The run's store. Raises torch.distributed.DistStoreError."""
    with waits.waiting("store", f"{host}:{port}", "rendezvous store of the run", CONNECT_S):
        return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_S)))


def meet_receiver(store: Store, link: Link, plan: Plan, limit_s: float) -> Card:
    """The sender's part: who receives. Raises PlanMismatch, and LinkFailed where nobody came."""
    whom = f"courier of {link.receiver}"
    raw = word(store, f"{link.number}/receiver/{link.receiver}", link.name, link.receiver, whom, stall_s=limit_s)
    card = Card(**json.loads(raw))
    if card.digest == plan.digest:
        store.set(f"{link.number}/sender/{link.sender}", json.dumps({"digest": plan.digest}))
        return card
    store.set(f"{link.number}/sender/{link.sender}", json.dumps({"digest": plan.digest, "plan": plan.to_json()}))
    raise PlanMismatch(f"the courier of {link.receiver} has another one", plan.digest, card.digest)


def refuse(store: Store, link: Link, why: str) -> None:
    """The sender cannot send: tells the receiver, whether they have met or not, so that it does not wait."""
    store.set(f"{link.number}/refused", why)
    store.compare_set(f"{link.number}/sender/{link.sender}", "", json.dumps({"refused": why}))


def refused(store: Store, link: Link) -> str:
    """Why the sender does not go on; empty where it does."""
    return (_said(store, link, "refused") or b"").decode()


def busy(store: Store, link: Link, count: int) -> None:
    """The sender comes, and has got so far with what it does before."""
    store.set(f"{link.number}/busy", str(count))


def meet_sender(store: Store, link: Link, plan: Plan, card: Card, limit_s: float) -> None:
    """The receiver's part. Raises PlanMismatch, naming the first tensor that differs, and LinkFailed."""
    store.set(f"{link.number}/receiver/{link.receiver}", json.dumps(asdict(card)))
    raw = word(
        store, f"{link.number}/sender/{link.sender}", link.name, link.sender, f"courier of {link.sender}",
        stall_s=limit_s, progress=lambda: _said(store, link, "busy"),
    )  # fmt: skip
    answer = json.loads(raw)
    if "refused" in answer:
        raise LinkFailed(link.name, link.sender, answer["refused"])
    if "plan" in answer:
        Plan.from_json(answer["plan"]).check(plan)


def forget(store: Store, link: Link) -> None:
    """Removes the link's keys, and those by which gloo's two ends found each other."""
    for key in store.list_keys():
        if key.startswith(f"{link.number}/"):
            store.delete_key(key)


def word(store: Store, key: str, link: str, peer: str, whom: str | None = None, **bounds: Unpack[Bounds]) -> bytes:
    """What a peer says under that key; `whom` is the process that is to say it, where that has another name. Raises
    LinkFailed where it does not within the bounds."""
    try:
        return waits.store_get(store, key, whom=whom or peer, why=link, every_s=EVERY_S, **bounds)
    except WaitTimeout as error:
        raise LinkFailed(link, peer, f"{error} (key {key})") from error


def _said(store: Store, link: Link, what: str) -> bytes | None:
    """What the sender has said already, if it has."""
    key = f"{link.number}/{what}"
    if not store.check([key]):
        return None
    return waits.store_get(store, key, whom="the store", why=f"{link.name}: {what}", timeout_s=CONNECT_S)
