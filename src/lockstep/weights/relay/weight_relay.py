"""The relay of a node: keeps the node's weight store, sends versions to other nodes and receives them.

Bytes are transferred from the shared memory of one node into the spare buffer of another. There they are verified by
the checksums of the ranks that wrote them, before they become the current version.
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

from lockstep.base import waits
from lockstep.cluster.protocol import concurrent
from lockstep.watch.beacon.writer import current_beacon
from lockstep.weights.distributed_setup import (
    connect_store,
    init_default_group,
    store_link_errors,
    use_gloo_interface,
)
from lockstep.weights.errors import LinkFailed, NoStore, StaleVersion, TornWeights
from lockstep.weights.relay import link_protocol
from lockstep.weights.relay.link_protocol import (
    Chunk,
    RelayReceiverInfo,
    changed_chunks,
    chunk_bytes,
    chunk_digest,
    cut_chunks,
)
from lockstep.weights.relay.relay_api import ReceiveResult, RelayAPI, RelayLink, SendProgress
from lockstep.weights.relay.relay_links import (
    FileLinkReceiver,
    FileLinkSender,
    GlooLink,
    LinkReceiver,
    LinkSender,
    delete_stale_files,
)
from lockstep.weights.shared_memory_transport import ProcessLineage, spare_buffer_readers
from lockstep.weights.store_files import remove_store
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore
from lockstep.weights.write_records import ChecksumBlock, ChecksumMode, OutgoingVersion, WriteRecord

log = logging.getLogger(__name__)

KEPT_DIGESTS = 4
"""Number of versions whose digests a sender keeps."""

KEPT_OUTCOMES = 1000
"""Number of links whose outcome a sender keeps."""

LinkBackend = Literal["gloo", "files"]


@dataclass(frozen=True, slots=True)
class TransferHeader:
    """The header of a transfer, which is sent before the chunks."""

    version: int
    generation: int
    limit: int
    """Largest chunk in bytes; the receiver cuts chunks with the same limit."""
    which: list[int]
    """Positions of the chunks that are sent; the receiver has the others already."""
    kept: list[str]
    """Digests of the chunks that are not sent, in order."""
    records: list[WriteRecord]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> "TransferHeader":
        found = json.loads(body)
        records = [
            WriteRecord(**{**record, "blocks": tuple(ChecksumBlock(**each) for each in record["blocks"])})
            for record in found.pop("records")
        ]
        return cls(**found, records=records)


class WeightRelay(RelayAPI):
    """Keeps a node's weight store, sends versions to other nodes and receives them.

    Args:
        node: name of the node.
        address: address at which other nodes reach it.
        generation: generation of the run.
        way: `gloo`, or `files` in `folder`, which all nodes share.
        store: URL of the run's rendezvous store. Each transfer connects to it, so that none is lost with a store that
            was replaced.
        bucket_bytes: size of the largest chunk.
        check: how to verify received bytes by the checksums of their writers.
        delta: whether to send only chunks that have changed.
        limit_s: how long a peer may make no progress.
    """

    def __init__(
        self,
        node: str,
        address: str,
        generation: int,
        way: LinkBackend,
        store: str,
        bucket_bytes: int = 64 << 20,
        check: ChecksumMode = "sampled",
        delta: bool = False,
        limit_s: float = 60.0,
        folder: str | None = None,
    ) -> None:
        self.node, self.generation, self._way, self._limit_s = node, generation, way, limit_s
        self._bucket_bytes, self._check, self._delta = bucket_bytes, check, delta
        self._folder = None if folder is None else Path(folder)
        self._store_url = store
        self._open_store: WeightStore | None = None
        self._sent: dict[int, SendProgress] = {}
        self._digests: dict[tuple[int, int, tuple[int, ...]], list[bytes]] = {}
        self._digests_in_progress: set[tuple[int, int, tuple[int, ...]]] = set()
        """Versions whose digests a thread is computing."""
        self._digested_bytes = 0
        self._base_differs = False
        """Whether unsent chunks of this node's version differed from the sender's, so that the next transfer must send
        all."""
        self._lock = threading.Lock()
        """Guards the digests. Never held during a wait."""
        if way == "gloo":
            use_gloo_interface(address)
            init_default_group(f"gen{generation}/weights")

    def create(self, folder: str, plan: str, writers: int) -> int | None:
        self.close()
        if self._way == "files":
            delete_stale_files(self._shared_folder, self.generation, self.node)
        self._open_store = WeightStore.create(Path(folder), WeightPlan.from_json(plan), writers, self.generation)
        return self._open_store.version()

    def commit(self, version: int) -> None:
        self._store.commit(version)

    def version(self) -> int | None:
        return self._store.version()

    def discard(self, folder: str) -> None:
        remove_store(Path(folder))

    def send(self, version: int, ranks: list[int], link: RelayLink) -> None:
        work = self._store, version, ranks, link
        threading.Thread(target=self._send, args=work, name=link.name, daemon=True).start()

    @concurrent
    def readers(self) -> list[ProcessLineage]:
        return [] if self._open_store is None else spare_buffer_readers(self._open_store)

    @concurrent
    def sent(self, number: int) -> SendProgress:
        return self._sent.get(number, SendProgress())

    def receive(self, version: int, ranks: list[int], link: RelayLink) -> ReceiveResult:
        if current_beacon().stage_name != "receive":  # setting a stage again would count as progress
            current_beacon().stage("receive")
        began, store = time.monotonic(), self._store
        all_ranks = len(ranks) == store.control.writers
        newest = store.control.newest()
        base = newest if self._delta and all_ranks and not self._base_differs else None
        info = (
            RelayReceiverInfo(store.plan.digest)
            if base is None
            else RelayReceiverInfo(store.plan.digest, base.generation, base.version)
        )
        with store_link_errors(self._store_url, link.name), store.filling(version, ranks) as filling:
            keys = self._connect(link)
            link_protocol.handshake_with_sender(keys, link, store.plan, info, self._limit_s / 2)
            receiver = self._open_receiver(keys, link)
            try:
                header = self._check_header(TransferHeader.decode(receiver.receive_header()), version, ranks, link)
                chunks = cut_chunks(store.plan, header.records, header.limit)
                wanted = [chunks[position] for position in header.which]
                self._copy_unsent(store, chunks, header, filling.memory)
                receiver.receive(wanted, filling.memory, self._count)
            finally:
                receiver.close()
            filling.keep(header.records, self._check)
        self._base_differs = False
        with contextlib.suppress(LinkFailed), store_link_errors(self._store_url, link.name):
            link_protocol.delete_link_keys(keys, link)
        sent, total = sum(map(chunk_bytes, wanted)), sum(map(chunk_bytes, chunks))
        return ReceiveResult(sent, total, time.monotonic() - began, all_ranks)

    def close(self) -> None:
        if self._open_store is not None:
            self._open_store.close()
            self._open_store = None
            if self._way == "files":
                delete_stale_files(self._shared_folder, self.generation, self.node)
                with contextlib.suppress(OSError):  # other nodes have files there
                    self._shared_folder.rmdir()

    @property
    def _store(self) -> WeightStore:
        if self._open_store is None:
            raise NoStore(Path(self.node), "no store is open on this node; call create() first")
        return self._open_store

    def _send(self, store: WeightStore, version: int, ranks: list[int], link: RelayLink) -> None:
        """Sends a version, in a thread per link."""
        keys = None
        try:
            with store_link_errors(self._store_url, link.name), store.sending(version, ranks) as held:
                keys = self._connect(link)
                self._send_version(keys, store, held, version, ranks, link)
        except Exception as error:  # noqa: BLE001 - the controller polls the outcome
            log.warning("%s: %s", link.name, error)
            outcome = f"{type(error).__name__}: {error}"
            self._record_outcome(link, outcome)
            with contextlib.suppress(LinkFailed), store_link_errors(self._store_url, link.name):
                link_protocol.refuse_transfer(keys or self._connect(link), link, outcome)
        else:
            self._record_outcome(link, "")

    def _record_outcome(self, link: RelayLink, outcome: str) -> None:
        for number in [each for each in list(self._sent) if each < link.number - KEPT_OUTCOMES]:
            self._sent.pop(number, None)
        self._sent[link.number] = replace(self.sent(link.number), outcome=outcome)

    def _send_version(
        self, keys: Store, store: WeightStore, held: OutgoingVersion, version: int, ranks: Sequence[int],
        link: RelayLink,
    ) -> None:  # fmt: skip
        chunks = cut_chunks(store.plan, held.records, self._bucket_bytes)

        def check_not_superseded() -> None:
            newest = store.control.newest()
            if newest is not None and newest.generation == self.generation and newest.version > version:
                raise StaleVersion(version, newest.version)  # the trainer needs this buffer for the next version

        digests = (
            self._chunk_digests(
                keys, chunks, held, (self.generation, version, tuple(ranks)), link, check_not_superseded
            )
            if self._delta
            else []
        )
        info = link_protocol.handshake_with_receiver(keys, link, store.plan, self._limit_s)
        receiver_digests = self._digests.get(
            (info.generation, -1 if info.version is None else info.version, tuple(ranks))
        )
        which = changed_chunks(receiver_digests, digests) if self._delta else list(range(len(chunks)))
        kept = [each.hex() for position, each in enumerate(digests) if position not in set(which)]
        header = TransferHeader(version, self.generation, self._bucket_bytes, which, kept, list(held.records))
        sender = self._open_sender(keys, link)

        def on_moved(count: int) -> None:
            self._count(count)
            sent = self.sent(link.number)
            self._sent[link.number] = replace(sent, bytes=sent.bytes + count)
            check_not_superseded()

        try:
            sender.send(header.encode(), [chunks[position] for position in which], held.memory, on_moved)
        finally:
            sender.close()

    def _chunk_digests(
        self, keys: Store, chunks: Sequence[Chunk], held: OutgoingVersion, key: tuple[int, int, tuple[int, ...]],
        link: RelayLink, check_not_superseded: Callable[[], None],
    ) -> list[bytes]:  # fmt: skip
        """Returns the digests of all chunks, which one thread computes for all receivers. Reports progress to the
        receiver."""

        def report_progress() -> object:
            self._sent[link.number] = replace(self.sent(link.number), summed=self._digested_bytes)
            link_protocol.report_preparing(keys, link, self._digested_bytes)
            return self._digested_bytes

        def is_ready() -> bool | None:
            with self._lock:
                if key in self._digests or key not in self._digests_in_progress:
                    self._digests_in_progress.add(key)
                    return True
                return None

        waits.poll(
            is_ready, kind="event", waits_for=f"relay of {self.node}", why="digests of the version",
            stall_s=self._limit_s,
            progress=report_progress,
        )  # fmt: skip
        try:
            found = list(self._digests.get(key, []))
            for chunk in chunks[len(found) :]:
                found.append(chunk_digest(chunk, held.memory))
                self._digested_bytes += chunk_bytes(chunk)
                report_progress()
                check_not_superseded()
        finally:
            self._digests_in_progress.discard(key)
        with self._lock:
            self._digests[key] = found
            while len(self._digests) > KEPT_DIGESTS:
                del self._digests[next(iter(self._digests))]
        return found

    def _check_header(
        self, header: TransferHeader, version: int, ranks: Sequence[int], link: RelayLink
    ) -> TransferHeader:
        """Returns the header. Raises LinkFailed if it announces another version than was requested."""
        wanted = version, self.generation, list(ranks)
        found = header.version, header.generation, [record.rank for record in header.records]
        if found != wanted:
            what = "version {} of generation {} by ranks {}"
            problem = f"the sender offers {what.format(*found)}, {what.format(*wanted)} was requested"
            raise LinkFailed(link.name, link.sender, problem)
        return header

    def _copy_unsent(
        self, store: WeightStore, chunks: Sequence[Chunk], header: TransferHeader, memory: memoryview
    ) -> None:
        """Copies the chunks that are not sent from the current version. Raises TornWeights if they differ from the
        sender's; the next transfer then sends all chunks."""
        sent = set(header.which)
        kept = [chunk for position, chunk in enumerate(chunks) if position not in sent]
        if not kept:
            return
        with store.current() as current:
            for chunk, expected in zip(kept, header.kept, strict=True):
                for span in chunk:
                    memory[span.start : span.end] = current[span.start : span.end]
                    self._count(span.length)
                if chunk_digest(chunk, memory).hex() != expected:
                    self._base_differs = True
                    start, length = chunk[0].start, chunk_bytes(chunk)
                    name = next(each.name for each in reversed(store.plan.entries) if each.offset <= start)
                    raise TornWeights(header.version, f"{name}, which was not sent", start, length)

    def _connect(self, link: RelayLink) -> Store:
        return connect_store(self._store_url, f"gen{self.generation}/weights", link.name)

    def _open_sender(self, keys: Store, link: RelayLink) -> LinkSender:
        if self._way == "gloo":
            return GlooLink(keys, link, True, self._limit_s)
        return FileLinkSender(self._shared_folder, self.generation, link)

    def _open_receiver(self, keys: Store, link: RelayLink) -> LinkReceiver:
        if self._way == "gloo":
            return GlooLink(keys, link, False, self._limit_s)
        return FileLinkReceiver(
            self._shared_folder,
            self.generation,
            link,
            self._limit_s / 2,
            lambda: link_protocol.refusal_reason(keys, link),
        )

    @property
    def _shared_folder(self) -> Path:
        if self._folder is None:
            raise ValueError("weights.folder: the files transport needs a folder that all nodes share")
        return self._folder

    def _count(self, count: int) -> None:
        current_beacon().add("bytes", count)
