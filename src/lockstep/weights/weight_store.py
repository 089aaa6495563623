"""Weights from trainer ranks to engines of the same host, through two buffers in shared memory.

Every rank writes its rows straight into the buffer that is not current, then marks itself done; the controller's
commit, possible only when all have, makes that buffer the current one. Readers hold a lease on the buffer they
read, and no rank writes before the leases on the other buffer are gone. So a reader sees one version, whole.

A node's courier writes in the place of ranks, and commits. So whoever writes a rank's part holds a lock of it, and
commits hold those of all: which buffer is current is looked at with the lock, and stays so until it is released.
"""

import logging
import mmap
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

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
    """A store of weights in a folder, normally `/dev/shm/lockstep/<run>/weights`."""

    def __init__(self, folder: Path, plan: WeightPlan, control: ControlBlock, generation: int | None) -> None:
        self.folder, self.plan, self.control = folder, plan, control
        self.generation = generation
        """Of the run this process belongs to; None for readers."""
        self._memory: dict[tuple[int, bool], mmap.mmap] = {}

    @classmethod
    def create(cls, folder: Path, plan: WeightPlan, writers: int, generation: int = 1) -> "WeightStore":
        """The controller's side. What an earlier generation left with the same plan stays readable.

        Args:
            writers: how many ranks write.

        Raises:
            NoRoom: two buffers do not fit.
            StaleGeneration: a later generation has claimed the store.
        """
        folder.mkdir(parents=True, exist_ok=True)
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
        """A rank's (with its generation) or a reader's side.

        Raises:
            NoStore: nothing there.
            PlanMismatch: the store's plan is not `plan`.
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
        """The committed version, None before the first."""
        newest = self.control.newest()
        return None if newest is None else newest.version

    def write_shards(self, rank: int, version: int, shards: Iterable[WeightShard], complete: bool = False) -> None:
        """Writes this rank's rows into the buffer that is not current and marks the rank done. Does nothing where
        the version is committed already. A constant shard that the same generation has written into this buffer
        before, two versions ago, is there still: it is neither copied nor summed up again.

        Args:
            rank: 0 <= rank < writers.
            shards: cast to the plan's types.
            complete: whether complete checksums are made beside the sampled ones.

        Raises:
            StaleGeneration, StaleVersion: somebody newer is in charge; a newer version is current.
            PlanMismatch: a shard that is not in the plan.
            WaitTimeout: a reader holds the buffer, naming its pid.
        """
        if not 0 <= rank < self.control.writers:
            raise ValueError(f"rank: {rank}, expected 0 to {self.control.writers - 1}")
        with self._locked(version, [rank]) as buffer:
            if buffer is None:
                return
            before = self._begin(buffer, version, [rank])
            memory = memoryview(self._mapped(buffer, writable=True))
            written = [bucket for shard in shards for bucket in self._write(memory, shard, complete, before)]
            mark = WriteRecord(rank, version, self._mine, self.plan.digest, tuple(written))
            mark.write(self._mark(buffer, rank))

    def commit(self, version: int) -> None:
        """Makes the version current, if every rank has written all of its part. Idempotent.

        Raises:
            IncompleteWeights: names the ranks that are not done, or the tensors with gaps.
            StaleGeneration, StaleVersion: as `write_shards`.
        """
        newest = self._in_charge(version)
        if not self._is(newest, version):
            self._complete(_spare_buffer(newest), version)  # no lock is waited for where a rank is not done
        with self._locked(version, range(self.control.writers)) as buffer:
            if buffer is not None:
                self._commit(buffer, version)

    @contextmanager
    def sending(self, version: int, ranks: Sequence[int]) -> Generator[OutgoingVersion]:
        """Holds what these ranks wrote of `version_numbers`, committed or not, for as long as the context lasts.

        Raises:
            StaleVersion: they have not written it, or a later one since.
        """
        why = f"send version {version} of the weights"
        held, lease = poll_lease(lambda: self._held(version, ranks), "trainer ranks", why)
        try:
            yield held
        finally:
            lease.release()

    @contextmanager
    def filling(self, version: int, ranks: Sequence[int]) -> Generator[IncomingVersion]:
        """The buffer that is not current, in place of these ranks. They count as done once `keep` was called;
        where they are all ranks, the version is committed with that.

        Raises:
            StaleGeneration, StaleVersion, WaitTimeout: as `write_shards`; StaleVersion as well where the version is
                current already, or these are all ranks and one of them has written a later version here.
        """
        with self._locked(version, ranks) as buffer:
            if buffer is None:
                raise StaleVersion(version, version)
            whole = len(ranks) == self.control.writers
            if whole:
                self._spare(buffer, version)
            self._begin(buffer, version, ranks)
            memory = memoryview(self._mapped(buffer, writable=True))

            def keep(marks: Sequence[WriteRecord], check: ChecksumMode) -> None:
                for mark in marks:
                    verify_record(self.plan, mark, memory, check)
                for mark in marks:
                    mark.write(self._mark(buffer, mark.rank))
                if whole:
                    self._commit(buffer, version)

            yield IncomingVersion(memory, keep)

    @contextmanager
    def current(self) -> Generator[memoryview]:
        """All bytes of the current version, unchecked. Raises StaleVersion where there is none."""
        commit, lease = self._lease(None)
        try:
            yield memoryview(self._mapped(commit.buffer, writable=False))
        finally:
            lease.release()

    @contextmanager
    def reading(self, version: int | None = None, check: ChecksumMode = "sampled") -> Generator[VersionView]:
        """Holds the current version for as long as the context lasts.

        Args:
            version: the one that must be current; any when None.
            check: of the bytes against the checksums of their writers.

        Raises:
            StaleVersion: another version is current, or none.
            TornWeights: bytes that are not what was written.
        """
        commit, lease = self._lease(version)
        try:
            memory = self._mapped(commit.buffer, writable=False)
            self._verify(commit, memoryview(memory), check)
            yield VersionView(commit.version, commit.generation, tensor_views(memory, self.plan))
        finally:
            lease.release()

    def close(self) -> None:
        """Unmaps what no tensor looks at any more."""
        for key in list(self._memory):
            try:
                self._memory[key].close()
            except BufferError:
                log.debug("%s: buffer %s is still looked at", self.folder, key)
            del self._memory[key]
        self.control.close()

    def _in_charge(self, version: int) -> CommittedVersion | None:
        """The current commit, where we may follow it with `version_numbers`."""
        if self.generation is None:
            raise ValueError("generation: the store was opened for reading; give open() the run's generation")
        current = self.control.generation
        if current > self.generation:
            raise StaleWriter(self.generation, current)
        newest = self.control.newest()
        if newest is not None and newest.generation == self.generation and newest.version > version:
            raise StaleVersion(version, newest.version)
        return newest

    def _is(self, commit: CommittedVersion | None, version: int) -> bool:
        """Whether that is the version as this generation of the run has made it."""
        return commit is not None and (commit.generation, commit.version) == (self._mine, version)

    @contextmanager
    def _locked(self, version: int, ranks: Sequence[int]) -> Generator[int | None]:
        """The buffer that is not current, which stays so, with the parts of these ranks locked: one process at a time
        writes a part, not an older generation's beside ours, and nobody commits meanwhile. None where the version is
        current already. Raises StaleGeneration, StaleVersion, WaitTimeout."""
        while True:
            newest = self._in_charge(version)
            if self._is(newest, version):
                yield None
                return
            buffer = _spare_buffer(newest)
            with ExitStack() as locks:
                for rank in sorted(ranks):  # in one order: nobody waits for each other
                    path = self.folder / f"buffer-{buffer}.rank-{rank}.lock"
                    path.touch()
                    locks.callback(acquire_exclusive(path, f"another writer of rank {rank}", "write weights").release)
                if self._in_charge(version) == newest:
                    yield buffer
                    return

    def _begin(self, buffer: int, version: int, ranks: Sequence[int]) -> dict[int, list[ChecksumBlock]]:
        """Makes locked parts ready to be written: not marked, and read by nobody. What this generation wrote of them
        before, by entry of the plan."""
        before = dict[int, list[ChecksumBlock]]()
        for rank in ranks:
            mark = WriteRecord.read(self._mark(buffer, rank))
            self._mark(buffer, rank).unlink(missing_ok=True)
            if mark is not None and (mark.generation, mark.digest) == (self.generation, self.plan.digest):
                for bucket in mark.buckets:
                    before.setdefault(bucket.entry, []).append(bucket)
        # Nobody begins to: engines read only the current buffer, and couriers send only what is marked.
        why = f"write version {version} of the weights"
        acquire_exclusive(self._buffer(buffer), "readers of an older version", why).release()
        return before

    def _spare(self, buffer: int, version: int) -> None:
        """A version that comes from elsewhere does not take the place of a later one that ranks write here."""
        for rank in range(self.control.writers):
            mark = WriteRecord.read(self._mark(buffer, rank))
            if mark is not None and mark.generation == self.generation and mark.version > version:
                raise StaleVersion(version, mark.version)

    def _commit(self, buffer: int, version: int) -> None:
        """Needs the locks of all ranks."""
        self._complete(buffer, version)
        self.control.commit(self._mine, version, buffer)

    def _complete(self, buffer: int, version: int) -> None:
        """Raises IncompleteWeights where not all was written."""
        marks = {rank: WriteRecord.read(self._mark(buffer, rank)) for rank in range(self.control.writers)}
        problems = find_unwritten(self.plan, marks, self._mine, version)
        if problems:
            raise IncompleteWeights(version, problems)

    def _write(
        self, memory: memoryview, shard: WeightShard, complete: bool, before: Mapping[int, list[ChecksumBlock]]
    ) -> Iterable[ChecksumBlock]:
        position = self.plan.index.get(shard.name)
        if position is None:
            raise PlanMismatch(f"{shard.name} is not in it")
        entry = self.plan.entries[position]
        source = shard.tensor.detach()
        rows = source.shape[0] if entry.shape else 1
        if tuple(source.shape[1:]) != entry.shape[1:] or shard.offset < 0 or shard.offset + rows > entry.rows:
            found = f"rows {shard.offset} to {shard.offset + rows} of {list(source.shape)}"
            raise PlanMismatch(f"{shard.name} is {list(entry.shape)} in it, a rank has {found}")
        if not source.numel():
            return []
        start = shard.offset * entry.row_bytes
        if shard.constant and (known := before.get(position)) and known[0].start == start:
            summed_up = all(bucket.complete is not None for bucket in known) or not complete
            if summed_up and sum(bucket.length for bucket in known) == rows * entry.row_bytes:
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
            # It was replaced between the two looks, or a rank is just looking whether somebody reads.
            if lease is not None:
                lease.release()
            return None

        why = "read the weights"
        return poll_lease(attempt, "trainer ranks", why)

    def _verify(self, commit: CommittedVersion, memory: memoryview, check: ChecksumMode) -> None:
        for rank in range(self.control.writers):
            mark = WriteRecord.read(self._mark(commit.buffer, rank))
            if mark is None or (mark.generation, mark.version) != (commit.generation, commit.version):
                raise TornWeights(commit.version, f"the part of rank {rank}", 0, 0)
            verify_record(self.plan, mark, memory, check)

    def _held(self, version: int, ranks: Sequence[int]) -> tuple[OutgoingVersion, BufferLease] | None:
        """None where that has to be looked at again."""
        newest = self.control.newest()
        buffer = newest.buffer if newest is not None and self._is(newest, version) else _spare_buffer(newest)
        lease = BufferLease.take(self._buffer(buffer))
        if lease is None:  # a rank is just looking whether somebody reads
            return None
        marks = [WriteRecord.read(self._mark(buffer, rank)) for rank in ranks]
        done = [mark for mark in marks if mark is not None and (mark.version, mark.generation) == (version, self._mine)]
        if len(done) == len(marks) and self.control.newest() == newest:
            return OutgoingVersion(memoryview(self._mapped(buffer, writable=False)), tuple(done)), lease
        lease.release()
        if self.control.newest() == newest:
            raise StaleVersion(version, None if newest is None else newest.version)
        return None

    @property
    def _mine(self) -> int:
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

    def _mark(self, buffer: int, rank: int) -> Path:
        return self.folder / f"buffer-{buffer}.rank-{rank}.json"


def _spare_buffer(newest: CommittedVersion | None) -> int:
    """The buffer that is not current."""
    return 0 if newest is None else 1 - newest.buffer
