"""Weight sync within one host: the transport, which the controller uses, and the reader, which engines use.

Also finds processes that still read the buffer that the next version needs.
"""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from torch import Tensor

from lockstep.base import waits
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.protocol import Worker
from lockstep.weights.errors import (
    BufferHeld,
)
from lockstep.weights.store_files import (
    BufferLease,
    lease_holders,
    remove_store,
)
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_store import WeightStore
from lockstep.weights.weight_transport import WriteVersion
from lockstep.weights.write_records import (
    ChecksumMode,
)


class StoreReader:
    """Reads versions for an engine: `with reader(folder, version) as tensors: ...`. Keeps stores open."""

    def __init__(self, check: ChecksumMode = "sampled") -> None:
        self.check: ChecksumMode = check
        self._stores: dict[Path, tuple[int, WeightStore]] = {}

    @contextmanager
    def __call__(self, folder: Path, version: int) -> Generator[Mapping[str, Tensor]]:
        """Returns the tensors of that version by name. Raises like `WeightStore.reading`."""
        with self._store(folder).reading(version, self.check) as weights:
            yield weights.tensors

    def _store(self, folder: Path) -> WeightStore:
        control = folder / "control"
        inode = control.stat().st_ino if control.exists() else -1
        opened = self._stores.get(folder)
        if opened is None or opened[0] != inode:
            self._stores[folder] = inode, WeightStore.open(folder)
        return self._stores[folder][1]


def complete_store_reader() -> StoreReader:
    """Returns a reader that verifies every byte."""
    return StoreReader("complete")


ProcessLineage = tuple[int, ...]
"""Pid of a process, then those of its parents, because an engine may read in child processes."""


def spare_buffer_readers(store: WeightStore) -> list[ProcessLineage]:
    """Returns the processes, except this one, that hold a lease on the store's spare buffer. Does not wait. No process
    takes
    a new lease on it: engines read the current buffer, and relays send only versions that are recorded as written."""
    newest = store.control.newest()
    path = store.folder / f"buffer-{0 if newest is None else 1 - newest.buffer}"
    lease = BufferLease.take(path, exclusive=True)
    if lease is not None:
        lease.release()
        return []
    return [process_lineage(pid) for pid in lease_holders(path) if pid != os.getpid()]


def process_lineage(pid: int) -> ProcessLineage:
    try:
        return pid, *(each.pid for each in psutil.Process(pid).parents())
    except psutil.Error:
        return (pid,)


class SharedMemoryTransport:
    """Implements `lockstep.weights.weight_transport.WeightTransport` within one host, without other processes or
    transfers.

    Args:
        folder: folder of the store, in shared memory.
        generation: generation of the run.
        limit_s: how long a reader may hold the buffer that a version needs.
    """

    def __init__(self, folder: Path, plan: WeightPlan, generation: int, limit_s: float = 60.0) -> None:
        self._folder, self._plan, self._generation, self._limit_s = folder, plan, generation, limit_s
        self._store: WeightStore | None = None
        self._former: WeightStore | None = None
        """After a change of the number of ranks: the previous store, which engines read until the next publish."""

    @property
    def store(self) -> WeightStore:
        """The store of the next version."""
        if self._store is None:
            raise RuntimeError("no store is open; call prepare_stores() first")
        return self._store

    def prepare_stores(self, ranks: Sequence[Worker]) -> list[str]:
        previous = self._store
        if previous is None or previous.control.writers != len(ranks):
            folder = self._folder if previous is None else self._folder.with_name(f"{self._folder.name}-{len(ranks)}")
            self._store = WeightStore.create(folder, self._plan, len(ranks), self._generation)
            if previous is not None and self._former is None:
                self._former = previous
            elif previous is not None:  # nothing was published in it
                _delete_store(previous)
        return [str(self.store.folder)] * len(ranks)

    def publish(self, version: int, write: WriteVersion) -> None:
        try:
            waits.poll(
                lambda: not spare_buffer_readers(self.store) or None, kind="lease", waits_for="engines",
                why="release the weights of an older version", timeout_s=self._limit_s,
            )  # fmt: skip
        except WaitTimeout as error:
            held = tuple(spare_buffer_readers(self.store))
            if held:
                raise BufferHeld(self.store.folder, "this host", held, self._limit_s) from error
        write()
        self.store.commit(version)

    def blocking_readers(self) -> list[BufferHeld]:
        return []

    def holds_buffer(self, engine: Worker, held: BufferHeld) -> bool:
        return any(engine.pid in each for each in held.readers)

    def store_folder(self, worker: Worker, version: int) -> str | None:
        stores = [self._store, self._former]
        return next((str(each.folder) for each in stores if each is not None and each.version() == version), None)

    def fetch(self, worker: Worker, version: int) -> None:
        return

    def progress(self) -> object:
        return None

    def delete_former_stores(self) -> None:
        if self._former is not None:
            _delete_store(self._former)
            self._former = None


def _delete_store(store: WeightStore) -> None:
    remove_store(store.folder)
    store.close()
