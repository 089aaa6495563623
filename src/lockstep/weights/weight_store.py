"""The weight store of a host: two buffers in shared memory, which trainer ranks write and engines read.

Every rank writes its rows into the spare buffer and then records that it is done. The controller's commit, which needs
the records of all ranks, makes that buffer the current one. Readers hold a lease on the buffer that they read, and no
rank writes to a buffer with leases. So a reader always sees one complete version.

On nodes without trainer ranks, a relay writes the parts of the ranks and commits. Therefore every writer of a rank's
part
locks that part, and a commit locks all parts: while a process holds such a lock, the current buffer cannot change.
"""

import logging
import mmap
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from lockstep.base.folders import make_private_dir, open_file
from lockstep.weights.errors import IncompleteWeights, NoStore, PlanMismatch, StaleVersion, StaleWriter, TornWeights
from lockstep.weights.store_files import (
    BufferLease,
    CommittedVersion,
    ControlBlock,
    acquire_exclusive,
    create_store_files,
    poll_lease,
    remove_store,
    tensor_views,
)
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.write_records import (
    ChecksumBlock,
    ChecksumMode,
    IncomingVersion,
    OutgoingVersion,
    VersionView,
    WeightShard,
    WriteRecord,
    checksum_blocks,
    find_unwritten,
    verify_record,
)

log = logging.getLogger(__name__)


class WeightStore:
    """A weight store in a folder, normally `/dev/shm/lockstep-UID/<run>/weights`."""

    def __init__(self, folder: Path, plan: WeightPlan, control: ControlBlock, generation: int | None) -> None:
        self.folder, self.plan, self.control = folder, plan, control
        self.generation = generation
        """The generation of the run that this process belongs to; None for readers."""
        self._memory: dict[tuple[int, bool], mmap.mmap] = {}

    @classmethod
    def create(cls, folder: Path, plan: WeightPlan, writers: int, generation: int = 1) -> "WeightStore":
        """Opens the store for the controller, or creates it. A version that an earlier generation committed stays
        readable if the plan is the same.

        Args:
            writers: number of ranks that write to it.

        Raises:
            NoRoom: there is no space for two buffers.
            StaleWriter: a later generation has claimed the store.
        """
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private_dir(folder, "remove it")
        try:
            old = cls.open(folder)
        except NoStore:
            old = None
        if old is not None and old.control.generation > generation:
            raise StaleWriter(generation, old.control.generation)
        if old is None or old.plan.digest != plan.digest or old.control.writers != writers:
            remove_store(folder)
            create_store_files(folder, plan, writers)
        store = cls.open(folder, plan, generation)
        store.control.claim(generation)
        return store

    @classmethod
    def open(cls, folder: Path, plan: WeightPlan | None = None, generation: int | None = None) -> "WeightStore":
        """Opens the store for a rank (with its generation) or a reader.

        Raises:
            NoStore: there is no store.
            PlanMismatch: the store's plan differs from `plan`.
        """
        control = ControlBlock(folder / "control", writable=generation is not None)
        try:
            found = WeightPlan.from_json((folder / "plan.json").read_text())
        except (FileNotFoundError, ValueError) as error:
            raise NoStore(folder, f"its plan cannot be read ({error})") from error
        if found.digest != control.digest:
            raise NoStore(folder, "its plan is not the one of its control block")
        if plan is not None:
            plan.check(found)
        return cls(folder, found, control, generation)

    def version(self) -> int | None:
        """Returns the committed version; None if there is none."""
        newest = self.control.newest()
        return None if newest is None else newest.version

    def write_shards(self, rank: int, version: int, shards: Iterable[WeightShard], complete: bool = False) -> None:
        """Writes this rank's rows into the spare buffer and records that the rank is done. Does nothing if the version
        is committed already. A constant shard is not written again if the same generation wrote it into this buffer two
        versions ago.

        Args:
            rank: 0 <= rank < writers.
            shards: the rows; they are cast to the plan's types.
            complete: whether to compute complete checksums in addition to the sampled ones.

        Raises:
            StaleWriter, StaleVersion: a newer generation owns the store; a newer version is current.
            PlanMismatch: a shard is not in the plan.
            WaitTimeout: a reader holds the buffer; the message has its pid.
        """
        if not 0 <= rank < self.control.writers:
            raise ValueError(f"rank: {rank}, expected 0 to {self.control.writers - 1}")
        with self._lock_parts(version, [rank]) as buffer:
            if buffer is None:
                return
            previous = self._clear_parts(buffer, version, [rank])
            memory = memoryview(self._mapped(buffer, writable=True))
            written = [block for shard in shards for block in self._write(memory, shard, complete, previous)]
            record = WriteRecord(rank, version, self._current_generation, self.plan.digest, tuple(written))
            record.write(self._record_path(buffer, rank))

    def commit(self, version: int) -> None:
        """Makes the version current if all ranks have written their parts completely. Idempotent.

        Raises:
            IncompleteWeights: some ranks are not done, or some tensors have gaps.
            StaleWriter, StaleVersion: as for `write_shards`.
        """
        newest = self._check_generation(version)
        if not self._is_committed(newest, version):
            self._check_complete(_spare_buffer(newest), version)  # fails early, without waiting for locks
        with self._lock_parts(version, range(self.control.writers)) as buffer:
            if buffer is not None:
                self._commit(buffer, version)

    @contextmanager
    def sending(self, version: int, ranks: Sequence[int]) -> Generator[OutgoingVersion]:
        """Leases the parts that these ranks have written of `version`, committed or not, during the context.

        Raises:
            StaleVersion: the ranks have not written the version, or have written a later one.
        """
        why = f"send version {version} of the weights"
        held, lease = poll_lease(lambda: self._lease_written(version, ranks), "trainer ranks", why)
        try:
            yield held
        finally:
            lease.release()

    @contextmanager
    def filling(self, version: int, ranks: Sequence[int]) -> Generator[IncomingVersion]:
        """Gives the spare buffer to a relay, which fills it with the parts of these ranks. `keep` records the ranks as
        done and, if they are all ranks, commits the version.

        Raises:
            StaleWriter, StaleVersion, WaitTimeout: as for `write_shards`. StaleVersion also if the version is current
                already, or if these are all ranks and one of them has written a later version into this buffer.
        """
        with self._lock_parts(version, ranks) as buffer:
            if buffer is None:
                raise StaleVersion(version, version)
            all_ranks = len(ranks) == self.control.writers
            if all_ranks:
                self._check_not_newer(buffer, version)
            self._clear_parts(buffer, version, ranks)
            memory = memoryview(self._mapped(buffer, writable=True))

            def keep(records: Sequence[WriteRecord], check: ChecksumMode) -> None:
                for record in records:
                    verify_record(self.plan, record, memory, check)
                for record in records:
                    record.write(self._record_path(buffer, record.rank))
                if all_ranks:
                    self._commit(buffer, version)

            yield IncomingVersion(memory, keep)

    @contextmanager
    def current(self) -> Generator[memoryview]:
        """Leases the current version and returns its bytes, without verifying them. Raises StaleVersion if there is
        none."""
        commit, lease = self._lease(None)
        try:
            yield memoryview(self._mapped(commit.buffer, writable=False))
        finally:
            lease.release()

    @contextmanager
    def reading(self, version: int | None = None, check: ChecksumMode = "sampled") -> Generator[VersionView]:
        """Leases the current version during the context.

        Args:
            version: the version that must be current; None: any.
            check: how to verify the bytes by the checksums of their writers.

        Raises:
            StaleVersion: another version is current, or none.
            TornWeights: the bytes differ from those that were written.
        """
        commit, lease = self._lease(version)
        try:
            memory = self._mapped(commit.buffer, writable=False)
            self._verify(commit, memoryview(memory), check)
            yield VersionView(commit.version, commit.generation, tensor_views(memory, self.plan))
        finally:
            lease.release()

    def close(self) -> None:
        """Unmaps the buffers, except those that a tensor still uses."""
        for key in list(self._memory):
            try:
                self._memory[key].close()
            except BufferError:
                log.debug("%s: buffer %s is still in use", self.folder, key)
            del self._memory[key]
        self.control.close()

    def _check_generation(self, version: int) -> CommittedVersion | None:
        """Returns the current commit if this process may write `version` after it. Raises StaleWriter, StaleVersion."""
        if self.generation is None:
            raise ValueError("generation: the store was opened for reading; give open() the run's generation")
        current = self.control.generation
        if current > self.generation:
            raise StaleWriter(self.generation, current)
        newest = self.control.newest()
        if newest is not None and newest.generation == self.generation and newest.version > version:
            raise StaleVersion(version, newest.version)
        return newest

    def _is_committed(self, commit: CommittedVersion | None, version: int) -> bool:
        """Returns whether a commit is that of this version by this generation of the run."""
        return commit is not None and (commit.generation, commit.version) == (self._current_generation, version)

    @contextmanager
    def _lock_parts(self, version: int, ranks: Sequence[int]) -> Generator[int | None]:
        """Locks the parts of these ranks and yields the spare buffer. Meanwhile no other process of any generation can
        write these parts or commit. Yields None if the version is current already. Raises StaleWriter, StaleVersion,
        WaitTimeout."""
        while True:
            newest = self._check_generation(version)
            if self._is_committed(newest, version):
                yield None
                return
            buffer = _spare_buffer(newest)
            with ExitStack() as locks:
                for rank in sorted(ranks):  # all processes lock in the same order, so there is no deadlock
                    path = self.folder / f"buffer-{buffer}.rank-{rank}.lock"
                    os.close(open_file(path))
                    locks.callback(acquire_exclusive(path, f"another writer of rank {rank}", "write weights").release)
                if self._check_generation(version) == newest:
                    yield buffer
                    return

    def _clear_parts(self, buffer: int, version: int, ranks: Sequence[int]) -> dict[int, list[ChecksumBlock]]:
        """Prepares locked parts for writing: deletes their records and waits for readers. Returns the blocks that this
        generation had written of them, by entry of the plan."""
        previous = dict[int, list[ChecksumBlock]]()
        for rank in ranks:
            record = WriteRecord.read(self._record_path(buffer, rank))
            self._record_path(buffer, rank).unlink(missing_ok=True)
            if record is not None and (record.generation, record.digest) == (self.generation, self.plan.digest):
                for block in record.blocks:
                    previous.setdefault(block.entry, []).append(block)
        # No new reader can start: engines read only the current buffer, and relays send only recorded parts.
        why = f"write version {version} of the weights"
        acquire_exclusive(self._buffer(buffer), "readers of an older version", why).release()
        return previous

    def _check_not_newer(self, buffer: int, version: int) -> None:
        """Raises StaleVersion if ranks have written a later version into this buffer, which must not be overwritten."""
        for rank in range(self.control.writers):
            record = WriteRecord.read(self._record_path(buffer, rank))
            if record is not None and record.generation == self.generation and record.version > version:
                raise StaleVersion(version, record.version)

    def _commit(self, buffer: int, version: int) -> None:
        """Commits the buffer. The caller holds the locks of all parts."""
        self._check_complete(buffer, version)
        self.control.commit(self._current_generation, version, buffer)

    def _check_complete(self, buffer: int, version: int) -> None:
        """Raises IncompleteWeights if a byte was not written."""
        records = {rank: WriteRecord.read(self._record_path(buffer, rank)) for rank in range(self.control.writers)}
        problems = find_unwritten(self.plan, records, self._current_generation, version)
        if problems:
            raise IncompleteWeights(version, problems)

    def _write(
        self, memory: memoryview, shard: WeightShard, complete: bool, previous: Mapping[int, list[ChecksumBlock]]
    ) -> Iterable[ChecksumBlock]:
        position = self.plan.index.get(shard.name)
        if position is None:
            raise PlanMismatch(f"{shard.name} is not in the plan")
        entry = self.plan.entries[position]
        source = shard.tensor.detach()
        rows = source.shape[0] if entry.shape else 1
        if tuple(source.shape[1:]) != entry.shape[1:] or shard.offset < 0 or shard.offset + rows > entry.rows:
            found = f"rows {shard.offset} to {shard.offset + rows} of {list(source.shape)}"
            raise PlanMismatch(f"{shard.name} is {list(entry.shape)} in the plan, a rank has {found}")
        if not source.numel():
            return []
        start = shard.offset * entry.row_bytes
        if shard.constant and (known := previous.get(position)) and known[0].start == start:
            has_checksums = all(block.complete is not None for block in known) or not complete
            if has_checksums and sum(block.length for block in known) == rows * entry.row_bytes:
                return known
        piece = memory[entry.offset + start : entry.offset + start + rows * entry.row_bytes]
        torch.frombuffer(piece, dtype=entry.torch_dtype).view(source.shape).copy_(source)
        return checksum_blocks(piece, position, start, complete)

    def _lease(self, version: int | None) -> tuple[CommittedVersion, BufferLease]:
        def attempt() -> tuple[CommittedVersion, BufferLease] | None:
            commit = self.control.newest()
            if commit is None or version not in (None, commit.version):
                raise StaleVersion(version, None if commit is None else commit.version)
            lease = BufferLease.take(self._buffer(commit.buffer))
            if lease is not None and self.control.newest() == commit:
                return commit, lease
            # The commit was replaced meanwhile, or a rank is checking for readers right now.
            if lease is not None:
                lease.release()
            return None

        why = "read the weights"
        return poll_lease(attempt, "trainer ranks", why)

    def _verify(self, commit: CommittedVersion, memory: memoryview, check: ChecksumMode) -> None:
        for rank in range(self.control.writers):
            record = WriteRecord.read(self._record_path(commit.buffer, rank))
            if record is None or (record.generation, record.version) != (commit.generation, commit.version):
                raise TornWeights(commit.version, f"the part of rank {rank}", 0, 0)
            verify_record(self.plan, record, memory, check)

    def _lease_written(self, version: int, ranks: Sequence[int]) -> tuple[OutgoingVersion, BufferLease] | None:
        """Leases the recorded parts of these ranks. Returns None if the caller must try again."""
        newest = self.control.newest()
        buffer = newest.buffer if newest is not None and self._is_committed(newest, version) else _spare_buffer(newest)
        lease = BufferLease.take(self._buffer(buffer))
        if lease is None:  # a rank is checking for readers right now
            return None
        records = [WriteRecord.read(self._record_path(buffer, rank)) for rank in ranks]
        done = [
            record
            for record in records
            if record is not None and (record.version, record.generation) == (version, self._current_generation)
        ]
        if len(done) == len(records) and self.control.newest() == newest:
            return OutgoingVersion(memoryview(self._mapped(buffer, writable=False)), tuple(done)), lease
        lease.release()
        if self.control.newest() == newest:
            raise StaleVersion(version, None if newest is None else newest.version)
        return None

    @property
    def _current_generation(self) -> int:
        return self.control.generation if self.generation is None else self.generation

    def _mapped(self, buffer: int, writable: bool) -> mmap.mmap:
        key = buffer, writable
        if key not in self._memory:
            with self._buffer(buffer).open("r+b" if writable else "rb") as file:
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                self._memory[key] = mmap.mmap(file.fileno(), 0, access=access)
        return self._memory[key]

    def _buffer(self, buffer: int) -> Path:
        return self.folder / f"buffer-{buffer}"

    def _record_path(self, buffer: int, rank: int) -> Path:
        return self.folder / f"buffer-{buffer}.rank-{rank}.json"


def _spare_buffer(newest: CommittedVersion | None) -> int:
    """The buffer that is not current, 0 or 1."""
    return 0 if newest is None else 1 - newest.buffer
