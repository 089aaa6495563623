"""The dashboard's server under slow and hostile clients."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.base.network import listen
from lockstep.ledger import Ledger
from lockstep.report import server_connections
from lockstep.report.dashboard import event_stream
from lockstep.report.dashboard.dashboard_server import HEADER_BYTES, DashboardServer, http_server_of
from lockstep.report.dashboard.run_catalogue import RunCatalogue

pytest.importorskip("fastapi")
TOKEN = "5f1c0e7a92d84b36a1c7"
AUTHORIZATION = {"authorization": f"Bearer {TOKEN}"}
QUICK_S = 5.0
"""An answer on a busy machine."""
HEADER_S = 1.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Ledger.create(tmp_path / "run", {"recipe": "grpo", "name": "run", "steps": 5}) as ledger:
        ledger.record_event("start")
        ledger.record_metrics(0, {"reward/mean": 1.0})
        ledger.commit(0, {})
    return tmp_path / "run"


@pytest.fixture
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DashboardServer, int]]:
    """A server, and its port."""
    monkeypatch.setattr(server_connections, "HEADER_S", HEADER_S)
    application = DashboardServer(RunCatalogue([folder]), TOKEN, "127.0.0.1")
    server, listening = http_server_of(application), listen("127.0.0.1", (0, 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield application, listening.getsockname()[1]
    server.should_exit = True
    thread.join(20)
    listening.close()
    application.close()
    assert not thread.is_alive()


def get(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, str, float]:
    """Status, body, seconds."""
    began = time.monotonic()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", path, headers=AUTHORIZATION if headers is None else headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), time.monotonic() - began


def first_run(port: int) -> str:
    return get(port, "/api/runs")[1].partition('"id":"')[2].partition('"')[0]


def request_bytes(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


def is_closed(connection: socket.socket, within_s: float) -> bool:
    """Whether the server closes the connection within that time, when nothing is read before."""
    time.sleep(within_s)
    connection.settimeout(10)
    try:
        while connection.recv(1 << 20):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_a_client_that_never_reads_its_events_is_dropped(
    served: tuple[DashboardServer, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    application, port = served
    monkeypatch.setattr(event_stream, "READ_S", 0.01)
    run = first_run(port)
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.connect(("127.0.0.1", port))
        lazy.sendall(request_bytes(f"/api/events?run={run}"))
        time.sleep(0.5)
        before = psutil.Process().memory_info().rss
        deadline = time.monotonic() + 3 * HEADER_S
        while time.monotonic() < deadline:
            application.events._publish(run, "step", {"text": "x" * 20_000})
            time.sleep(0.001)
        assert application.events._bytes <= event_stream.RING_BYTES
        assert psutil.Process().memory_info().rss - before < 4 * event_stream.RING_BYTES
        assert get(port, "/api/runs")[2] < QUICK_S
        assert is_closed(lazy, 0.0)


def test_silent_connections_leave_it_answering(served: tuple[DashboardServer, int]) -> None:
    _, port = served
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(300)]
        status, _, seconds = get(port, "/api/runs")
        assert status == 200 and seconds < QUICK_S
        assert is_closed(idle[-1], 2 * HEADER_S)


@pytest.mark.parametrize(
    "request_text",
    [
        "GARBAGE\r\n\r\n",
        "GET /api/runs HTTP/1.1\r\n\r\n",
        "GET /api/runs HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        "POST /api/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: localhost\r\nX: {'x' * (16 * HEADER_BYTES)}\r\n\r\n",
        f"GET /api/runs?{'x' * (16 * HEADER_BYTES)} HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["garbage", "no host", "two hosts", "a body", "a long header", "a long address"],
)
def test_wrong_and_large_requests_are_refused(served: tuple[DashboardServer, int], request_text: str) -> None:
    _, port = served
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.settimeout(10)
        connection.sendall(request_text.encode())
        answer = connection.recv(65536)
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:200]
    assert get(port, "/api/runs")[0] == 200


def test_a_page_of_another_site_gets_nothing(served: tuple[DashboardServer, int]) -> None:
    """By a name that leads here (DNS rebinding), or by a request across origins, which has no token."""
    _, port = served
    assert get(port, "/", {"host": "evil.example"})[0] == 421
    assert get(port, "/api/runs", {**AUTHORIZATION, "host": f"evil.example:{port}"})[0] == 421
    status, body, _ = get(port, "/api/runs", {"origin": "http://evil.example", "cookie": f"token={TOKEN}"})
    assert status == 401 and "reward" not in body


def test_guesses_of_the_token_learn_nothing(served: tuple[DashboardServer, int]) -> None:
    _, port = served
    bodies = {
        get(port, "/api/runs", {"authorization": f"Bearer {guess}"})[1] for guess in ("", "x", TOKEN[:-1], TOKEN + "0")
    }
    assert len(bodies) == 1 and TOKEN not in bodies.pop()


def test_text_of_a_run_stays_text(served: tuple[DashboardServer, int], folder: Path) -> None:
    """Names, metrics and messages with markup are JSON, which no browser takes for a page."""
    _, port = served
    with Ledger.resume(folder) as ledger:
        ledger.commit(0, {})
        ledger.record_metrics(0, {"<img src=x onerror=alert(1)>": 1.0})
        ledger.record_event("end", reason="</script><script>alert(1)</script>", steps=1)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for path in ("/api/runs", f"/api/runs/{first_run(port)}/metrics"):
            connection.request("GET", path, headers=AUTHORIZATION)
            answer = connection.getresponse()
            assert b"<" in answer.read() and answer.headers["content-type"] == "application/json"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "script-src 'self'" in str(answer.headers["content-security-policy"])
