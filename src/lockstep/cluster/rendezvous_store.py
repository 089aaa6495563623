"""The rendezvous store of a run, in which ranks and engines find each other before they create communicators.

On one host it is a folder of files that only this user can open. Across hosts it is a torch TCPStore, which does not
authenticate its clients: whoever reaches its port can use up its descriptors and its memory. So it runs in a process
of its own with limits (`python -m lockstep.cluster.rendezvous_store`), which ends with the controller and is replaced
if it ends earlier. Communicators that exist no longer need the store.
"""

import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote, urlsplit

import psutil

from lockstep.base import waits
from lockstep.base.errors import PicklableError
from lockstep.base.filesystems import is_on_local_disk
from lockstep.base.folders import make_private_dir, open_file, run_shm_dir
from lockstep.base.limits import raise_descriptor_limit
from lockstep.base.network import PortRange, listen
from lockstep.base.text import first_line
from lockstep.base.wait_state import WaitTimeout, track_wait

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

MEMORY_BYTES = 1 << 30
"""How much memory the content of a store process may take. The keys of a run take megabytes."""
SPARE_DESCRIPTORS = 64
"""The store process ends when fewer descriptors are left: it would accept and close every connection."""
WATCH_EVERY_S = 0.25
MAX_RESTARTS, RESTARTS_WITHIN_S = 5, 3600.0
CLOSE_S = 5.0
LOG_NAME = "rendezvous-store.log"


class RendezvousStoreLost(PicklableError, ConnectionError):
    """The run's rendezvous store cannot be reached, or ended while it was used."""

    error_code = "rendezvous_store"

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(
            f"the run's rendezvous store ({url}) failed: {problem}; the controller's log says why it ended"
        )
        self.url, self.problem = url, problem


def open_store(url: str, scope: str, timeout_s: float) -> "Store":
    """Opens the part of the run's store that is called `scope`. In a folder it is a file of its own, so that keys of
    other scopes cost nothing; in a TCPStore it is a prefix, over a connection of its own.

    Args:
        url: `file://` and a folder, or `tcp://HOST:PORT`.
        timeout_s: limit of connecting, and of every operation that torch waits for.

    Raises:
        RendezvousStoreLost: the store cannot be reached.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    where, bound = urlsplit(url), timedelta(seconds=timeout_s)
    try:
        if where.scheme == "file":
            path = scope_file(url, scope)
            os.close(open_file(path))
            files = FileStore(str(path))
            files.set_timeout(bound)
            return PrefixStore(scope, files)
        assert where.hostname is not None and where.port is not None, url
        host, port, why = where.hostname, where.port, "rendezvous store of the run"
        with track_wait("store", where.netloc, why, timeout_s):
            # torch waits for the answer of a server that accepts connections without any bound.
            opening = waits.run_in_thread(lambda: TCPStore(host, port, is_master=False, timeout=bound), "open store")
            return PrefixStore(scope, waits.future(opening, waits_for=where.netloc, why=why, timeout_s=timeout_s + 1))
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        raise RendezvousStoreLost(url, first_line(error)) from error


def scope_file(url: str, scope: str) -> Path:
    """The file of a scope of a store in a folder."""
    return Path(unquote(urlsplit(url).path), quote(scope, safe=""))


def delete_scope(url: str, scope: str) -> None:
    """Deletes a scope that no process uses any more. Does nothing for a TCPStore, whose users delete their keys."""
    if urlsplit(url).scheme == "file":
        scope_file(url, scope).unlink(missing_ok=True)


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Raises RendezvousStoreLost if the connection to the store breaks within the context."""
    import torch.distributed as dist

    try:
        yield
    except dist.DistNetworkError as error:
        raise RendezvousStoreLost(url, first_line(error)) from error


class RendezvousStore(Protocol):
    """The controller's end of the store: starts it and keeps it available."""

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it listens; None if it does not listen."""

    def serve(self) -> str:
        """Starts the store if needed; its URL. Any thread may call. Raises RendezvousStoreLost."""

    def check(self) -> None:
        """Replaces the store if it has ended. Called twice a second."""

    def close(self) -> None:
        """Ends the store. Idempotent."""


def make_rendezvous_store(
    run: str, folder: Path, host: str, ports: PortRange | None, several_hosts: bool
) -> RendezvousStore:
    """The store of a run: files in the host's shared memory if possible.

    Args:
        folder: for the log of a store process.
        host: address at which all nodes reach this process.

    Raises:
        OSError: the store must listen, and cannot.
    """
    if several_hosts:
        return RendezvousStoreProcess(host, ports, folder)
    if not is_on_local_disk(run_shm_dir(run).parent):
        log.info("%s is on a network file system: the rendezvous store listens on %s", run_shm_dir(run).parent, host)
        return RendezvousStoreProcess(host, ports, folder)
    return FileRendezvousStore(run)


class FileRendezvousStore:
    """Files (torch's FileStore) in a folder with mode 0700 in the run's shared memory, which is removed with it."""

    address = None

    def __init__(self, run: str) -> None:
        self._run = run

    def serve(self) -> str:
        folder = run_shm_dir(self._run) / "rendezvous"
        if folder.parent.is_dir():  # otherwise the run has ended, and no worker can be started
            make_private_dir(folder, "choose another run id")
        return folder.as_uri()

    def check(self) -> None:
        """Files need no process."""

    def close(self) -> None:
        """The files are removed with the run's shared memory."""


class RendezvousStoreProcess:
    """A process that serves a torch TCPStore. Its port listens from the start, so that other nodes can test their
    connection, and keeps listening while a process that has ended is replaced.

    Raises:
        OSError: the address is not this host's, or no port is free.
    """

    def __init__(self, host: str, ports: PortRange | None, folder: Path) -> None:
        self._listening = listen(host, ports, backlog=4096)
        self.address: tuple[str, int] = host, self._listening.getsockname()[1]
        self._log = folder / LOG_NAME
        self._process: subprocess.Popen[bytes] | None = None
        self._ends: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._failed = ""
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        host, port = self.address
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    @property
    def pid(self) -> int | None:
        """The process's pid; None before it was started."""
        return None if self._process is None else self._process.pid

    def serve(self) -> str:
        with self._lock:
            if self._failed:
                raise RendezvousStoreLost(self.url, self._failed)
            if self._process is None:
                self._process = self._start()
        return self.url

    def check(self) -> None:
        with self._lock:
            process = self._process
            if process is None or self._failed or (code := process.poll()) is None:
                return
            why = f"its process (pid {process.pid}) {self._why(code)}"
            now = time.monotonic()
            if len(self._ends) == MAX_RESTARTS and now - self._ends[0] < RESTARTS_WITHIN_S:
                self._failed = f"{why}, the {MAX_RESTARTS + 1}th time, and is not restarted"
                self._listening.close()  # so that clients that wait in its queue fail now
                log.error("the run's rendezvous store %s failed: %s", self.url, self._failed)
                return
            self._ends.append(now)
            log.error(
                "the run's rendezvous store %s ended: %s; restarting it. Communicators that exist continue, and ranks "
                "that were joining fail and are restarted",
                self.url, why,
            )  # fmt: skip
            self._process = self._start()

    def close(self) -> None:
        with self._lock:
            self._failed = self._failed or "the run has ended"
            self._listening.close()
            process = self._process
        if process is not None:
            process.kill()
            with suppress(WaitTimeout):
                waits.process(process, waits_for="rendezvous store", why="its end", timeout_s=CLOSE_S)

    def _start(self) -> "subprocess.Popen[bytes]":
        self._log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, (host, port) = self._listening.fileno(), self.address
        argv = [sys.executable, "-P", "-m", __name__]
        argv += [str(each) for each in (descriptor, host, port, MEMORY_BYTES, os.getpid())]
        with self._log.open("wb") as output:
            return subprocess.Popen(
                argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, pass_fds=[descriptor],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def _why(self, code: int) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "")
        how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
        return f"{how} ({last[:200]})" if last else how


# --- the process


def main() -> int:
    """Serves the store until the controller ends or a limit is reached."""
    descriptor, host, port, memory, parent = sys.argv[1:]
    most = raise_descriptor_limit() - SPARE_DESCRIPTORS
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        host, int(port), None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=int(descriptor)
    )
    own = psutil.Process()
    full = own.memory_info().rss + int(memory)
    # Beyond the measured limit, in case the memory grows fast: then torch's thread aborts the process.
    address_space = own.memory_info().vms + int(memory) + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while os.getppid() == int(parent):
        if (opened := own.num_fds()) > most:
            return _leave(f"{opened} open connections, which is the limit of descriptors of this process")
        if (used := own.memory_info().rss) > full:
            return _leave(f"its keys take {used >> 20} MiB, more than its limit")
        waits.sleep(WATCH_EVERY_S, why="the controller's end")
    del store
    return 0


def _leave(why: str) -> int:
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    # Skips the interpreter's exit, which torch's threads may delay.
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
