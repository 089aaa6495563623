"""A relay between two processes of a run: it forwards both directions, changed as a test says."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

Change = Callable[[bytes], bytes]


@dataclass
class Direction:
    """What passes from one end to the other."""

    seen: bytearray = field(default_factory=bytearray)
    """Everything that has been sent into the relay."""
    change: Change | None = None
    """What the relay forwards in place of what it received; b"" holds everything back."""
    out: socket.socket | None = None

    def pass_on(self, data: bytes) -> None:
        self.seen += data
        changed = data if self.change is None else self.change(data)
        self.inject(changed)

    def inject(self, data: bytes) -> None:
        assert self.out is not None
        with contextlib.suppress(OSError):
            self.out.sendall(data)


class Relay:
    """Listens on a port of its own, and forwards each connection to `target`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._server.getsockname()[:2]
        self.connections: list[tuple[Direction, Direction]] = []
        """Of each connection: to the listener, and from it."""
        self._wake, self._waked = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def to_listener(self) -> Direction:
        return self.connections[-1][0]

    @property
    def from_listener(self) -> Direction:
        return self.connections[-1][1]

    def close(self) -> None:
        self._wake.send(b"x")
        self._thread.join(5)
        assert not self._thread.is_alive()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for each in (self._server, self._wake, self._waked):
                stack.callback(each.close)
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._waked, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(5.0):
                    if key.fileobj is self._waked:
                        return
                    if key.fileobj is self._server:
                        self._accept(stack, selector)
                    else:
                        self._forward(key, selector)

    def _accept(self, stack: contextlib.ExitStack, selector: selectors.BaseSelector) -> None:
        near = stack.enter_context(self._server.accept()[0])
        try:
            far = stack.enter_context(socket.create_connection(self.target, timeout=5.0))
        except OSError:
            near.close()
            return
        pair = Direction(out=far), Direction(out=near)
        self.connections.append(pair)
        selector.register(near, selectors.EVENT_READ, (pair[0], far))
        selector.register(far, selectors.EVENT_READ, (pair[1], near))

    @staticmethod
    def _forward(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        direction, out = key.data
        try:
            data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
        except OSError:
            data = b""
        if data:
            direction.pass_on(data)
            return
        selector.unregister(key.fileobj)
        with contextlib.suppress(OSError):
            out.shutdown(socket.SHUT_WR)
