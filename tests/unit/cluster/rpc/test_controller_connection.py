"""The worker's I/O thread beside a main thread that closes its connection."""

import threading
from collections.abc import Iterator

import pytest

from lockstep.base.transport import auth_handshake
from lockstep.base.transport.run_token import new_run_token
from lockstep.cluster.rpc.controller_connection import ControllerConnection
from lockstep.watch.agent.service_discovery import Leader

RUN = "closed-connection-test"


@pytest.fixture
def controller() -> Iterator[ControllerConnection]:
    """A worker's connection to a controller that accepts everybody, without the I/O thread: the test plays it."""
    token, over, accepted = new_run_token(), threading.Event(), []
    with auth_handshake.Listener(token, RUN, 1, name="controller") as listener:

        def accept() -> None:
            while not over.is_set():
                accepted.append(listener.accept(0.1))

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield ControllerConnection(
            RUN, "worker-0", token, Leader(1, listener.host, listener.port, None, None, 60.0, 60.0)
        )
        over.set()
        accepting.join(10)


@pytest.mark.parametrize("left", [b"", b"a result"], ids=["all written", "data left"])
@pytest.mark.parametrize("watched", [False, True])
def test_the_io_thread_reconnects_when_the_main_thread_has_just_closed_the_connection(
    controller: ControllerConnection, watched: bool, left: bytes
) -> None:
    """The main thread closes a connection on which it cannot send a result, and only then takes it away."""
    controller._connect()
    if watched:
        controller._select()
    connection = controller._connection
    assert connection is not None
    if left:
        connection.queue(left)
    connection.close()
    controller._select()
    controller._drop(connection, "the connection broke")
    assert controller._connection is None
    controller._connect()
    controller._select()
    assert controller._connection is not None
    assert not controller._connection.closed
