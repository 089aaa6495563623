"""A node's courier: keeps the node's store of weights, sends versions to other nodes and takes them from there.

Bytes go from one node's shared memory into that of another: into the buffer that is not current, where they are held
against the checksums of the ranks that wrote them, and only then become the current version.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from torch._C._distributed_c10d import Store

from lockstep.cluster.protocol import concurrent
from lockstep.watch import beacon, waits
from lockstep.weights import gloo_link, meeting
from lockstep.weights.api import CourierAPI, Link, Received, Sent
from lockstep.weights.buckets import Bucket, Check, Mark
from lockstep.weights.errors import LinkFailed, NoStore, StaleVersion, TornWeights
from lockstep.weights.fence import Lineage, readers
from lockstep.weights.file_link import FileInlet, FileOutlet, tidy
from lockstep.weights.gloo_link import GlooLink
from lockstep.weights.interface import use_interface
from lockstep.weights.layout import remove
from lockstep.weights.links import Inlet, Outlet
from lockstep.weights.meeting import Card
from lockstep.weights.parcels import Parcel, changed, digest, parcels, size
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
    kept: list[str]
    """Digests of the others, in their order."""
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
        self._summing: set[tuple[int, int, tuple[int, ...]]] = set()
        """Whose digests somebody is at."""
        self._summed = 0
        self._doubted = False
        """Whether what this node has is not what the sender has, though it should be."""
        self._lock = threading.Lock()
        """Of digests; nothing is waited for with it."""
        if way == "gloo":
            use_interface(address)
            gloo_link.prepare(f"gen{generation}/weights")

    def create(self, folder: str, plan: str, writers: int) -> int | None:
        self.close()
        if self._way == "files":
            tidy(self._shared_folder, self.generation, self.node)
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
    def readers(self) -> list[Lineage]:
        return [] if self._opened is None else readers(self._opened)

    @concurrent
    def sent(self, number: int) -> Sent:
        return self._sent.get(number, Sent())

    def receive(self, version: int, ranks: list[int], link: Link) -> Received:
        if beacon.current().stage_name != "receive":  # a stage that is told again would pass for progress
            beacon.current().stage("receive")
        began, store = time.monotonic(), self._store
        whole = len(ranks) == store.control.writers
        newest = store.control.newest()
        base = newest if self._delta and whole and not self._doubted else None
        card = Card(store.plan.digest) if base is None else Card(store.plan.digest, base.generation, base.version)
        with store.filling(version, ranks) as filling:
            meeting.meet_sender(self._meeting, link, store.plan, card, self._limit_s / 2)
            inlet = self._inlet(link)
            try:
                header = self._expected(Header.decode(inlet.header()), version, ranks, link)
                cut = parcels(store.plan, header.marks, header.limit)
                wanted = [cut[position] for position in header.which]
                self._keep(store, cut, header, filling.memory)
                inlet.receive(wanted, filling.memory, self._count)
            finally:
                inlet.close()
            filling.keep(header.marks, self._check)
        self._doubted = False
        meeting.forget(self._meeting, link)
        sent, total = sum(map(size, wanted)), sum(map(size, cut))
        return Received(sent, total, time.monotonic() - began, whole)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
            if self._way == "files":
                tidy(self._shared_folder, self.generation, self.node)
                with contextlib.suppress(OSError):  # others have files there
                    self._shared_folder.rmdir()

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
        cut = parcels(store.plan, held.marks, self._bucket_bytes)

        def look() -> None:
            newest = store.control.newest()
            if newest is not None and newest.generation == self.generation and newest.version > version:
                raise StaleVersion(version, newest.version)  # the trainer wants this buffer

        now = self._sum_up(cut, held, (self.generation, version, tuple(ranks)), link, look) if self._delta else []
        card = meeting.meet_receiver(self._meeting, link, store.plan, self._limit_s)
        before = self._digests.get((card.generation, -1 if card.version is None else card.version, tuple(ranks)))
        which = changed(before, now) if self._delta else list(range(len(cut)))
        kept = [each.hex() for position, each in enumerate(now) if position not in set(which)]
        header = Header(version, self.generation, self._bucket_bytes, which, kept, list(held.marks))
        outlet = self._outlet(link)

        def moved(count: int) -> None:
            self._count(count)
            sent = self.sent(link.number)
            self._sent[link.number] = replace(sent, bytes=sent.bytes + count)
            look()

        try:
            outlet.send(header.encode(), [cut[position] for position in which], held.memory, moved)
        finally:
            outlet.close()

    def _sum_up(
        self, cut: Sequence[Parcel], held: Held, key: tuple[int, int, tuple[int, ...]], link: Link,
        look: Callable[[], None],
    ) -> list[bytes]:  # fmt: skip
        """Digests of all parcels, made once for all receivers; they are told that it goes on."""

        def going_on() -> object:
            self._sent[link.number] = replace(self.sent(link.number), summed=self._summed)
            meeting.busy(self._meeting, link, self._summed)
            return self._summed

        def made() -> bool | None:
            with self._lock:
                if key in self._digests or key not in self._summing:
                    self._summing.add(key)
                    return True
                return None

        waits.poll(
            made, kind="event", whom=f"courier of {self.node}", why="digests of the version", stall_s=self._limit_s,
            progress=going_on,
        )  # fmt: skip
        try:
            found = list(self._digests.get(key, []))
            for parcel in cut[len(found) :]:
                found.append(digest(parcel, held.memory))
                self._summed += size(parcel)
                going_on()
                look()
        finally:
            self._summing.discard(key)
        with self._lock:
            self._digests[key] = found
            while len(self._digests) > KEPT:
                del self._digests[next(iter(self._digests))]
        return found

    def _expected(self, header: Header, version: int, ranks: Sequence[int], link: Link) -> Header:
        """Raises LinkFailed where something else comes than was asked for."""
        wanted = version, self.generation, list(ranks)
        found = header.version, header.generation, [mark.rank for mark in header.marks]
        if found != wanted:
            what = "version {} of generation {} by ranks {}"
            problem = f"{what.format(*found)} comes, {what.format(*wanted)} was asked for"
            raise LinkFailed(link.name, link.sender, problem)
        return header

    def _keep(self, store: SharedWeights, cut: Sequence[Parcel], header: Header, memory: memoryview) -> None:
        """Copies from the current version what does not come. Raises TornWeights where that is not what the sender has:
        then the next transfer brings everything."""
        coming = set(header.which)
        kept = [parcel for position, parcel in enumerate(cut) if position not in coming]
        if not kept:
            return
        with store.current() as current:
            for parcel, expected in zip(kept, header.kept, strict=True):
                for run in parcel:
                    memory[run.start : run.end] = current[run.start : run.end]
                    self._count(run.length)
                if digest(parcel, memory).hex() != expected:
                    self._doubted = True
                    start, length = parcel[0].start, size(parcel)
                    name = next(each.name for each in reversed(store.plan.entries) if each.offset <= start)
                    raise TornWeights(header.version, f"{name}, which was not sent", start, length)

    def _outlet(self, link: Link) -> Outlet:
        if self._way == "gloo":
            return GlooLink(self._meeting, link, True, self._limit_s)
        return FileOutlet(self._shared_folder, self.generation, link)

    def _inlet(self, link: Link) -> Inlet:
        if self._way == "gloo":
            return GlooLink(self._meeting, link, False, self._limit_s)
        return FileInlet(
            self._shared_folder, self.generation, link, self._limit_s / 2, lambda: meeting.refused(self._meeting, link)
        )

    @property
    def _shared_folder(self) -> Path:
        if self._folder is None:
            raise ValueError("weights.folder: the transport files needs a folder that all nodes see")
        return self._folder

    def _count(self, count: int) -> None:
        beacon.current().add("bytes", count)
