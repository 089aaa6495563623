"""When the controller takes a call relay for silent."""

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection
from lockstep.cluster.rpc.relayed_connection import CallRelayLink

TOKEN = secrets.token_hex(32)
LIMIT_S = 0.4


@pytest.fixture
def ends() -> Iterator[tuple[CallRelayLink, Connection]]:
    """The controller's end, and the relay's."""
    with auth_handshake.Listener(TOKEN, "run", 1) as listener, ThreadPoolExecutor() as pool:
        accepted = pool.submit(listener.accept, 10.0)
        relay = auth_handshake.connect("127.0.0.1", listener.port, token=TOKEN, run="run", generation=1, name="relay")
        controller = accepted.result(timeout=10)
        assert controller is not None
        with controller, relay:
            link = CallRelayLink(controller, lambda _: None)
            link.heartbeat.limit_s = LIMIT_S
            yield link, relay


def silent_within(link: CallRelayLink, seconds: float, relay: Connection | None = None) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if relay is not None:
            relay.flush()
        assert link.connection.recv(0) is None, "the frame is longer than the time"
        if link.is_silent():
            return True
        time.sleep(0.05)
    return False


def test_a_relay_is_not_silent_while_a_large_frame_arrives(ends: tuple[CallRelayLink, Connection]) -> None:
    """Its reports are behind the frame, which takes longer than the limit."""
    link, relay = ends
    relay.queue(bytes(256 << 20))
    assert not silent_within(link, 3 * LIMIT_S, relay)
    assert silent_within(link, 3 * LIMIT_S), "it sends nothing more"
