"""Head and probes of a check, where the other side has another version, is broken, or is hostile."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, WireError
from lockstep.doctor.check.cluster import host_comparison, host_pairs, rendezvous_rules
from lockstep.doctor.check.cluster.probe_rendezvous import CheckHead, ProbeRendezvous
from lockstep.doctor.check.probe import probe_protocol
from lockstep.doctor.check.probe.host_probe import ProbeDismissed, ProbeNotJoined, serve_probe
from lockstep.doctor.check.probe.probe_protocol import (
    CHECK_RUN,
    PROTOCOL_VERSION,
    ProbeInfo,
    ProtocolVersion,
    own_protocol_version,
    receive_message,
    send_message,
)
from lockstep.report.command_events import TERMINAL

TOKEN = "5f0c2b7be4a8913d6e7f20c1a9d84b36"
HOME = "127.0.0.1"
HOST_INFO = asdict(ProbeInfo("odd", "odd", HOME))
DEEPLY_NESTED = b"[" * 200_000


class FakeProbeLauncher:
    """Starts one real probe, `good`, and a fake one, `odd`, that sends the given answers."""

    hosts = ("good", "odd")
    addresses: Mapping[str, str] = {}

    def __init__(self, *answers: bytes | dict[str, Any], greeting: dict[str, Any] | None = None) -> None:
        self._answers = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in answers]
        self._greeting = asdict(own_protocol_version()) if greeting is None else greeting
        self.received: list[dict[str, Any]] = []
        self._threads: list[threading.Thread] = []

    def start(self, head: str, port: int, token: str) -> None:
        def good() -> None:
            with contextlib.suppress(ProbeDismissed):
                serve_probe(head, port, token, "good", None, host_comparison.answer_facts_order)

        def odd() -> None:
            with dialled(port) as connection, contextlib.suppress(WireError):
                send_message(connection, self._greeting)
                for answer in self._answers:
                    self.received.append(receive_message(connection, 10.0) or {})
                    connection.send(answer, timeout_s=5.0)
                while (order := receive_message(connection, 10.0)) is not None:
                    self.received.append(order)

        self._threads = [threading.Thread(target=each, daemon=True) for each in (good, odd)]
        for thread in self._threads:
            thread.start()

    def failed(self) -> Mapping[str, str]:
        return {}

    def stop(self) -> None:
        for thread in self._threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self._threads)


def dialled(port: int) -> Connection:
    return auth_handshake.connect(
        HOME, port, token=TOKEN, run=CHECK_RUN, generation=0, name="odd", timeout_s=5.0, max_frame=1 << 24
    )


def rendezvous_with(
    launcher: FakeProbeLauncher, then: Callable[[CheckHead, ProbeRendezvous], Any] = lambda head, rendezvous: None
) -> tuple[ProbeRendezvous, Any]:
    try:
        with CheckHead(TOKEN, HOME) as head:
            rendezvous = head.gather(launcher, bound_s=5.0, kernels=1)
            return rendezvous, then(head, rendezvous)
    finally:
        launcher.stop()


@pytest.mark.parametrize(
    "info",
    [
        {}, DEEPLY_NESTED, b"\xff", b"3", {**HOST_INFO, "hostname": 5}, {**HOST_INFO, "address": "nonsense.invalid"},
        {**HOST_INFO, "resolves_to": 3}, {**HOST_INFO, "ports": {"x": "y"}}, {**HOST_INFO, "ports": {"x": 70000}},
        {**HOST_INFO, "taken": {"x": "y"}}, {**HOST_INFO, "interfaces": [1, 2]}, {"error": "no such thing"},
        {**HOST_INFO, "hostname": "h" * 100_000},
    ],
)  # fmt: skip
def test_only_the_probe_with_invalid_facts_is_dropped(info: bytes | dict[str, Any]) -> None:
    rendezvous, _ = rendezvous_with(FakeProbeLauncher(info))
    assert list(rendezvous.joined) == ["good"] and list(rendezvous.lost) == ["odd"]
    found = {each.id: each for each in rendezvous_rules.judge_rendezvous(rendezvous) if each.severity == "error"}
    assert found["rendezvous-lost"].host == "odd" and len(found["rendezvous-lost"].seen) < 1000


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"ms": [1.0], "failed": []}, {"ms": ["a", "b"], "failed": []}, {"ms": [0, 0], "failed": [{"peer": "x"}]},
        b'{"ms": [NaN, 1], "failed": []}', {"ms": [0, -1], "failed": []},
        {"ms": [0, 0], "failed": [{"peer": "nobody", "label": "1", "port": 1}]},
    ],
)  # fmt: skip
def test_a_probe_with_invalid_results_is_dropped_by_name(answer: bytes | dict[str, Any]) -> None:
    _, found = rendezvous_with(
        FakeProbeLauncher(HOST_INFO, answer),
        lambda head, rendezvous: host_pairs.test_host_pairs(head, rendezvous.joined),
    )
    assert list(found.lost) == ["odd"]


def test_a_probe_of_another_version_differs_from_a_missing_one() -> None:
    launcher = FakeProbeLauncher(greeting={"protocol": PROTOCOL_VERSION + 1, "lockstep": "7.0"})
    rendezvous, _ = rendezvous_with(launcher)
    assert list(rendezvous.joined) == ["good"] and not rendezvous.missing and not rendezvous.lost
    (found,) = (each for each in rendezvous_rules.judge_rendezvous(rendezvous) if each.id == "rendezvous-version")
    assert found.severity == "error" and found.host == "odd"
    assert "lockstep 7.0" in found.seen and f"lockstep {own_protocol_version().lockstep}" in found.seen
    assert launcher.received[0]["do"] == "leave" and "lockstep 7.0" in launcher.received[0]["why"]


@pytest.mark.parametrize("greeting", [{}, {"protocol": "x", "lockstep": 1}])
def test_a_probe_without_a_version_counts_as_another_version(greeting: dict[str, Any]) -> None:
    rendezvous, _ = rendezvous_with(FakeProbeLauncher(greeting=greeting))
    assert list(rendezvous.joined) == ["good"] and "unknown" in rendezvous.other_versions["odd"]


class FakeHead:
    """A head that sends a real probe the given orders and keeps its answers."""

    def __init__(self, *given: Mapping[str, Any]) -> None:
        self.answers: list[dict[str, Any]] = []
        self.lines: list[str] = []
        with auth_handshake.Listener(TOKEN, CHECK_RUN, 0, "head", HOME) as listener:
            self.port = listener.port
            thread = threading.Thread(target=self._serve, daemon=True)
            thread.start()
            connection = listener.accept(10.0)
            assert connection is not None
            with connection:
                self.greeting = receive_message(connection, 5.0)
                for order in given:
                    send_message(connection, order)
                    if order["do"] != "leave":
                        self.answers.append(receive_message(connection, 20.0) or {})
                if given and given[-1]["do"] == "leave":
                    thread.join(10)
            thread.join(10)
        assert not thread.is_alive()

    def _serve(self) -> None:
        try:
            serve_probe(HOME, self.port, TOKEN, "a", None, show=self.lines.append)
        except ProbeDismissed as error:
            self.lines.append(str(error))


def test_a_failed_order_is_answered_and_the_probe_continues() -> None:
    head = FakeHead(
        {"do": "card"}, {"do": "card", "ports": [0]}, {"do": "reach", "hosts": 3}, {"do": "rate", "target": []},
        {"do": "ranks", "what": "start"}, {"do": "card", "ports": [], "kernels": 1}, {"do": "leave"},
    )  # fmt: skip
    assert [set(each) for each in head.answers[:5]] == [{"error"}] * 5
    assert head.answers[5]["address"] == HOME
    assert head.greeting == asdict(own_protocol_version())


def test_a_probe_reports_how_it_ends() -> None:
    done = FakeHead({"do": "leave"})
    assert "joined the check" in done.lines[0] and "is complete" in done.lines[1]
    (_, dismissed) = FakeHead({"do": "leave", "why": "nobody expects it"}).lines
    assert "nobody expects it" in dismissed
    (_, disconnected) = FakeHead().lines
    assert "lost the connection" in disconnected
    lines: list[str] = []
    with socket.socket() as unused:
        unused.bind((HOME, 0))
        with pytest.raises(ProbeNotJoined):
            serve_probe(HOME, unused.getsockname()[1], TOKEN, "a", bound_s=0.5, show=lines.append)
    assert len(lines) == 1 and "refused" in lines[0].lower() and "trying for 0 s more" in lines[0]


# ---------------------------------------------------------------- limits on a head's orders

TASK = {
    "world": 2, "ranks": [0, 1], "host": HOME, "port": 0, "address": HOME, "device": "cpu", "bytes": 1 << 20,
    "bound_s": 20, "communicators": [], "serve": True, "command": "rm",
}  # fmt: skip


def test_a_head_can_set_only_the_listed_variables() -> None:
    for name in probe_protocol.RankVariable.__args__:  # type: ignore[attr-defined]
        probe_protocol.parse_start_ranks({"spec": TASK, "environment": {name: "1"}})
    for name in ("NCCL_NET_PLUGIN", "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "LD_PRELOAD", "PYTHONPATH", "GLOO_"):
        with pytest.raises(ValueError, match="environment"):
            probe_protocol.parse_start_ranks({"spec": TASK, "environment": {name: "/tmp/x.so"}})


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 1 << 40}, {"ranks": list(range(10_000))}, {"ranks": []}, {"bound_s": 1e9}, {"device": "x"},
        {"address": "somewhere.invalid"}, {"communicators": [{"name": "x", "backend": "mpi"}]}, {"bound_s": "nan"},
    ],
)  # fmt: skip
def test_orders_about_ranks_are_limited(change: dict[str, Any]) -> None:
    assert "command" not in probe_protocol.parse_start_ranks({"spec": TASK, "environment": {}}).spec.json()
    with pytest.raises(ValueError, match="spec"):
        probe_protocol.parse_start_ranks({"spec": {**TASK, **change}, "environment": {}})


def test_orders_about_peers_are_limited() -> None:
    reach = {"hosts": [("a", HOME, {"1": 1})], "dial_s": 1, "bound_s": 5, "lanes": 64}
    probe_protocol.parse_reach_order(reach)
    for change in ({"lanes": 10**6}, {"bound_s": 1e6}, {"hosts": [("a", "x.invalid", {})]}):
        with pytest.raises(ValueError):
            probe_protocol.parse_reach_order({**reach, **change})
    with pytest.raises(ValueError, match="seconds"):
        probe_protocol.parse_rate_order({"target": ("a", HOME, 1, "1"), "seconds": 1e9, "dial_s": 1})


# ---------------------------------------------------------------- arbitrary messages

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["ms", "failed", "lines", "rank", "pair", "ports", "hosts", "spec", "name", "address"])
            | st.text(max_size=4), inner, max_size=6,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([*HOST_INFO, *TASK, "ms", "failed", "lines", "hosts", "spec", "needs"]), _JSON))
@settings(max_examples=150, deadline=None)
def test_any_message_is_parsed_or_refused(message: dict[str, Any]) -> None:
    readers: list[Callable[[dict[str, Any]], object]] = [
        lambda each: probe_protocol.read_probe_info("a", each),
        lambda each: probe_protocol.reach_answer_reader(["a", "b"])("a", each),
        lambda each: probe_protocol.read_rate_answer("a", each),
        lambda each: probe_protocol.read_start_ranks_answer("a", each),
        lambda each: probe_protocol.await_ranks_answer_reader({"a": [0]}, 1)("a", each),
        probe_protocol.parse_card_order,
        probe_protocol.parse_reach_order,
        probe_protocol.parse_rate_order,
        probe_protocol.parse_start_ranks,
        probe_protocol.parse_await_ranks,
    ]
    for read in readers:
        with contextlib.suppress(ValueError):
            read({**message})


def test_a_probe_cannot_report_ranks_of_other_hosts() -> None:
    read = probe_protocol.await_ranks_answer_reader({"a": [0], "b": [1]}, 2)
    assert read("a", {"lines": [{"port": 4}, {"rank": 0, "at": "done"}]}).lines[0].at == "done"
    for line in ({"rank": 1, "at": "done"}, {"rank": 0, "pair": [0, 7]}):
        with pytest.raises(ValueError, match="does not belong to this host"):
            read("a", {"lines": [line]})


# ---------------------------------------------------------------- a listener that does not know the token

ESCAPES = "\x1b]0;pwned\x07\x1b[31mred"


@pytest.mark.parametrize("body", [json.dumps({"code": "token", "why": ESCAPES * 100}).encode(), b"[" * 60_000])
def test_joining_an_unrelated_server_ends_with_a_short_refusal(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((HOME, 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"LKSTEP\x02\n" + b"n" * 32)
                connection.recv(4096)
                reply = b"m" * 32 + body
                connection.sendall(struct.pack(">H", len(reply)) + reply)
                time.sleep(0.2)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ProbeNotJoined) as refused:
            serve_probe(HOME, server.getsockname()[1], TOKEN, "a", bound_s=2.0)
    assert len(str(refused.value)) < 600
    TERMINAL.refuse(refused.value)
    TERMINAL.note(str(refused.value))
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().err)


def test_a_long_greeting_is_shortened() -> None:
    assert len(str(ProtocolVersion(10**300, "x" * 10_000))) < 120
