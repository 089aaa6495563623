"""Clients of a reward server that leave, send nothing, or send what has no tokens."""

import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import normalizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.base.network import listen
from lockstep.config.model import ModelConfig
from lockstep.models.tiny_model import make_tiny
from lockstep.report import server_connections
from lockstep.report.server_connections import SPARE_DESCRIPTORS, possible_connections
from lockstep.run.trained_models.local_reward_model import LocalRewardModel
from lockstep.run.trained_models.reward_server import RewardServer, ServerLimits, http_server

HEADER_S = 0.7
TOKEN = "3f9a0c51e7d28b64"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


class GatedModel(LocalRewardModel):
    """Computes only while `gate` is set."""

    gate, entered = threading.Event(), threading.Event()

    def score(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        self.entered.set()
        assert self.gate.wait(20)
        return super().score(texts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GatedModel:
    home = tmp_path_factory.mktemp("served")
    shape: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32, "max_length": 32}
    make_tiny(home / "lm", **shape, alphabet="0123456789=")
    scorer = AutoModelForSequenceClassification.from_pretrained(home / "lm", num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(home / "rm")
    AutoTokenizer.from_pretrained(home / "lm").save_pretrained(home / "rm")
    return GatedModel(ModelConfig(path=str(home / "rm")), torch.device("cpu"), 64)


@pytest.fixture
def url(model: GatedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that has four connections at most, and waits for headers for less than a second."""
    monkeypatch.setattr(server_connections, "HEADER_S", HEADER_S)
    with serving(model, ServerLimits(connections=5)) as url:
        yield url


@contextmanager
def serving(model: GatedModel, limits: ServerLimits) -> Iterator[str]:
    model.gate.set()
    server = http_server(RewardServer(model, "rm", TOKEN, limits))
    listening = listen("127.0.0.1", (0, 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        model.gate.set()
        server.should_exit = True
        thread.join(20)
        listening.close()
    assert not thread.is_alive()


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=10)


def request(body: bytes, token: str = TOKEN, size: int | None = None) -> bytes:
    head = f"POST /pooling HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-length: {size or len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def metric(url: str, name: str) -> int:
    found = httpx.get(f"{url}/metrics", headers=HEADERS, timeout=10).text
    return int(dict(line.rsplit(" ", 1) for line in found.splitlines()).get(f"lockstep_reward_{name}", "0"))


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def seconds_until_closed(peer: socket.socket, trickle: bytes = b"") -> float:
    """How long the server keeps the connection, on which the client sends single bytes."""
    began = time.monotonic()
    peer.settimeout(0.05)
    while time.monotonic() < began + 10:
        try:
            if not peer.recv(4096):
                break
        except TimeoutError:
            pass
        except ConnectionError:
            break
        if trickle:
            try:
                peer.sendall(trickle[:1])
            except ConnectionError:
                break
            trickle = trickle[1:]
    return time.monotonic() - began


def test_what_waits_for_a_client_that_left_is_not_computed(url: str, model: GatedModel) -> None:
    model.gate.clear()
    with connect(url) as staying:
        staying.sendall(request(b'{"input": ["1"]}'))
        until(lambda: metric(url, 'requests_total{path="/metrics",status="200"}') > 0, "the server answers")
        with connect(url) as leaving:
            leaving.sendall(request(b'{"input": ["2", "3", "4"]}'))
            until(lambda: metric(url, "waiting_texts") == 3, "the second request waits")
        until(lambda: metric(url, "waiting_texts") == 0, "the second request is forgotten")
        assert metric(url, 'requests_total{path="/pooling",status="499"}') == 1
        time.sleep(1.5 * HEADER_S)  # a request in progress may take longer than its header
        model.gate.set()
        assert staying.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert metric(url, "texts_total") == 1


def test_connections_without_a_request_neither_stay_nor_keep_others_out(url: str) -> None:
    silent = [connect(url) for _ in range(12)]
    assert httpx.get(f"{url}/health", timeout=5).status_code == 200
    assert max(seconds_until_closed(peer) for peer in silent) < HEADER_S + 1
    for peer in silent:
        peer.close()


@pytest.mark.parametrize(
    ("sent", "trickle"),
    [
        (b"", b"GET /health HTTP/1.1\r\nx: " + b"x" * 500),
        (request(b"", token="wrong", size=1 << 20), b"1" * 500),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"G" * 500),
    ],
    ids=["header", "refused body", "second header"],
)
def test_single_bytes_do_not_keep_a_connection(url: str, sent: bytes, trickle: bytes) -> None:
    with connect(url) as peer:
        peer.sendall(sent)
        assert 0.5 * HEADER_S < seconds_until_closed(peer, trickle) < HEADER_S + 1


def test_a_client_that_does_not_read_its_answers_is_closed(url: str) -> None:
    ask = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with connect(url) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setblocking(False)
        closed, began, sent = False, time.monotonic(), 0
        while not closed and time.monotonic() < began + 10:
            try:
                sent += peer.send((ask * 100)[sent % len(ask) :])
            except BlockingIOError:
                time.sleep(0.02)
            except ConnectionError:
                closed = True
    assert closed and sent > 1000 * len(ask)


def test_a_connection_is_used_again(url: str) -> None:
    with httpx.Client(headers=HEADERS, timeout=10) as client:
        for _ in range(4):
            assert client.post(f"{url}/pooling", json={"input": ["1"]}).status_code == 200
            time.sleep(0.4 * HEADER_S)
    assert metric(url, 'requests_total{path="/pooling",status="200"}') == 4


def test_a_text_without_tokens_is_refused(url: str, model: GatedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.tokenizer.backend_tokenizer, "normalizer", normalizers.Strip())
    body = {"input": ["1", " "], "add_special_tokens": False}
    refused = httpx.post(f"{url}/pooling", json=body, headers=HEADERS, timeout=10)
    assert (refused.status_code, refused.json()) == (400, {"error": "text 1 has no tokens"})
    assert metric(url, "texts_total") == 0


def test_each_completion_may_have_a_connection(model: GatedModel) -> None:
    """OpenRLHF opens one for each, and gives up after five attempts in as many seconds."""
    possible_connections(ServerLimits().connections)
    with serving(model, ServerLimits()) as url, ExitStack() as stack:
        model.gate.clear()
        model.entered.clear()
        peers = [stack.enter_context(connect(url)) for _ in range(600)]
        for number, peer in enumerate(peers):
            peer.sendall(request(b'{"input": ["%d"]}' % number))
            assert number or model.entered.wait(20)
        until(lambda: metric(url, "waiting_texts") == 599, "the others wait for the model")
        model.gate.set()
        for peer in peers:
            peer.settimeout(30)
            assert peer.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert metric(url, "texts_total") == 600


def test_few_requests_are_read_at_once_and_only_with_the_token(model: GatedModel) -> None:
    body, limits = b'{"input": ["1"]}', ServerLimits(reading=2, body_s=2.0)
    with serving(model, limits) as url, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(url)).sendall(request(body[:4], token="wrong", size=len(body)))
        slow = [stack.enter_context(connect(url)) for _ in range(2)]
        for peer in slow:
            peer.sendall(request(body[:4], size=len(body)))
        until(lambda: metric(url, 'requests_total{path="/pooling",status="401"}') == 3, "the wrong token is refused")
        third = stack.enter_context(connect(url))
        third.sendall(request(body))
        third.settimeout(0.5)
        with pytest.raises(TimeoutError):
            third.recv(4096)
        slow[0].sendall(body[4:])
        for peer in (slow[0], third):
            peer.settimeout(10)
            assert peer.recv(4096).startswith(b"HTTP/1.1 200 "), "its turn comes when another has been read"
        assert slow[1].recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_request_whose_turn_does_not_come_is_asked_to_come_again(model: GatedModel) -> None:
    """The bodies of the first and then of the second do not arrive."""
    body, limits = b'{"input": ["1"]}', ServerLimits(reading=1, body_s=2.0)
    with serving(model, limits) as url, ExitStack() as stack:
        httpx.get(f"{url}/health", timeout=10)
        peers = [stack.enter_context(connect(url)) for _ in range(3)]
        for peer, sent in zip(peers, (body[:4], body[:4], body), strict=True):
            peer.sendall(request(sent, size=len(body)))
            time.sleep(0.2)
        answers = [peer.recv(4096) for peer in peers]
    assert [answer.split()[1] for answer in answers] == [b"408", b"408", b"503"]
    assert b"retry-after: 1" in answers[2].lower() and b"1 request" in answers[2]


FLOOD = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
end, opened = time.monotonic() + 2, []
while time.monotonic() < end:
    if len(opened) < 1500:
        opened.append(socket.socket())
        opened[-1].setblocking(False)
        opened[-1].connect_ex(("127.0.0.1", int(sys.argv[1])))
    else:
        time.sleep(0.2)
        opened.clear()
"""


def test_clients_that_only_connect_use_up_no_descriptors(model: GatedModel, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(list(Path("/proc/self/fd").iterdir())) + 100 + SPARE_DESCRIPTORS
    with serving(model, ServerLimits(connections=100)) as url:
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(few, hard), hard))
        try:
            subprocess.run([sys.executable, "-c", FLOOD, str(httpx.URL(url).port)], check=True, timeout=60)
            assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "out of system resource" not in caplog.text


def test_connections_are_as_many_as_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connections, "raise_descriptor_limit", lambda: 1024)
    assert possible_connections(2048) == 1024 - SPARE_DESCRIPTORS
    assert possible_connections(16) == 16
