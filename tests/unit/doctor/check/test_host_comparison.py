"""What differs between hosts of one run: from made-up facts of several."""

from dataclasses import replace

from lockstep.doctor.check.cluster.host_comparison import compare_hosts
from lockstep.doctor.check.facts.host_facts import (
    ClockSync,
    Gpu,
    HostFacts,
    HostInterface,
    HostNetwork,
    HostVersions,
    NameResolution,
    RdmaAdapters,
    RdmaPort,
)
from lockstep.doctor.output.findings import Finding

LO = HostInterface("lo", ["127.0.0.1/8"], kind="loopback")


def _host(number: int, *interfaces: HostInterface, mtu: int = 1500) -> HostFacts:
    address = f"10.0.0.{number}"
    eth = HostInterface("eth0", [f"{address}/24"], mtu=mtu)
    return HostFacts(
        f"h{number}",
        versions=HostVersions({"torch": "2.13.0", "python": "3.11.9"}),
        gpus=[Gpu(each, f"0000:0{each}:00.0", "H100", memory_mib=81559) for each in range(2)],
        rdma=RdmaAdapters([RdmaPort("mlx5_0", 1, "ACTIVE", "LinkUp", "InfiniBand", 400.0)]),
        clock=ClockSync(True, 0.0001, "chronyc"),
        names=NameResolution(f"h{number}", [address]),
        network=HostNetwork([LO, *(interfaces or [eth])], address),
    )


def _compared(*facts: HostFacts) -> dict[str, Finding]:
    return {each.id: each for each in compare_hosts(facts)}


def test_like_hosts_and_one_host_say_nothing() -> None:
    assert _compared(*(_host(number) for number in range(1, 9))) == {}
    assert _compared(_host(1)) == {}


def test_a_host_with_other_gpus_and_one_with_a_slower_port() -> None:
    odd = replace(
        _host(3), gpus=_host(3).gpus[:1], rdma=RdmaAdapters([RdmaPort("mlx5_0", 1, "ACTIVE", "", "InfiniBand", 200.0)])
    )  # type: ignore[index]
    found = _compared(_host(1), _host(2), odd)
    assert found["differs-gpus"].host == "h3" and "2 x H100 (80 GiB) on h1, h2; 1 x H100" in found["differs-gpus"].seen
    assert found["differs-rdma"].host == "h3" and "200 Gb/s on h3" in found["differs-rdma"].seen


def test_clocks_that_are_apart() -> None:
    found = _compared(_host(1), replace(_host(2), clock=ClockSync(True, -1.5, "chronyc")))["clock-skew"]
    assert found.host == "h2,h1" and "1.50 s apart" in found.seen


def test_hosts_of_one_name() -> None:
    assert _compared(_host(1), replace(_host(2), host="h1"))["same-name"].severity == "warning"


def test_the_bridge_of_docker_has_the_same_address_everywhere() -> None:
    docker = HostInterface("docker0", ["172.17.0.1/16"], kind="bridge", carries_host=False)
    hosts = []
    for number in (1, 2):
        host = _host(number)
        assert host.network is not None
        network = replace(host.network, interfaces=[*host.network.interfaces, docker])
        hosts.append(replace(host, network=replace(network, environ={"NCCL_SOCKET_IFNAME": "docker"})))
    found = _compared(*hosts)["same-address-nccl"]
    assert found.severity == "error" and found.host == "h1,h2" and "172.17.0.1" in found.seen


def test_gloo_on_loopback_everywhere() -> None:
    hosts = [replace(_host(number), names=NameResolution(f"h{number}", ["127.0.1.1"])) for number in (1, 2)]
    assert _compared(*hosts)["same-address-gloo"].severity == "error"


def test_different_subnets_and_the_one_that_all_share() -> None:
    common = [HostInterface("eth1", [f"10.5.0.{number}/24"]) for number in (1, 2)]
    first = _host(1, HostInterface("eth0", ["10.0.0.1/24"]), common[0])
    second = _host(2, HostInterface("eth0", ["10.0.9.2/24"]), common[1])
    found = _compared(first, second)["subnets-nccl"]
    assert found.severity == "warning" and "10.5.0.0/24" in found.fix
    routed = _compared(first, _host(2, HostInterface("eth0", ["10.0.9.2/24"])))["subnets-nccl"]
    assert routed.severity == "note" and not routed.fix


def test_sizes_of_packets() -> None:
    found = _compared(_host(1, mtu=9000), _host(2, mtu=9000), _host(3))["mtu"]
    assert "MTU 1500 on h3 and 9000" in found.seen


def test_a_thousand_hosts_are_compared_at_once() -> None:
    import time

    hosts = [replace(_host(1), host=f"h{number}", names=None) for number in range(1024)]
    begun = time.monotonic()
    found = {each.id: each for each in compare_hosts(hosts)}
    assert time.monotonic() - begun < 5 and "and 1020 more" in found["same-address-nccl"].seen
