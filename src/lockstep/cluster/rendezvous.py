"""The store at which the ranks and couriers of a run meet."""

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.watch.ports import Ports, listen

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


class RendezvousStore:
    """A torch TCPStore that this process serves once somebody asks for it, as torch takes seconds to import. Its port
    listens from the beginning: others may try whether they get there.

    Raises:
        OSError: there is no such address here, or no port left.
    """

    def __init__(self, host: str, ports: Ports | None) -> None:
        self._listening = listen(host, ports, backlog=4096)
        self.address: tuple[str, int] = host, self._listening.getsockname()[1]
        self._store: TCPStore | None = None
        self._lock = threading.Lock()

    def serve(self) -> tuple[str, int]:
        """Its address, from where it answers from now on. From any thread."""
        with self._lock:
            if self._store is None:
                from torch.distributed import TCPStore  # type: ignore[attr-defined]

                host, port = self.address
                self._store = TCPStore(
                    host, port, None, True, timedelta(seconds=60), wait_for_workers=False,
                    master_listen_fd=self._listening.detach(),
                )  # fmt: skip
        return self.address

    def close(self) -> None:
        self._store = None
        self._listening.close()
