"""The look at a whole host: its bound, what hangs, its facts as JSON, and this host."""

import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.doctor.check.facts.host_facts import HostFacts, host_facts_from_json
from lockstep.doctor.check.facts.host_requirements import HostRequirements, requirements_of
from lockstep.doctor.check.facts.host_system import (
    CommandResult,
    HostSystem,
    SourceFault,
    SourceUnavailable,
    run_command,
)
from lockstep.doctor.check.facts.network_facts import gather_ports
from lockstep.doctor.check.host_check import GATHER_TIMEOUT_S, HOST_SECTIONS, gather_host, judge_host, run_gatherers
from lockstep.doctor.check.rules.network_rules import judge_ports

from .simulated_hosts import LINKS, SMI, TOPO, made, smi, smi_gpu


def test_this_host_in_five_seconds_and_nothing_is_forgotten(tmp_path: Path) -> None:
    needs = HostRequirements(folders={str(tmp_path): "the run's folder"}, ports={1: "x"})
    begun = time.monotonic()
    facts = gather_host(HostSystem(), needs)
    assert time.monotonic() - begun < GATHER_TIMEOUT_S
    parts = [part for _, names in HOST_SECTIONS.values() for part in names]
    for part in parts:
        known = getattr(facts, part) is not None
        assert known != (part in facts.unchecked or part in facts.faults), part
    said = judge_host(facts, needs)
    assert list(said) == list(HOST_SECTIONS) and all(said.values())
    for why in facts.unchecked.values():
        assert any(each.severity == "unchecked" and why in each.seen for rung in said.values() for each in rung)


def test_facts_go_through_json(tmp_path: Path) -> None:
    matrix = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n"
    system = replace(HostSystem(), run=made(tmp_path, {}, {SMI: smi(smi_gpu()), LINKS: "", TOPO: matrix}).run)
    facts = gather_host(system, HostRequirements(folders={str(tmp_path): "x"}))
    assert facts.gpus and facts.topology
    assert host_facts_from_json(json.loads(json.dumps(facts.json()))) == facts
    assert judge_host(host_facts_from_json(json.loads(json.dumps(facts.json()))), HostRequirements()) == judge_host(
        facts, HostRequirements()
    )
    with pytest.raises(ValueError, match="host"):
        host_facts_from_json({"versions": 3})


def test_what_a_newer_version_sends_is_left_out() -> None:
    assert host_facts_from_json({"host": "a", "cooling": "water"}) == HostFacts("a")


def test_what_hangs_is_left_behind_and_named() -> None:
    held = threading.Event()
    parts = {"versions": held.wait, "clock": lambda: (_ for _ in ()).throw(SourceUnavailable("no clock"))}
    begun = time.monotonic()
    facts = run_gatherers(parts, 1.0)
    held.set()
    assert time.monotonic() - begun < 5
    assert "did not answer within 0.6 s" in facts.unchecked["versions"] and facts.unchecked["clock"] == "no clock"


def test_many_that_hang_take_no_longer_than_one() -> None:
    held = threading.Event()
    parts = dict.fromkeys(["versions", "gpus", "pci", "rdma", "kernel", "limits", "disks", "names"], held.wait)
    begun = time.monotonic()
    facts = run_gatherers(parts, 1.0)
    held.set()
    assert time.monotonic() - begun < 3 and len(facts.unchecked) == 8


def test_a_fault_is_not_the_same_as_nothing(tmp_path: Path) -> None:
    def fails(command: Sequence[str], bound_s: float) -> CommandResult:
        raise SourceFault(
            "nvidia-smi -q -x fails: Unable to determine the device handle for GPU0000:0A:00.0: Unknown Error"
        )

    facts = gather_host(replace(HostSystem(), run=fails), HostRequirements())
    assert "Unable to determine" in facts.faults["gpus"] and "gpus" not in facts.unchecked
    said = judge_host(facts, HostRequirements(gpus=True))["gpus"]
    assert [each.severity for each in said] == ["error"]


def test_commands_that_are_not_there_and_that_hang() -> None:
    with pytest.raises(SourceUnavailable, match="lockstep-nothing is not installed"):
        run_command(["lockstep-nothing"], 1.0)
    with pytest.raises(TimeoutError):
        run_command(["sleep", "30"], 0.2)
    assert run_command(["sh", "-c", "echo $LC_ALL; exit 3"], 5.0) == CommandResult(3, "C\n", "")


def test_a_busy_port_and_its_process() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        (busy,) = gather_ports(HostSystem(), {port: "MASTER_PORT"})
        (found,) = judge_ports("a", [busy])
    assert found.severity == "error" and "pid" in found.seen and f":{port}" in found.fix
    (free,) = gather_ports(HostSystem(), {port: "MASTER_PORT"})
    assert free.taken_by is None


def test_ports_that_the_kernel_hands_out(tmp_path: Path) -> None:
    listening = "   0: 00000000:7337 00000000:0000 0A 0:0 0:0 0 0 0 1\n"
    system = made(tmp_path, {
        "proc/self/net/tcp": f"  sl  local_address rem_address   st\n{listening}",
        "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    })  # fmt: skip
    ports = gather_ports(system, {29495: "a", 40000: "b", 29501: "c"})
    assert [each.severity for each in judge_ports("h", ports)] == ["error", "note", "ok"]
    assert "cannot be seen" in (ports[0].taken_by or "")
    with pytest.raises(SourceUnavailable):
        gather_ports(made(tmp_path / "none", {}), {1: "x"})


def test_the_port_of_rank_0_is_checked_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert requirements_of(None).ports == {29500: "MASTER_PORT"}
    monkeypatch.setenv("MASTER_ADDR", "203.0.113.77")
    assert requirements_of(None).ports == {}
