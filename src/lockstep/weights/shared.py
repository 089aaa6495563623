"""Weights from trainer ranks to engines of the same host, through two buffers in shared memory.

Every rank writes its rows straight into the buffer that is not current, then marks itself done; the controller's
commit, possible only when all have, makes that buffer the current one. Readers hold a lease on the buffer they
read, and no rank writes before the leases on the other buffer are gone. So a reader sees one version, whole.
"""

import logging
import mmap
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lockstep.weights.buckets import Bucket, Check, Mark, buckets_of, gaps, intact
from lockstep.weights.control import Commit, Control
from lockstep.weights.errors import (
    IncompleteWeights,
    NoStore,
    PlanMismatch,
    StaleGeneration,
    StaleVersion,
    TornWeights,
)
from lockstep.weights.layout import lay_out, remove, view
from lockstep.weights.lease import Lease, exclusively, patiently
from lockstep.weights.parts import Filling, Held, Shard, Weights
from lockstep.weights.plan import Plan

log = logging.getLogger(__name__)


class SharedWeights:
    """A store of weights in a folder, normally `/dev/shm/lockstep/<run>/weights`."""

    def __init__(self, folder: Path, plan: Plan, control: Control, generation: int | None) -> None:
        self.folder, self.plan, self.control = folder, plan, control
        self.generation = generation
        """Of the run this process belongs to; None for readers."""
        self._memory: dict[tuple[int, bool], mmap.mmap] = {}

    @classmethod
    def create(cls, folder: Path, plan: Plan, writers: int, generation: int = 1) -> "SharedWeights":
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
            raise StaleGeneration(generation, old.control.generation)
        if old is None or old.plan.digest != plan.digest or old.control.writers != writers:
            remove(folder)
            lay_out(folder, plan, writers)
        store = cls.open(folder, plan, generation)
        store.control.claim(generation)
        return store

    @classmethod
    def open(cls, folder: Path, plan: Plan | None = None, generation: int | None = None) -> "SharedWeights":
        """A rank's (with its generation) or a reader's side.

        Raises:
            NoStore: nothing there.
            PlanMismatch: the store's plan is not `plan`.
        """
        control = Control(folder / "control", writable=generation is not None)
        try:
            found = Plan.from_json((folder / "plan.json").read_text())
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

    def write_shards(self, rank: int, version: int, shards: Iterable[Shard], complete: bool = False) -> None:
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
        newest = self._in_charge(version)
        if newest is not None and (newest.generation, newest.version) == (self.generation, version):
            return
        buffer = _other(newest)
        self._fence(buffer, version)
        assert self.generation is not None
        with self._writing(buffer, rank) as before:
            memory = memoryview(self._mapped(buffer, writable=True))
            written = [bucket for shard in shards for bucket in self._write(memory, shard, complete, before)]
            mark = Mark(rank, version, self.generation, self.plan.digest, tuple(written))
            mark.write(self._mark(buffer, rank))

    def commit(self, version: int) -> None:
        """Makes the version current, if every rank has written all of its part. Idempotent.

        Raises:
            IncompleteWeights: names the ranks that are not done, or the tensors with gaps.
            StaleGeneration, StaleVersion: as `write_shards`.
        """
        newest = self._in_charge(version)
        if newest is not None and (newest.generation, newest.version) == (self.generation, version):
            return
        buffer = _other(newest)
        problems: dict[str, str] = {}
        marks: list[Mark] = []
        for rank in range(self.control.writers):
            mark = Mark.read(self._mark(buffer, rank))
            if mark is None:
                problems[f"rank {rank}"] = "has not finished writing"
            elif (mark.generation, mark.version) != (self.generation, version):
                problems[f"rank {rank}"] = f"wrote version {mark.version} of generation {mark.generation}"
            else:
                marks.append(mark)
        problems = problems or gaps(self.plan, marks)
        if problems:
            raise IncompleteWeights(version, problems)
        assert self.generation is not None
        self.control.commit(self.generation, version, buffer)

    @contextmanager
    def sending(self, version: int, ranks: Sequence[int]) -> Generator[Held]:
        """Holds what these ranks wrote of `version`, committed or not, for as long as the context lasts.

        Raises:
            StaleVersion: they have not written it, or a later one since.
        """
        why = f"send version {version} of the weights"
        held, lease = patiently(lambda: self._held(version, ranks), "trainer ranks", why)
        try:
            yield held
        finally:
            lease.release()

    @contextmanager
    def filling(self, version: int, ranks: Sequence[int]) -> Generator[Filling]:
        """The buffer that is not current, in place of these ranks. They count as done once `keep` was called.

        Raises:
            StaleGeneration, StaleVersion, WaitTimeout: as `write_shards`.
        """
        buffer = _other(self._in_charge(version))
        self._fence(buffer, version)
        with ExitStack() as locks:
            for rank in ranks:
                locks.enter_context(self._writing(buffer, rank))
            memory = memoryview(self._mapped(buffer, writable=True))

            def keep(marks: Sequence[Mark], check: Check) -> None:
                for mark in marks:
                    self._verify_mark(mark, memory, check)
                for mark in marks:
                    mark.write(self._mark(buffer, mark.rank))

            yield Filling(memory, keep)

    @contextmanager
    def current(self) -> Generator[memoryview]:
        """All bytes of the current version, unchecked. Raises StaleVersion where there is none."""
        commit, lease = self._lease(None)
        try:
            yield memoryview(self._mapped(commit.buffer, writable=False))
        finally:
            lease.release()

    @contextmanager
    def reading(self, version: int | None = None, check: Check = "sampled") -> Generator[Weights]:
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
            yield Weights(commit.version, commit.generation, self._views(memory))
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

    def _in_charge(self, version: int) -> Commit | None:
        """The current commit, where we may follow it with `version`."""
        if self.generation is None:
            raise ValueError("generation: the store was opened for reading; give open() the run's generation")
        current = self.control.generation
        if current > self.generation:
            raise StaleGeneration(self.generation, current)
        newest = self.control.newest()
        if newest is not None and newest.generation == self.generation and newest.version > version:
            raise StaleVersion(version, newest.version)
        return newest

    def _fence(self, buffer: int, version: int) -> None:
        """Waits until nobody reads the buffer. Nobody begins to: readers take only the current one."""
        why = f"write version {version} of the weights"
        exclusively(self._buffer(buffer), "readers of an older version", why).release()

    @contextmanager
    def _writing(self, buffer: int, rank: int) -> Generator[dict[int, list[Bucket]]]:
        """One process at a time writes a rank's part: not an older generation's beside ours. What this generation
        wrote of it before, by entry of the plan."""
        path = self.folder / f"buffer-{buffer}.rank-{rank}.lock"
        path.touch()
        lease = exclusively(path, f"an older writer of rank {rank}", "write weights")
        try:
            mark, before = Mark.read(self._mark(buffer, rank)), dict[int, list[Bucket]]()
            self._mark(buffer, rank).unlink(missing_ok=True)
            if mark is not None and (mark.generation, mark.digest) == (self.generation, self.plan.digest):
                for bucket in mark.buckets:
                    before.setdefault(bucket.entry, []).append(bucket)
            yield before
        finally:
            lease.release()

    def _write(
        self, memory: memoryview, shard: Shard, complete: bool, before: Mapping[int, list[Bucket]]
    ) -> Iterable[Bucket]:
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
        return buckets_of(piece, position, start, complete)

    def _lease(self, version: int | None) -> tuple[Commit, Lease]:
        def attempt() -> tuple[Commit, Lease] | None:
            commit = self.control.newest()
            if commit is None or version not in (None, commit.version):
                raise StaleVersion(version, None if commit is None else commit.version)
            lease = Lease.take(self._buffer(commit.buffer))
            if lease is not None and self.control.newest() == commit:
                return commit, lease
            # It was replaced between the two looks, or a rank is just looking whether somebody reads.
            if lease is not None:
                lease.release()
            return None

        why = "read the weights"
        return patiently(attempt, "trainer ranks", why)

    def _verify(self, commit: Commit, memory: memoryview, check: Check) -> None:
        for rank in range(self.control.writers):
            mark = Mark.read(self._mark(commit.buffer, rank))
            if mark is None or (mark.generation, mark.version) != (commit.generation, commit.version):
                raise TornWeights(commit.version, f"the part of rank {rank}", 0, 0)
            self._verify_mark(mark, memory, check)

    def _verify_mark(self, mark: Mark, memory: memoryview, check: Check) -> None:
        for bucket in mark.buckets:
            entry = self.plan.entries[bucket.entry]
            start = entry.offset + bucket.start
            if not intact(bucket, memory[start : start + bucket.length], check):
                raise TornWeights(mark.version, entry.name, bucket.start, bucket.length)

    def _held(self, version: int, ranks: Sequence[int]) -> tuple[Held, Lease] | None:
        """None where that has to be looked at again."""
        newest = self.control.newest()
        buffer = newest.buffer if newest is not None and newest.version == version else _other(newest)
        lease = Lease.take(self._buffer(buffer))
        if lease is None:  # a rank is just looking whether somebody reads
            return None
        marks = [Mark.read(self._mark(buffer, rank)) for rank in ranks]
        done = [mark for mark in marks if mark is not None and (mark.version, mark.generation) == (version, self._mine)]
        if len(done) == len(marks) and self.control.newest() == newest:
            return Held(memoryview(self._mapped(buffer, writable=False)), tuple(done)), lease
        lease.release()
        if self.control.newest() == newest:
            raise StaleVersion(version, None if newest is None else newest.version)
        return None

    @property
    def _mine(self) -> int:
        return self.control.generation if self.generation is None else self.generation

    def _views(self, memory: mmap.mmap) -> dict[str, Tensor]:
        with warnings.catch_warnings():
            # torch warns that the memory is read-only: that is the point of it.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return {entry.name: view(memory, entry) for entry in self.plan.entries}

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


class Reader:
    """Opens versions for an engine: `with reader(folder, version) as tensors: ...`. Keeps stores mapped."""

    def __init__(self, check: Check = "sampled") -> None:
        self.check: Check = check
        self._stores: dict[Path, tuple[int, SharedWeights]] = {}

    @contextmanager
    def __call__(self, folder: Path, version: int) -> Generator[Mapping[str, Tensor]]:
        """The tensors of that version by name. Raises as `SharedWeights.reading`."""
        with self._store(folder).reading(version, self.check) as weights:
            yield weights.tensors

    def _store(self, folder: Path) -> SharedWeights:
        control = folder / "control"
        inode = control.stat().st_ino if control.exists() else -1
        known = self._stores.get(folder)
        if known is None or known[0] != inode:
            self._stores[folder] = inode, SharedWeights.open(folder)
        return self._stores[folder][1]


def complete_reader() -> Reader:
    """One that looks at every byte."""
    return Reader("complete")


def _other(newest: Commit | None) -> int:
    """The buffer that is not current."""
    return 0 if newest is None else 1 - newest.buffer
