"""The round-robin schedule, findings about pairs and rendezvous, communicators of a config, faults of NCCL."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.check_pairs import Cost, simulate, two_halves
from lockstep.config.loader import check_config
from lockstep.doctor.check.cluster import collective_test, host_pairs, nccl_isolation, rendezvous_rules
from lockstep.doctor.check.cluster.collective_test import (
    PlannedCommunicator,
    communicator_processes,
    planned_communicators,
)
from lockstep.doctor.check.cluster.collective_test import SelfTestResult as Outcome
from lockstep.doctor.check.cluster.probe_rendezvous import (
    CombinedLauncher,
    ManualLauncher,
    MissingHost,
    ProbeRendezvous,
    join_command,
)
from lockstep.doctor.check.facts.host_facts import HostInterface
from lockstep.doctor.check.probe import round_robin
from lockstep.doctor.check.probe.peer_connections import KERNEL_PORT_PREFIX, ports_to_dial_on
from lockstep.doctor.check.probe.probe_protocol import DialResult, ProbeInfo
from lockstep.doctor.output.findings import Finding


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40))
def test_everybody_meets_everybody_once_and_is_in_one_pair_at_a_time(many: int) -> None:
    rounds = list(round_robin.round_robin_rounds(many))
    assert len(rounds) == many - 1 + many % 2
    met: set[frozenset[int]] = set()
    for round_ in rounds:
        players = [player for pair in round_ for player in pair]
        assert len(players) == len(set(players))
        assert not met & {frozenset(pair) for pair in round_}
        met |= {frozenset(pair) for pair in round_}
    assert len(met) == many * (many - 1) // 2
    for who in range(many):
        assert round_robin.peers_in_order(many, who) == [sum(pair) - who for r in rounds for pair in r if who in pair]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2048), st.integers(1, 8))
def test_what_is_planned_fits_into_the_bound(many: int, ports: int) -> None:
    plan = round_robin.pair_test_budget(many, ports, 10.0)
    waves = -(-(many - 1) * ports // round_robin.LANES)
    assert waves * plan.dial_s <= plan.reach_s, "also where every dial hangs"
    assert plan.reach_s + plan.slots * 2 * plan.slot_s <= 10.0
    assert plan.slot_s >= round_robin.SHORTEST_SLOT_S and 0 <= plan.slots <= many


def test_with_few_hosts_all_rounds_are_measured_and_with_many_spread_ones() -> None:
    assert len(round_robin.measurement_rounds(8, round_robin.pair_test_budget(8, 3, 10.0).slots)) == 7
    some = round_robin.measurement_rounds(1024, 4)
    assert len(some) == 4 and len({frozenset(pair) for round_ in some for pair in round_}) == 4 * 512


@pytest.mark.parametrize("silent", [0, 8])
def test_all_pairs_of_128_hosts_are_tried_in_ten_seconds(silent: int) -> None:
    found = simulate(128, two_halves(128, range(silent)), Cost(1e-3, 1e-6))
    assert found.total_s < 10.0
    assert found.unreached == silent * 127 + (128 - silent) * silent, "each of them, and nobody else"


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 64])
def test_all_pairs_of_1024_hosts_are_tried_in_ten_seconds(silent: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(1024, two_halves(1024, range(silent)), Cost(1e-3, 1e-6))
    with capsys.disabled():
        print(f"\n1024 hosts, {silent} of them silent: {found.total_s:.1f} s in virtual time")
    assert found.total_s < 10.0


# ---------------------------------------------------------------- pairs


def found_pairs(
    hosts: int, dead: set[tuple[str, str]] = frozenset(), **ports: set[tuple[str, str]]
) -> host_pairs.PairResults:  # type: ignore[assignment]
    names = tuple(f"n{k}" for k in range(hosts))
    found = host_pairs.PairResults(names, round_robin.pair_test_budget(hosts, 2, 10.0))
    for one in names:
        for other in names:
            if one == other:
                continue
            if (one, other) in dead:
                found.blocked[one, other] = [DialResult(other, "kernel-0", 40001, why="timed out", kind="silent")]
                continue
            found.reached[one, other] = 0.2
            found.mb_per_s[one, other] = 1000.0
    for port, closed in ports.items():
        for pair in sorted(closed):
            number = int(port.removeprefix("p"))
            found.blocked[pair] = [DialResult(pair[1], str(number), number, why="refused", kind="refused")]
    return found


def errors(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.severity == "error"]


def test_an_unreachable_host_is_reported_once() -> None:
    dead = {(f"n{k}", "n3") for k in range(6) if k != 3}
    (error,) = errors(host_pairs.judge_pairs(found_pairs(6, dead)))
    assert error.host == "n3" and "no host reaches it, but it reaches others" in error.seen


def test_a_host_cut_off_in_both_directions_is_reported_once() -> None:
    dead = {pair for k in range(6) if k != 3 for pair in ((f"n{k}", "n3"), ("n3", f"n{k}"))}
    (error,) = errors(host_pairs.judge_pairs(found_pairs(6, dead)))
    assert error.host == "n3" and "reaches no host and no host reaches it" in error.seen


def test_a_closed_direction_is_reported_with_the_open_one() -> None:
    (error,) = errors(host_pairs.judge_pairs(found_pairs(4, {("n0", "n2")})))
    assert error.host == "n0, n2" and "n0 cannot reach n2" in error.seen and "the other direction is open" in error.seen


def test_a_closed_port_differs_from_a_closed_host() -> None:
    (error,) = errors(host_pairs.judge_pairs(found_pairs(4, p29500={("n0", "n2"), ("n1", "n2")})))
    assert error.host == "n2" and "n0, n1 cannot reach port 29500 of n2" in error.seen


def test_a_slow_link_and_a_far_host_are_warned_of() -> None:
    found = found_pairs(4)
    found.mb_per_s["n1", "n2"] = 90.0
    for other in ("n0", "n1", "n2"):
        found.reached["n3", other] = 30.0
    slow, far = (each for each in host_pairs.judge_pairs(found) if each.severity == "warning")
    assert slow.host == "n1, n2" and "90 MB/s, the median is 1,000" in slow.seen
    assert "n3 is part of all of them" in far.seen


def test_above_64_hosts_pairs_take_turns_at_the_ports_of_the_kernels_range() -> None:
    def ports(many: int) -> list[int]:
        table = [
            (f"n{k}", "10.0.0.1", {"29500": 29500, f"{KERNEL_PORT_PREFIX}0": 1, f"{KERNEL_PORT_PREFIX}1": 2})
            for k in range(many)
        ]
        return [target.port for target in ports_to_dial_on(table, 3)]

    assert sorted(set(ports(64))) == [1, 2, 29500] and len(ports(64)) == 3 * 63
    assert sorted(set(ports(66))) == [1, 2, 29500] and len(ports(66)) == 2 * 65


# ---------------------------------------------------------------- rendezvous

CARD = ProbeInfo("b", "b", "10.0.0.2", "10.0.0.2", "10.0.0.1", (HostInterface("eth0", ["10.0.0.2/24"]),))
MET = ProbeRendezvous("10.0.0.1", 4000, {"a": replace(CARD, name="a"), "b": CARD}, (), {}, {}, (), (), 0.5)


def judged(**changes: Any) -> list[Finding]:
    return rendezvous_rules.judge_rendezvous(replace(MET, joined={"b": CARD}, **changes))


@pytest.mark.parametrize(
    ("address", "on", "severity", "word"),
    [
        ("0.0.0.0", None, "error", "reaches itself"),
        ("::", None, "error", "reaches itself"),
        ("127.0.1.1", None, "error", "loopback"),
        ("169.254.3.4", None, "error", "link-local"),
        ("172.17.0.1", None, "error", "bridge"),
        ("172.17.0.3", None, "warning", "default network"),
        ("172.20.0.1", HostInterface("br-0a1b2c3d4e5f", kind="bridge", carries_host=False), "error", "bridge"),
        ("10.5.0.1", HostInterface("docker0", kind="bridge", carries_host=False), "error", "bridge"),
        ("10.5.0.1", HostInterface("br0", kind="bridge", carries_host=False), "warning", "others may not reach it"),
        (
            "10.244.1.0",
            HostInterface("flannel.1", kind="virtual", carries_host=False),
            "warning",
            "others may not reach",
        ),
        ("172.17.0.2", HostInterface("eth0", kind="virtual", carries_host=False), "warning", "default network"),
        ("8.8.8.8", None, "note", "gateway"),
    ],
)
def test_heads_that_advertise_what_others_cannot_use(
    address: str, on: HostInterface | None, severity: str, word: str
) -> None:
    interfaces = [replace(on, addresses=[f"{address}/24"])] if on else []
    (found,) = rendezvous_rules.judge_advertised_address("a", address, "the Ray head", "fix", True, interfaces)
    assert found.severity == severity and word in found.why and address in found.seen


def test_a_public_address_beside_a_private_one_is_warned_of() -> None:
    cards = [HostInterface("eth0", ["8.8.8.8/24"]), HostInterface("eth1", ["10.0.0.5/24"])]
    (found,) = rendezvous_rules.judge_advertised_address("a", "8.8.8.8", "the Ray head", "set it", True, cards)
    assert found.severity == "warning" and "10.0.0.5 on eth1" in found.fix


@pytest.mark.parametrize("name", ["br0", "vmbr0", "br-ex", "br-mgmt", "docker-uplink"])
def test_a_bridge_that_is_the_hosts_way_out_is_an_address_like_another(name: str) -> None:
    bridge = HostInterface(name, ["10.5.0.1/24"], kind="bridge", carries_host=True)
    assert not rendezvous_rules.judge_advertised_address("a", "10.5.0.1", "the head", "", True, [bridge])
    switch = HostInterface(name, ["10.5.0.1/24"], kind="virtual", carries_host=False)
    assert not rendezvous_rules.judge_advertised_address("a", "10.5.0.1", "the head", "", True, [switch]), (
        "Open vSwitch's"
    )


def test_addresses_that_are_fine() -> None:
    assert not rendezvous_rules.judge_advertised_address("a", "10.0.0.1", "x", "", True)
    assert not rendezvous_rules.judge_advertised_address("a", "127.0.0.1", "x", "", False), "alone, loopback is right"
    assert not rendezvous_rules.judge_advertised_address("a", "node-a", "x", "", True), "a name"
    six = [HostInterface("eth0", ["2001:4860::5/64"])]
    assert not rendezvous_rules.judge_advertised_address("a", "2001:4860::5", "x", "", True, six), (
        "what hosts of IPv6 networks have"
    )


def test_an_address_by_which_others_have_come_is_doubted_no_more() -> None:
    inner = HostInterface("br0", ["10.0.0.1/24"], kind="bridge", carries_host=False)
    head = replace(CARD, name="a", address="10.0.0.1", came_from="10.0.0.1", interfaces=(inner,), ports={"kernel-0": 9})
    other = replace(CARD, came_from="10.0.0.2", ports={"kernel-0": 9})
    alone = rendezvous_rules.judge_rendezvous(
        replace(MET, joined={"a": head}, missing=(MissingHost("b", "10.0.0.1:4000"),))
    )
    assert [each.severity for each in alone if each.id == "head-address"] == ["warning"]
    together = replace(
        MET, joined={"a": head, "b": replace(other, interfaces=(replace(inner, addresses=["10.0.0.2/24"]),))}
    )
    assert rendezvous_rules.reached_from_outside(together)
    assert not [each for each in rendezvous_rules.judge_rendezvous(together) if each.id == "head-address"]
    closed = rendezvous_rules.judge_rendezvous(replace(together, dial_back_errors={"b": "silent"}))
    assert [each.host for each in closed if each.id == "head-address"] == ["b"]
    assert rendezvous_rules.judge_advertised_address("a", "127.0.0.1", "x", "", True, [inner], reached=True), (
        "loopback is never right"
    )


def test_missing_hosts_are_reported_with_their_status() -> None:
    missing = (
        MissingHost("x", "10.0.0.1:4000"),
        MissingHost("y", "10.0.0.1:4000", resolves_to=("10.0.0.9",), response="silent"),
        MissingHost("z", "10.0.0.1:4000", resolves_to=("10.0.0.8",), response="answers"),
        MissingHost("w", "10.0.0.1:4000", failed="its probe ended with 2: 10.0.0.1:4000 cannot be reached from w"),
    )
    found = {each.host: each for each in errors(judged(missing=missing))}
    assert set(found) == {"w", "x", "y", "z"}
    assert "does not resolve" in found["x"].seen and "does not respond" in found["y"].seen
    assert "up and responds" in found["z"].seen and "lockstep check --join 10.0.0.1:4000 --name z" in found["z"].fix
    assert "w cannot reach the head at this address" in found["w"].fix
    assert all("10.0.0.1:4000" in each.seen and "joined: b" in each.seen for each in found.values())


def test_translated_shared_and_loopback_addresses_are_found() -> None:
    translated = rendezvous_rules.judge_rendezvous(replace(MET, joined={"b": replace(CARD, came_from="192.168.0.7")}))
    assert [each.id for each in translated if each.severity == "warning"] == ["rendezvous-translated"]
    shared = rendezvous_rules.judge_rendezvous(
        replace(MET, joined={"a": replace(CARD, name="a", hostname="a"), "b": CARD})
    )
    assert [each.id for each in errors(shared)] == ["rendezvous-address"]
    loops = rendezvous_rules.judge_rendezvous(
        replace(MET, joined={"a": replace(CARD, name="a", address="10.0.0.1", came_from="10.0.0.1", interfaces=()),
                             "b": replace(CARD, resolves_to=("127.0.1.1",))})
    )  # fmt: skip
    assert [each.id for each in loops if each.severity == "warning"] == ["name-loopback"]


def test_a_printed_launcher_keeps_the_token_out_of_commands() -> None:
    said: list[str] = []
    launcher = CombinedLauncher([ManualLauncher(["b", "c"], said.append, show_token=True)])
    launcher.start("fd00::1", 4000, "secret")
    assert launcher.hosts == ("b", "c")
    assert said[0].endswith("lockstep check --join [fd00::1]:4000 --name b")
    assert [("secret" in line, "--join" in line) for line in said] == [(False, True), (False, True), (True, False)]
    assert "secret" not in join_command("10.0.0.1", 1, "b")


# ---------------------------------------------------------------- communicators

BASE: dict[str, Any] = {
    "recipe": "grpo", "name": "x", "steps": 1, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
    "reward": {"terms": [{"kind": "exact_match"}]},
}  # fmt: skip


def test_the_communicators_of_configs() -> None:
    def of(device: Any, **changes: Any) -> dict[str, PlannedCommunicator]:
        return {each.name: each for each in planned_communicators(check_config(BASE | changes, "x"), device)}

    assert of("cpu") == {}, "one rank, weights in shared memory"
    hsdp = of("cuda", trainer={"ranks": 4, "replicas": 2}, rollout={"engine": {"count": 2}})
    assert {name: (each.backend, len(each.members)) for name, each in hsdp.items()} == {
        "trainer": ("nccl", 4), "checkpoint": ("gloo", 4), "copy 0": ("nccl", 2), "copy 1": ("nccl", 2),
        "across copies 0": ("nccl", 2), "across copies 1": ("nccl", 2), "weights": ("nccl", 3),
    }  # fmt: skip
    assert hsdp["copy 1"].members == ("policy-2", "policy-3")
    assert hsdp["across copies 1"].members == ("policy-1", "policy-3")
    assert hsdp["weights"].members == ("policy-0", "engine-0", "engine-1")
    on_ray = of("cpu", cluster={"kind": "ray"}, rollout={"engine": {"count": 2}})
    assert list(on_ray) == ["weights engine-0", "weights engine-1"]
    shared = of("cuda", placement={"colocate": "all"}, cluster={"kind": "ray"}, weights={"transport": "cuda_ipc"})
    assert shared == {}
    assert communicator_processes(hsdp.values())[-1] == "engine-1"


# ---------------------------------------------------------------- self-test and isolation

TRAINER = PlannedCommunicator("trainer", "nccl", ("p0", "p1", "p2"), ("all_reduce",), "all")


def said_by(**failed: str) -> Outcome:
    found = Outcome((TRAINER,), TRAINER.members, {"p0": "a", "p1": "a", "p2": "b"}, "cuda")
    found.at = dict.fromkeys(TRAINER.members, "done")
    found.failed = failed
    found.rates["trainer", "all_reduce"] = [10.0, 11.0]
    found.latency_ms["trainer", "all_reduce"] = [1.0, 2.0]
    found.pairs = {("trainer", "p0", "p1"): 90.0, ("trainer", "p0", "p2"): 80.0, ("trainer", "p1", "p2"): 20.0}
    return found


def test_the_slowest_pair_is_named_and_one_far_below_the_others_warned_of() -> None:
    ok, slow = collective_test.judge_collectives(said_by())
    assert ok.severity == "ok" and "all_reduce 1.50 ms, 10 MB/s" in ok.seen
    assert slow.severity == "warning" and "p1 and p2 (a and b) with 20 MB/s" in slow.seen and slow.host == "a, b"


def test_the_rank_with_an_error_is_reported_not_the_waiting_ones() -> None:
    waited = "WaitTimeout: waited 20.0 s for trainer"
    (error,) = collective_test.judge_collectives(
        said_by(p0=waited, p1=waited, p2="RuntimeError: checksum: all_reduce is wrong")
    )
    assert error.host == "b" and "p2 (b)" in error.seen and "p0" not in error.seen and "corrupted" in error.fix


@pytest.mark.parametrize(
    ("helps", "layer"),
    [
        ("InfiniBand off", "InfiniBand"),
        ("interface set", "interface"),
        ("P2P off", "direct path between GPUs"),
        ("shared memory off", "/dev/shm"),
    ],
)
def test_the_layer_without_which_it_works_is_at_fault(helps: str, layer: str) -> None:
    by_environment = {tuple(each.environment.items()): each.name for each in nccl_isolation.isolation_variants("eth0")}

    def again(environment: Any) -> Outcome:
        return said_by() if by_environment[tuple(environment.items())] == helps else said_by(p0="NCCL error")

    outcome = nccl_isolation.run_isolation(said_by(p0="NCCL error"), again, "eth0")
    assert len(outcome) == 5
    (found,) = nccl_isolation.judge_isolation(outcome, said_by(), "eth0")
    assert found.severity == "error" and layer in found.why and f"{helps} passes" in found.seen
    assert "communication.fallback=gloo" in found.fix and "10 MB/s" in found.fix


def test_gloo_distinguishes_network_from_nccl_if_no_variant_passes() -> None:
    outcome = dict.fromkeys([each.name for each in nccl_isolation.isolation_variants("eth0")], "NCCL error")
    (nccl,) = nccl_isolation.judge_isolation(outcome, said_by(), "eth0")
    assert "NCCL itself" in nccl.why
    (network,) = nccl_isolation.judge_isolation(outcome, said_by(p0="x"), "eth0")
    assert "the network" in network.why
