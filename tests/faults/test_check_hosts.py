"""`lockstep check` between hosts, with network namespaces: hosts that do not join, closed ports, unusable addresses."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from needed_systems import needs_namespaces

from benchmarks.faults.network_namespaces import Cable, ip
from lockstep.cluster.local_cluster import LocalProbes
from lockstep.doctor.check.cluster import collective_test, host_pairs, rendezvous_rules
from lockstep.doctor.check.cluster.collective_test import OPERATIONS, PlannedCommunicator
from lockstep.doctor.check.cluster.probe_rendezvous import CheckHead, CombinedLauncher, ProbeRendezvous
from lockstep.doctor.check.probe import probe_protocol
from lockstep.doctor.check.probe.host_probe import host_interfaces
from lockstep.doctor.check.probe.peer_connections import PeerListener, host_responds
from lockstep.doctor.check.probe.probe_protocol import TOKEN_VARIABLE
from lockstep.doctor.output.findings import Finding

pytestmark = needs_namespaces

TOKEN = "5f0c2b7be4a8913d6e7f20c1a9d84b36"


@pytest.fixture
def cable() -> Iterator[Cable]:
    with Cable.any("ck", "10.80") as made:
        yield made


def probes(cable: Cable, *more: str) -> LocalProbes:
    """Probes of the host `here` in this network, `there` in the namespace, and `more` hosts in this network."""
    return LocalProbes({"here": (), "there": cable.inside, **dict.fromkeys(more, ())}, TOKEN_VARIABLE)


def gather(head: CheckHead, launcher: LocalProbes, ports: Sequence[int] = (), kernels: int = 2) -> ProbeRendezvous:
    return head.gather(launcher, ports=ports, kernels=kernels, bound_s=20.0)


def errors(findings: Sequence[Finding]) -> list[Finding]:
    return [each for each in findings if each.severity == "error"]


def test_two_hosts_join_and_pass_all_checks(cable: Cable) -> None:
    launcher = probes(cable)
    try:
        with CheckHead(TOKEN, cable.here) as head:
            rendezvous = gather(head, launcher)
            assert not errors(rendezvous_rules.judge_rendezvous(rendezvous))
            assert rendezvous.joined["there"].address == cable.there
            assert rendezvous.joined["there"].interface == cable.far

            found = host_pairs.test_host_pairs(head, rendezvous.joined)
            assert set(found.reached) == {("here", "there"), ("there", "here")} == set(found.mb_per_s)
            assert not found.blocked and found.took_s < host_pairs.PAIRS_TIMEOUT_S
            assert [each.severity for each in host_pairs.judge_pairs(found)] == ["ok"]

            ranks = ("policy-0", "policy-1", "policy-2")
            trainer = PlannedCommunicator("trainer", "gloo", ranks, OPERATIONS, "all")
            weights = PlannedCommunicator("weights", "gloo", (ranks[0], ranks[2]), ("broadcast",), "two of them")
            hosts = {"policy-0": "here", "policy-1": "here", "policy-2": "there"}
            tested = collective_test.run_self_test(head, rendezvous.joined, [trainer, weights], hosts, "cpu")
            assert tested.passed, tested.why_not
            found_there = collective_test.judge_collectives(tested)
            assert not errors(found_there)
            slowest = next(each for each in found_there if each.id == "slowest-pair")
            assert "policy-" in slowest.seen
    finally:
        launcher.stop()


def test_a_bridge_address_of_the_head_is_accepted_once_a_host_has_joined_through_it(cable: Cable) -> None:
    """As on hosts of virtual machines: the bridge has the address, and the network card is one of its ports."""
    bridge = f"br{cable.near}"
    launcher = probes(cable)
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "flush", "dev", cable.near)
        ip("link", "set", cable.near, "master", bridge)
        ip("addr", "add", f"{cable.here}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        (doubt,) = rendezvous_rules.judge_advertised_address(
            "here", cable.here, "the head", "", True, host_interfaces()
        )
        assert doubt.severity == "warning" and f"({bridge})" in doubt.seen
        with CheckHead(TOKEN, cable.here) as head:
            rendezvous = gather(head, launcher)
            assert set(rendezvous.joined) == {"here", "there"} and rendezvous_rules.reached_from_outside(rendezvous)
            assert not [each for each in rendezvous_rules.judge_rendezvous(rendezvous) if each.id == "head-address"]
    finally:
        launcher.stop()
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, timeout=20, check=False)


def test_ports_closed_by_a_firewall_are_reported_with_their_direction(cable: Cable) -> None:
    cable.drop_in((29500, 29500))
    launcher = probes(cable)
    try:
        with CheckHead(TOKEN, cable.here) as head:
            rendezvous = gather(head, launcher, ports=(29500, 29501))
            found = host_pairs.test_host_pairs(head, rendezvous.joined)
            assert found.took_s < host_pairs.PAIRS_TIMEOUT_S + 1
            (error,) = errors(host_pairs.judge_pairs(found))
            assert error.host == "there" and "here cannot reach port 29500 of there" in error.seen
            assert "packets are dropped" in error.seen and "open port 29500" in error.fix
    finally:
        launcher.stop()


def test_a_host_that_accepts_no_connections_joins_and_is_reported(cable: Cable) -> None:
    """The host can dial the head, but no host can dial it."""
    cable.drop_in((1024, 65534))
    # Replies on connections that the host has opened arrive at high ports, too: accept them.
    subprocess.run(
        ["ip", "-n", cable.name, "rule", "add", "pref", "40", "iif", cable.far, "ipproto", "tcp", "sport",
         "20000-20010", "lookup", "local"], check=True, timeout=10,
    )  # fmt: skip
    launcher = probes(cable)
    try:
        with CheckHead(TOKEN, cable.here, 20001) as head:
            rendezvous = gather(head, launcher, ports=(20002,), kernels=0)
            assert "there" in rendezvous.joined
            back = next(each for each in errors(rendezvous_rules.judge_rendezvous(rendezvous)) if each.host == "there")
            assert back.id == "rendezvous-back" and f"{cable.here}:20001" in back.seen and cable.there in back.seen
            found = host_pairs.test_host_pairs(head, rendezvous.joined)
            (error,) = errors(host_pairs.judge_pairs(found))
            assert "here cannot reach there" in error.seen
    finally:
        launcher.stop()


def test_a_host_that_never_joins_is_reported_after_five_seconds(cable: Cable) -> None:
    launcher = probes(cable)
    hosts = CombinedLauncher([Silent(launcher.hosts), Silent((cable.there, "missing.invalid"))])
    try:
        with CheckHead(TOKEN, cable.here) as head:
            launcher.start(cable.here, head.port, TOKEN)  # the five seconds begin once they have imported their modules
            until(lambda: _connections(head.port) == 2, "both probes have connected", bound_s=60)
            reported: list[float] = []
            began = time.monotonic()
            rendezvous = head.gather(
                hosts, bound_s=5.0, kernels=1, report=lambda absent: reported.append(time.monotonic() - began)
            )
            assert rendezvous.took_s < 5.2
            missing = {each.host: each for each in errors(rendezvous_rules.judge_rendezvous(rendezvous))}
            assert set(missing) == {cable.there, "missing.invalid"}
            assert (
                "up and responds" in missing[cable.there].seen
                and f"{cable.here}:{head.port}" in missing[cable.there].seen
            )
            assert "does not resolve" in missing["missing.invalid"].seen
            assert "joined: here, there" in missing["missing.invalid"].seen
    finally:
        launcher.stop()


class Silent:
    """A launcher of hosts on which nothing is started."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self.hosts = hosts
        self.addresses: Mapping[str, str] = {}

    def start(self, head: str, port: int, token: str) -> None:
        pass

    def failed(self) -> Mapping[str, str]:
        return {}

    def stop(self) -> None:
        pass


def test_a_silent_host_is_distinguished_from_one_that_is_up(cable: Cable) -> None:
    assert host_responds(cable.there, bound_s=2.0) == "answers"
    cable.drop_in((1, 65534))
    assert host_responds(cable.there, bound_s=0.5) == "silent"


def test_a_wrong_address_of_the_head_is_reported_by_the_probe(cable: Cable) -> None:
    """The head announces 127.0.0.1, which on the other host is the other host itself."""
    launcher = LocalProbes({"there": cable.inside}, TOKEN_VARIABLE)
    try:
        with CheckHead(TOKEN, "127.0.0.1") as head:
            (wrong,) = rendezvous_rules.judge_advertised_address("here", "127.0.0.1", "the head", "--address", True)
            assert wrong.severity == "error" and "reaches itself" in wrong.why
            launcher.start("127.0.0.1", head.port, TOKEN)
            rendezvous = head.gather(Silent(("there",)), bound_s=2.0)
            assert [each.name for each in rendezvous.missing] == ["there"]
    finally:
        launcher.stop()


@pytest.mark.slow
def test_the_self_test_names_ranks_that_cannot_connect(cable: Cable) -> None:
    """A firewall between the hosts closes the ports of the store and of gloo, and lets only the check's through."""
    launcher = probes(cable)
    try:
        with CheckHead(TOKEN, cable.here, 20001) as head:
            rendezvous = gather(head, launcher)
            cable.refuse_out((32768, 65534))
            trainer = PlannedCommunicator("trainer", "gloo", ("policy-0", "policy-1"), OPERATIONS, "all")
            hosts = {"policy-0": "here", "policy-1": "there"}
            tested = collective_test.run_self_test(head, rendezvous.joined, [trainer], hosts, "cpu", bound_s=24.0)
            assert not tested.passed
            (error,) = errors(collective_test.judge_collectives(tested))
            assert "there" in error.host and "policy-1" in error.seen
    finally:
        launcher.stop()


@pytest.mark.slow
def test_the_self_test_reports_a_bad_interface_in_the_environment(cable: Cable) -> None:
    launcher = probes(cable)
    try:
        with CheckHead(TOKEN, cable.here) as head:
            rendezvous = gather(head, launcher)
            trainer = PlannedCommunicator("trainer", "gloo", ("policy-0", "policy-1"), OPERATIONS, "all")
            hosts = {"policy-0": "here", "policy-1": "there"}
            tested = collective_test.run_self_test(
                head, rendezvous.joined, [trainer], hosts, "cpu", 20.0, {"GLOO_SOCKET_IFNAME": "nosuch0"}
            )
            (error,) = errors(collective_test.judge_collectives(tested))
            assert "nosuch0" in error.seen or "address" in error.seen
            assert "GLOO_SOCKET_IFNAME" in error.fix
    finally:
        launcher.stop()


def test_a_host_that_freezes_is_reported_by_name(cable: Cable) -> None:
    launcher = probes(cable, "third")
    try:
        with CheckHead(TOKEN, cable.here) as head:
            rendezvous = gather(head, launcher)
            os.kill(launcher.pid("third"), signal.SIGSTOP)
            try:
                found = host_pairs.test_host_pairs(head, rendezvous.joined)
            finally:
                os.kill(launcher.pid("third"), signal.SIGCONT)
            assert "third" in found.lost
            named = {each.host for each in errors(host_pairs.judge_pairs(found))}
            assert "third" in named and not named & {"here", "there"}
    finally:
        launcher.stop()


def test_a_given_port_that_is_in_use_is_reported_by_its_host(cable: Cable) -> None:
    launcher = probes(cable)
    with closing(socket.create_server((cable.here, 0))) as busy:
        port = busy.getsockname()[1]
        try:
            with CheckHead(TOKEN, cable.here) as head:
                rendezvous = gather(head, launcher, ports=(port,))
                taken = [each for each in rendezvous_rules.judge_rendezvous(rendezvous) if each.id == "port-taken"]
                assert [each.host for each in taken] == ["here"] and str(port) in taken[0].seen
        finally:
            launcher.stop()


def test_two_probes_cannot_both_get_one_port() -> None:
    """The probe that will listen binds the port; the second one gets an error, even if both try at the same time."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    barrier, made = threading.Barrier(4), []

    def take(name: str) -> None:
        barrier.wait(5)
        made.append(PeerListener(TOKEN, name, "127.0.0.1", [port], 0))

    threads = [threading.Thread(target=take, args=(f"host-{k}",)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    try:
        assert sorted(bool(each.ports) for each in made) == [False, False, False, True]
        assert sum(str(port) in each.taken for each in made) == 3
    finally:
        for each in made:
            each.close()


def test_the_command_checks_two_hosts_of_which_one_is_started_manually(cable: Cable) -> None:
    """Uses the printed command: the token is in the environment, and the arguments contain no secret."""
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN, "COLUMNS": "200"}
    command = [sys.executable, "-m", "lockstep", "check", "--hosts", f"{cable.here},{cable.there}", "--wait", "30"]
    head = subprocess.Popen(
        [*command, "--address", cable.here, "--json"], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert head.stderr is not None
    line = head.stderr.readline()
    words = line.split("run: lockstep ")[1].split()
    assert TOKEN not in line
    probe = subprocess.Popen([*cable.inside, sys.executable, "-m", "lockstep", *words], env=environment)
    out, output = head.communicate(timeout=60)
    assert probe.wait(10) == 0
    report = json.loads(out)
    beyond = [each for each in report["findings"] if each["rung"] in ("rendezvous", "pairs")]
    assert beyond and not [each for each in beyond if each["severity"] == "error"], (beyond, output)
    assert {each["id"] for each in beyond} >= {"rendezvous", "pairs"}
    assert "environments" in [each["name"] for each in report["rungs"]]


def test_missing_hosts_are_reported_after_five_seconds_and_earlier_sections_are_printed_first(cable: Cable) -> None:
    """Also a name that does not resolve. The findings about this host are printed before."""
    hosts = f"{cable.here},{cable.there},missing.invalid"
    command = [sys.executable, "-m", "lockstep", "check", "--hosts", hosts, "--wait", "8", "--address", cable.here]
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN, "COLUMNS": "200"}
    head = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert head.stdout is not None and head.stderr is not None
    notes: list[tuple[float, str]] = []

    def listen() -> None:
        assert head.stderr is not None
        notes.extend((time.monotonic(), line) for line in head.stderr)

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    first = head.stdout.readline()
    assert "Versions" in first and head.poll() is None
    out = first + head.stdout.read()
    assert head.wait(30) == 1
    listening.join(10)
    asked = next(at for at, line in notes if "run: lockstep check --join" in line)
    given = next(line for _, line in notes if "--join" in line).split("--join ")[1].split()[0]
    reported = {who: next((at, line) for at, line in notes if line.startswith(f"note {who} has not joined yet"))
            for who in (cable.there, "missing.invalid")}  # fmt: skip
    assert all(at - asked < 5.5 and f"Head address: {given}" in line for at, line in reported.values())
    assert "is up and responds" in reported[cable.there][1]
    assert "does not resolve" in reported["missing.invalid"][1]
    assert sum("missing.invalid has not joined yet" in line for _, line in notes) == 1, "reported once"
    output = " ".join(out.split())
    assert "missing.invalid did not join" in output and "Pairs of hosts" in output


def test_a_probe_started_by_a_program_soon_reports_that_it_cannot_reach_the_head(cable: Cable) -> None:
    launcher = probes(cable)
    try:
        with CheckHead(TOKEN, cable.here) as head:
            reported: list[str] = []
            rendezvous = head.gather(
                launcher, bound_s=25.0, kernels=1, given=cable.there,
                report=lambda missing: reported.extend(rendezvous_rules.describe_missing(each) for each in missing),
            )  # fmt: skip
        assert rendezvous.took_s < 15, "it does not wait for a probe that has ended"
        missing = {
            each.host: each
            for each in errors(rendezvous_rules.judge_rendezvous(rendezvous))
            if each.id == "rendezvous-missing"
        }
        assert "cannot be reached from there" in missing["there"].seen and "refused" in missing["there"].seen
        assert f"{cable.there}:{head.port}" in missing["there"].seen
    finally:
        launcher.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_of_a_self_test_end_with_their_probe(number: int) -> None:
    before = set(Path(tempfile.gettempdir()).glob("lockstep-check-*"))
    launcher = LocalProbes({"here": ()}, TOKEN_VARIABLE)
    task = {
        "world": 3, "ranks": [0, 1], "host": "127.0.0.1", "port": 0, "address": "127.0.0.1", "device": "cpu",
        "bytes": 1 << 20, "bound_s": 60, "communicators": [], "serve": True,
    }  # fmt: skip
    try:
        with CheckHead(TOKEN, "127.0.0.1") as head:
            head.gather(launcher, bound_s=20.0, kernels=0)
            order = {"do": "ranks", "what": "start", "environment": {}, "spec": task}
            started, lost = head.ask({"here": order}, 60.0, "a test", probe_protocol.read_start_ranks_answer)
            assert started["here"].port > 0, lost
            probe = psutil.Process(launcher.pid("here"))
            until(lambda: len(probe.children(recursive=True)) == 3, "the test and two ranks of it")
            ranks = probe.children(recursive=True)
            probe.send_signal(number)
            until(lambda: not any(_lives(rank) for rank in ranks), "they have ended")
    finally:
        launcher.stop()
    assert set(Path(tempfile.gettempdir()).glob("lockstep-check-*")) <= before


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _connections(port: int) -> int:
    """Connections to a port of this host, accepted or not yet."""
    opened = psutil.net_connections("tcp4")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in opened)


def until(true: Callable[[], bool], what: str, bound_s: float = 15.0) -> None:
    end = time.monotonic() + bound_s
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)
