"""How far vLLM's workers are with an update. With tensor parallelism they are processes of their own, which have no
beacon: they count in memory that they share with their engine, and the engine's beacon moves as they do."""

import mmap
import os
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from lockstep.watch import beacon, waits

LOOK_S = 0.25
_COUNT = struct.Struct("<Q")


@contextmanager
def watching(workers: int) -> Generator[str]:
    """The engine's side, for as long as an update takes: the path by which its workers find the memory; empty where
    there is one worker, which is this process."""
    if workers == 1:
        yield ""
        return
    descriptor = os.memfd_create("tally")
    try:
        os.ftruncate(descriptor, workers * _COUNT.size)
        memory = mmap.mmap(descriptor, workers * _COUNT.size)

        def look() -> None:
            counts = [_COUNT.unpack_from(memory, each * _COUNT.size)[0] for each in range(workers)]
            beacon.current().progress("loading", sum(counts))

        with _again_and_again(look):
            yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def counting(path: str, worker: int) -> Generator[None]:
    """A worker's side. Does nothing for an empty path."""
    if not path:
        yield
        return
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    with _again_and_again(lambda: _COUNT.pack_into(memory, worker * _COUNT.size, beacon.current().moves)):
        yield


@contextmanager
def _again_and_again(look: Callable[[], None]) -> Generator[None]:
    over = threading.Event()

    def walk() -> None:
        while not over.is_set():
            look()
            waits.sleep(LOOK_S, "progress of an update")

    threading.Thread(target=walk, name="tally", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        look()
