"""Services that the cluster tests run in workers. They import no torch, so they start fast."""

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.base.wait_state import track_wait
from lockstep.cluster.protocol import DeferredResult, concurrent
from lockstep.watch.beacon.writer import current_beacon


class Painful(Exception):
    """An exception whose class only the service's module defines."""


@dataclass(slots=True)
class Parcel:
    label: str
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class Plain:
    """Calls that succeed, fail, sleep, block signals or end the process."""

    def __init__(self, start: int = 0, fail: str = "", ledger: str = "") -> None:
        if fail == "raise":
            raise Painful("no such model: tiny")
        if fail == "exit":
            print("about to exit", flush=True)
            os._exit(3)
        if fail == "sleep":
            time.sleep(600)
        self.total, self.ledger, self.marks = start, ledger, 0

    def add(self, n: int) -> int:
        self.total += n
        return self.total

    def note(self, number: int, padding: np.ndarray | None = None, seconds: float = 0.0) -> int:
        """Write a line per execution."""
        with Path(self.ledger).open("a") as file:
            file.write(f"{number}\n")
        time.sleep(seconds)
        return number if padding is None else int(padding.sum())

    def double(self, parcel: Parcel) -> Parcel:
        return Parcel(parcel.label * 2, {name: array * 2 for name, array in parcel.arrays.items()})

    def checksum(self, array: np.ndarray) -> tuple[int, float]:
        array[0] += 1  # the callee may change its copy
        return array.nbytes, float(array.sum()) - 1

    def zeros(self, megabytes: int) -> np.ndarray:
        return np.zeros(megabytes << 20, np.uint8)

    def reused(self, value: int) -> np.ndarray:
        """Return the same buffer for every answer."""
        self.buffer = getattr(self, "buffer", np.zeros(1 << 20))
        self.buffer[:] = value
        return self.buffer

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def work(self, seconds: float) -> int:
        """Like sleep, with counter progress."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            current_beacon().add("turns")
            time.sleep(0.1)
        return current_beacon().progress_count

    def wait_for(self, waits_for: str, seconds: float) -> None:
        current_beacon().stage("collecting")
        with track_wait("queue", waits_for, "its scores", seconds):
            time.sleep(seconds)

    def deaf(self, seconds: float) -> None:
        """Sleep with SIGTERM blocked."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        time.sleep(seconds)

    def fail(self, message: str) -> None:
        raise Painful(message)

    def exit_process(self, code: int) -> None:
        print("last words", flush=True)
        os._exit(code)

    def quit(self) -> None:
        sys.exit(5)

    def wrong(self) -> int:
        return object()  # type: ignore[return-value]

    def pid(self) -> int:
        return os.getpid()

    def started_with(self) -> str:
        """The environment this process, or the one it was forked from, was started with."""
        return Path("/proc/self/environ").read_text(errors="replace").replace("\0", "\n")

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @concurrent
    def peek(self) -> int:
        self.marks += 1
        return self.marks

    def close(self) -> None:
        if self.ledger:
            with Path(self.ledger).open("a") as file:
                file.write("closed\n")


class Renewable(Plain):
    """A service that another controller may adopt."""

    renewals = 0

    def renew(self) -> None:
        if self.total < 0:
            raise Painful("not again")
        self.total = 0
        self.renewals += 1

    def renewed(self) -> int:
        return self.renewals


class BackgroundService:
    """A service that works between calls while it has something to do."""

    def __init__(self) -> None:
        self.left, self.done, self.background_count, self.broken = 0, 0, 0, False

    def submit(self, n: int) -> None:
        self.left += n

    def collect(self) -> int:
        return self.done

    def background_calls(self) -> int:
        return self.background_count

    def sabotage(self) -> None:
        self.broken = True

    @concurrent
    def progress(self) -> int:
        return self.done

    def background(self) -> bool:
        self.background_count += 1
        if self.broken:
            raise Painful("the decode loop broke")
        if not self.left:
            return False
        time.sleep(0.002)
        self.left -= 1
        self.done += 1
        current_beacon().add("tokens")
        return True


class DeferringService:
    """A service that answers a call once its background work has reached a turn."""

    def __init__(self) -> None:
        self.open: list[tuple[int, DeferredResult[list[int]]]] = []
        self.turns, self.broken = 0, False

    def at(self, turn: int) -> DeferredResult[list[int]]:
        later: DeferredResult[list[int]] = DeferredResult()
        self.open.append((turn, later))
        if turn < 0:
            later.fail(Painful("there was no such turn"))
        elif turn == 0:
            later.settle([0])
        return later

    def sabotage(self) -> None:
        self.broken = True

    def count(self) -> int:
        return len(self.open)

    def background(self) -> bool:
        if self.broken:
            raise Painful("the loop broke")
        self.turns += 1
        current_beacon().add("turns")
        for turn, later in self.open:
            if turn == self.turns:
                later.settle([turn, self.turns])
        time.sleep(0.002)
        return self.turns < 100_000
