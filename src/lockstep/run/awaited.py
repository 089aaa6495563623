"""Who is awaited while a run starts or recovers, in a line that goes on being true."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.report.top import duration
from lockstep.watch import beacon, waits
from lockstep.watch.records import WaitRecord

EVERY_S = 0.5
SHOWN = 2
"""So many of those who are awaited are described."""


@contextmanager
def awaited(tell: Callable[[str], None], doing: Callable[[str], str]) -> Iterator[None]:
    """Tells twice a second, from a thread of its own, whom the thread that enters this waits for; "" where it does not.

    Args:
        doing: what a worker of that name does, for after its name; empty where nothing is known of it.
    """
    thread, over, lock = threading.get_native_id(), threading.Event(), threading.Lock()

    def look() -> None:
        while not over.is_set():
            text = line(beacon.current().waiting(thread), doing, time.monotonic_ns())
            with lock:  # what is told after the end would stay
                if not over.is_set():
                    tell(text)
            waits.sleep(EVERY_S, "who is awaited then")

    threading.Thread(target=look, name="awaited", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()
        tell("")


def line(wait: WaitRecord | None, doing: Callable[[str], str], now_ns: int) -> str:
    """A wait, and what those do who are waited for."""
    if wait is None:
        return ""
    names = wait.whom.partition(" and ")[0].split(", ")
    said = [f"{name} {what}" for name in names[:SHOWN] if (what := doing(name))]
    told = f": {'; '.join(said)}" if said else ""
    return f"{wait.whom} ({wait.why}) for {duration((now_ns - wait.since_ns) / 1e9)}{told}"
