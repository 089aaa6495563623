"""A slow judge over HTTP: `/drip/S` sends its answer over S seconds, `/think/S` answers after S seconds of silence, and
`/sometimes/S` sometimes does one or the other."""

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EVERY_S, PIECE = 0.05, b" " * 128
"""About the size of a language model's token sent as one event."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        _, how, seconds = self.path.split("/")
        answer = json.dumps({"rewards": [float(len(text) % 7) for text in asked.get("completions", [])]}).encode()
        if how == "sometimes":
            how = random.choice(("now",) * 8 + ("drip", "think"))
        pieces = int(float(seconds) / EVERY_S) if how == "drip" else 0
        try:
            if how == "think":
                time.sleep(float(seconds))
            self.send_response(200)
            self.send_header("content-length", str(pieces * len(PIECE) + len(answer)))
            self.end_headers()
            for _ in range(pieces):
                self.wfile.write(PIECE)
                time.sleep(EVERY_S)
            self.wfile.write(answer)
        except OSError:
            self.close_connection = True  # the client has disconnected

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def thinking() -> Iterator[str]:
    """Run a judge; yields its `host:port`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()
