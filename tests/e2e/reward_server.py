"""A real HTTP server on loopback whose replies a test defines."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    body: Any = ""
    """Sent as JSON unless it is bytes or text."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    drip_s: float = 0.0
    """Seconds between single bytes of the body."""


@dataclass
class Server:
    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests, in order of arrival."""
    headers: list[dict[str, str]] = field(default_factory=list)
    most: int = 0
    """The largest number of concurrent requests."""


@contextmanager
def serving(reply: Callable[[int, dict[str, Any], str], Reply | None]) -> Iterator[Server]:
    """Run a server; `reply(number of the request, body, path)` returns the reply, None closes the connection."""
    closing, lock = threading.Event(), threading.Lock()
    active = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal active
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(server.bodies)
                server.bodies.append(body)
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
                active += 1
                server.most = max(server.most, active)
            try:
                self._send(reply(number, body, self.path))
            except OSError:
                pass  # the client has gone
            finally:
                with lock:
                    active -= 1

        def _send(self, answer: Reply | None) -> None:
            if answer is None:
                self.close_connection = True
                return
            closing.wait(answer.after_s)
            raw = answer.body if isinstance(answer.body, bytes) else None
            raw = (
                raw
                if raw is not None
                else answer.body.encode()
                if isinstance(answer.body, str)
                else _dumps(answer.body)
            )
            self.send_response(answer.status)
            for name, value in {"content-length": str(len(raw)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            for start in range(0, len(raw), 1 if answer.drip_s else max(1, len(raw))):
                self.wfile.write(raw[start : start + 1] if answer.drip_s else raw)
                if answer.drip_s and closing.wait(answer.drip_s):
                    return

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: object) -> None:
            pass

    http = Quiet(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        closing.set()
        http.shutdown()
        thread.join(5)
        http.server_close()


def free_port() -> int:
    """A port on which no process listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def chat(text: str | None, **choice: Any) -> dict[str, Any]:
    """A chat completion."""
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **choice}]}


def now() -> float:
    return time.monotonic()
