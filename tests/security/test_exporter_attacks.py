"""The Prometheus endpoint of a run under idle, slow and hostile clients."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from intruder import Intruder

from lockstep.config.run_config import PrometheusConfig
from lockstep.report import metrics_server
from lockstep.report.metrics_server import HEADER_BYTES, MAX_CONNECTIONS, MetricsServer
from lockstep.report.trackers import PrometheusExporter

pytest.importorskip("prometheus_client")
QUICK_S = 2.0
"""An answer on a busy machine."""


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    made = PrometheusExporter(PrometheusConfig(port=0), "mine")
    made.write(0, {"reward/mean": 0.5})
    yield made
    made.close()


@pytest.fixture
def intruder() -> Iterator[Intruder]:
    made = Intruder()
    yield made
    made.close()


def scrape(exporter: PrometheusExporter, path: str = "/metrics", method: str = "GET") -> tuple[int, str, float]:
    """Status, body, seconds."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=10)
    try:
        connection.request(method, path, headers={"Accept": "text/plain;version=0.0.4"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), time.monotonic() - began
    finally:
        connection.close()


def opened(exporter: PrometheusExporter) -> int:
    """Connections to the exporter that this process holds open at the exporter's end."""
    found = psutil.Process().net_connections("tcp")
    return sum(each.status == "ESTABLISHED" and each.laddr.port == exporter.port for each in found)


def test_idle_connections_and_garbage_leave_it_answering(exporter: PrometheusExporter, intruder: Intruder) -> None:
    threads = threading.active_count()
    intruder.attack(("127.0.0.1", exporter.port), idle=500)
    status, body, seconds = scrape(exporter)
    assert status == 200 and 'lockstep_reward_mean{run="mine"} 0.5' in body
    assert seconds < QUICK_S
    assert opened(exporter) <= MAX_CONNECTIONS and threading.active_count() <= threads


def test_a_request_in_pieces_has_a_limit(exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes soon after the last, without end; other requests are answered meanwhile."""
    monkeypatch.setattr(metrics_server, "REQUEST_S", 1.0)
    slow = [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(30)]
    began, ended = time.monotonic(), {}
    for each in slow:
        each.sendall(b"GET /metrics HTTP/1.1\r\n")
        each.setblocking(False)
    while len(ended) < len(slow):
        assert time.monotonic() - began < 20
        for number, each in enumerate(slow):
            try:
                each.send(b"X")
                if number not in ended and not each.recv(1):
                    ended[number] = time.monotonic() - began
            except BlockingIOError:
                continue
            except OSError:
                ended.setdefault(number, time.monotonic() - began)
        time.sleep(0.05)
    assert scrape(exporter)[2] < QUICK_S
    assert min(ended.values()) > 0.5 and max(ended.values()) < 1.0 + 2 * QUICK_S
    for each in slow:
        each.close()


def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 1.0)
    server = MetricsServer("127.0.0.1", 0, lambda accept: (bytes(64 << 20), "text/plain"))
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as silent:
            silent.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert silent.recv(8) == b"HTTP/1.1"
            time.sleep(2.5)
            received = 0
            with contextlib.suppress(ConnectionError):
                while part := silent.recv(1 << 20):
                    received += len(part)
            assert received < 64 << 20
    finally:
        server.close()


def test_large_and_wrong_requests_are_refused(exporter: PrometheusExporter) -> None:
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=10) as large:
        large.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"a" * (HEADER_BYTES - 100))
        large.sendall(b"a" * 200)
        assert large.recv(100).startswith(b"HTTP/1.1 431 ")
    assert scrape(exporter, "/")[0] == 404
    assert scrape(exporter, method="POST")[0] == 405
    assert scrape(exporter, method="HEAD")[:2] == (200, "")


def test_metrics_are_written_as_fast_under_attack(exporter: PrometheusExporter) -> None:
    """A run writes its metrics in the thread that makes the steps."""
    stop = threading.Event()

    def connect() -> None:
        while not stop.is_set():
            for each in [socket.create_connection(("127.0.0.1", exporter.port)) for _ in range(50)]:
                each.close()

    attacker = threading.Thread(target=connect, daemon=True)
    attacker.start()
    try:
        began = time.monotonic()
        for step in range(100):
            exporter.write(step, {f"metric/{number}": 1.0 for number in range(50)})
        assert time.monotonic() - began < QUICK_S
    finally:
        stop.set()
        attacker.join(10)
