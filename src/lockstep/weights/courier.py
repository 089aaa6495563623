"""A node's courier: keeps the node's store of weights, sends versions to other nodes and takes them from there.

Bytes go from one node's shared memory into that of another: into the buffer that is not current, where they are held
against the checksums of the ranks that wrote them, and only then become the current version.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from torch._C._distributed_c10d import Store

from lockstep.cluster.protocol import concurrent
from lockstep.watch import beacon
from lockstep.weights import gloo_link, meeting
from lockstep.weights.api import CourierAPI, Link, Received, Sent
from lockstep.weights.buckets import Bucket, Check, Mark
from lockstep.weights.errors import NoStore, StaleVersion
from lockstep.weights.file_link import FileInlet, FileOutlet
from lockstep.weights.gloo_link import GlooLink
from lockstep.weights.interface import use_interface
from lockstep.weights.layout import remove
from lockstep.weights.links import Inlet, Outlet
from lockstep.weights.meeting import Card
from lockstep.weights.parcels import Parcel, changed, digests, parcels, size
from lockstep.weights.parts import Held
from lockstep.weights.plan import Plan
from lockstep.weights.shared import SharedWeights

log = logging.getLogger(__name__)

KEPT = 4
"""Versions whose digests a sender remembers."""

REMEMBERED = 1000
"""Links whose outcome a sender remembers."""

Way = Literal["gloo", "files"]


@dataclass(frozen=True, slots=True)
class Header:
    """What comes before the parcels."""

    version: int
    generation: int
    limit: int
    """Bytes of a parcel, at most: receiver and sender cut alike."""
    which: list[int]
    """Positions of the parcels that follow; the receiver has the others."""
    marks: list[Mark]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> "Header":
        found = json.loads(body)
        marks = [
            Mark(**{**mark, "buckets": tuple(Bucket(**each) for each in mark["buckets"])})
            for mark in found.pop("marks")
        ]
        return cls(**found, marks=marks)


class Courier(CourierAPI):
    """One per node.

    Args:
        node: its name.
        address: where other nodes reach it.
        generation: of the run.
        way: `gloo`, or `files` in `folder`, which all nodes see.
        store_host, store_port: of the run's rendezvous store.
        bucket_bytes: of a parcel, at most.
        check: of what was received, against the checksums of those who wrote it.
        delta: whether only parcels travel that have changed.
        limit_s: how long a peer may make no progress.
    """

    def __init__(
        self,
        node: str,
        address: str,
        generation: int,
        way: Way,
        store_host: str,
        store_port: int,
        bucket_bytes: int = 64 << 20,
        check: Check = "sampled",
        delta: bool = False,
        limit_s: float = 60.0,
        folder: str | None = None,
    ) -> None:
        self.node, self.generation, self._way, self._limit_s = node, generation, way, limit_s
        self._bucket_bytes, self._check, self._delta = bucket_bytes, check, delta
        self._folder = None if folder is None else Path(folder)
        self._meeting: Store = meeting.open_store(store_host, store_port, f"gen{generation}/weights")
        self._opened: SharedWeights | None = None
        self._sent: dict[int, Sent] = {}
        self._digests: dict[tuple[int, int, tuple[int, ...]], list[bytes]] = {}
        self._digesting = threading.Lock()
        self._moved = 0
        if way == "gloo":
            use_interface(address)
            gloo_link.prepare(f"gen{generation}/weights")

    def create(self, folder: str, plan: str, writers: int) -> int | None:
        self.close()
        self._opened = SharedWeights.create(Path(folder), Plan.from_json(plan), writers, self.generation)
        return self._opened.version()

    def commit(self, version: int) -> None:
        self._store.commit(version)

    def version(self) -> int | None:
        return self._store.version()

    def discard(self, folder: str) -> None:
        remove(Path(folder))

    def send(self, version: int, ranks: list[int], link: Link) -> None:
        work = self._store, version, ranks, link
        threading.Thread(target=self._send, args=work, name=link.name, daemon=True).start()

    @concurrent
    def sent(self, number: int) -> Sent:
        return self._sent.get(number, Sent())

    def receive(self, version: int, ranks: list[int], link: Link) -> Received:
        beacon.current().stage("receive")
        began, store = time.monotonic(), self._store
        whole = len(ranks) == store.control.writers
        newest = store.control.newest()
        base = newest if self._delta and whole else None
        card = Card(store.plan.digest) if base is None else Card(store.plan.digest, base.generation, base.version)
        with store.filling(version, ranks) as filling:
            meeting.meet_sender(self._meeting, link, store.plan, card, self._limit_s)
            inlet = self._inlet(link)
            try:
                header = Header.decode(inlet.header())
                cut = parcels(store.plan, header.marks, header.limit)
                wanted = [cut[position] for position in header.which]
                self._keep(store, cut, set(header.which), filling.memory)
                inlet.receive(wanted, filling.memory, self._count)
            finally:
                inlet.close()
            filling.keep(header.marks, self._check)
        meeting.forget(self._meeting, link)
        sent, total = sum(map(size, wanted)), sum(map(size, cut))
        return Received(sent, total, time.monotonic() - began, whole)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _store(self) -> SharedWeights:
        if self._opened is None:
            raise NoStore(Path(self.node), "no store is open on this node; call create() first")
        return self._opened

    def _send(self, store: SharedWeights, version: int, ranks: list[int], link: Link) -> None:
        """In a thread of its own."""
        try:
            with store.sending(version, ranks) as held:
                self._hand_over(store, held, version, ranks, link)
        except Exception as error:  # noqa: BLE001 - the controller asks for it
            log.warning("%s: %s", link.name, error)
            outcome = f"{type(error).__name__}: {error}"
            self._ended(link, outcome)
            meeting.refuse(self._meeting, link, outcome)
        else:
            self._ended(link, "")

    def _ended(self, link: Link, outcome: str) -> None:
        for number in [each for each in list(self._sent) if each < link.number - REMEMBERED]:
            self._sent.pop(number, None)
        self._sent[link.number] = replace(self.sent(link.number), outcome=outcome)

    def _hand_over(self, store: SharedWeights, held: Held, version: int, ranks: Sequence[int], link: Link) -> None:
        card = meeting.meet_receiver(self._meeting, link, store.plan, self._limit_s)
        cut = parcels(store.plan, held.marks, self._bucket_bytes)
        which = self._changed(cut, held, version, tuple(ranks), card)
        header = Header(version, self.generation, self._bucket_bytes, which, list(held.marks))
        outlet = self._outlet(link)

        def moved(count: int) -> None:
            self._count(count)
            self._sent[link.number] = Sent(self.sent(link.number).bytes + count)
            newest = store.control.newest()
            if newest is not None and newest.generation == self.generation and newest.version > version:
                raise StaleVersion(version, newest.version)  # the trainer wants this buffer

        try:
            outlet.send(header.encode(), [cut[position] for position in which], held.memory, moved)
        finally:
            outlet.close()

    def _changed(
        self, cut: Sequence[Parcel], held: Held, version: int, ranks: tuple[int, ...], card: Card
    ) -> list[int]:
        """Positions of the parcels that the receiver does not have."""
        if not self._delta:
            return changed(None, [b""] * len(cut))
        key = self.generation, version, ranks
        with self._digesting:
            if key not in self._digests:
                self._digests[key] = digests(cut, held.memory)
                while len(self._digests) > KEPT:
                    del self._digests[next(iter(self._digests))]
            before = None if card.version is None else self._digests.get((card.generation, card.version, ranks))
            return changed(before, self._digests[key])

    def _keep(self, store: SharedWeights, cut: Sequence[Parcel], coming: set[int], memory: memoryview) -> None:
        """Copies from the current version what does not come."""
        kept = [parcel for position, parcel in enumerate(cut) if position not in coming]
        if kept:
            with store.current() as current:
                for parcel in kept:
                    for run in parcel:
                        memory[run.start : run.end] = current[run.start : run.end]
                        self._count(run.length)

    def _outlet(self, link: Link) -> Outlet:
        if self._way == "gloo":
            return GlooLink(self._meeting, link, True, self._limit_s)
        return FileOutlet(self._shared_folder, link)

    def _inlet(self, link: Link) -> Inlet:
        if self._way == "gloo":
            return GlooLink(self._meeting, link, False, self._limit_s)
        return FileInlet(self._shared_folder, link, self._limit_s)

    @property
    def _shared_folder(self) -> Path:
        if self._folder is None:
            raise ValueError("weights.folder: the transport files needs a folder that all nodes see")
        return self._folder

    def _count(self, count: int) -> None:
        self._moved += count
        beacon.current().progress("bytes", self._moved)
