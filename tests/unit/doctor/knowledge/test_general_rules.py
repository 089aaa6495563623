"""Rules that hold for any program: addresses of both families, container networks, errors of the system, exit codes."""

from pathlib import Path

import pytest

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.watch.diagnosis.verdict import Verdict
from tests.unit.doctor.job_logs import steps, write


def judged(folder: Path, **files: list[str]) -> Verdict:
    return explain([write(folder, **files)]).verdict


def names(verdict: Verdict) -> list[int | str]:
    return [each.rank if each.rank is not None else each.name for each in verdict.culprits]


@pytest.mark.parametrize(
    ("line", "cause", "address"),
    [
        (
            "misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to fd00:7::21<40861> returned 113(No route to host)",
            "network_blocked",
            "fd00:7::21",
        ),
        (
            "RuntimeError: [/src/gloo/transport/tcp/pair.cc:534] Read error [fd00:7::21]:2154: Connection timed out",
            "network_blocked",
            "fd00:7::21",
        ),
        (
            "error timed out connecting, remote=[::ffff:10.7.0.21]:1234, error=SO_ERROR: Connection timed out, "
            "remote=[::ffff:10.7.0.21]:1234",
            "network_blocked",
            "10.7.0.21",
        ),
        (
            "[c10d] The client socket has timed out after 90000ms while trying to connect to (fd00:7::1, 29511).",
            "master_unreachable",
            "fd00:7::1",
        ),
        (
            "[W socket.cpp:7] [c10d] The client socket has failed to connect to [fd00:7::1]:29511 (errno: 110 - "
            "Connection timed out).",
            "master_unreachable",
            "fd00:7::1",
        ),
        (
            "[E socket.cpp:9] [c10d] The server socket has failed to bind to [fd00:7::1]:29511 (errno: 99 - Cannot "
            "assign requested address).",
            "master_unreachable",
            "fd00:7::1",
        ),
    ],
)
def test_a_peer_with_an_address_of_ipv6(tmp_path: Path, line: str, cause: str, address: str) -> None:
    verdict = judged(tmp_path, job=[f"[rank2]: {line}"])
    assert verdict.cause == cause and names(verdict) == [address]


def test_a_bridge_of_containers_between_hosts(tmp_path: Path) -> None:
    def host(name: str) -> list[str]:
        return [f"{name}:88:88 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>", f"{name}: started"]

    refused = "n-1:88:99 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.19.0.1<4182> failed : {}"
    one = host("n-1") + [refused.format("Connection refused")]
    assert judged(tmp_path / "two", a=one, b=host("n-2")).cause == "wrong_network_interface"
    assert judged(tmp_path / "one", a=one).cause != "wrong_network_interface"
    pool = "failed to create network job: could not find an available, non-overlapping IPv4 address pool among the defaults"
    assert judged(tmp_path / "pool", job=[pool]).cause == "wrong_network_interface"


def test_a_job_that_succeeds_has_no_wrong_interface(tmp_path: Path) -> None:
    lines = ["n-1:88:88 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>", *steps(0, 20), "training finished"]
    assert judged(tmp_path, job=lines).cause == "benign"
