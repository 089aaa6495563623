"""Finds the faulty layer when NCCL fails: repeats the self-test with one layer disabled at a time, and on gloo.
Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.doctor.check.cluster.collective_test import SelfTestResult
from lockstep.doctor.output.findings import Finding

_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


@dataclass(frozen=True, slots=True)
class IsolationVariant:
    """One way to run the test."""

    name: str
    environment: Mapping[str, str]
    layer: str
    """What is at fault where this helps and the test as it is fails."""
    fix: str
    source: str


def isolation_variants(interface: str) -> tuple[IsolationVariant, ...]:
    """The five, the first as it is.

    Args:
        interface: that has the hosts' addresses; of the first host, where they differ. Empty where none is known.
    """
    return (
        IsolationVariant("as is", {}, "", "", ""),
        IsolationVariant(
            "InfiniBand off", {"NCCL_IB_DISABLE": "1"}, "InfiniBand or RoCE (ports, GID index, GPUDirect RDMA, fabric)",
            "look at the InfiniBand checks of the hosts: port state, NCCL_IB_HCA, NCCL_IB_GID_INDEX. NCCL_IB_DISABLE=1 "
            "goes on over TCP meanwhile, several times slower",
            f"{_ENV}#nccl-ib-disable",
        ),
        IsolationVariant(
            "interface set", {"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {},
            "the choice of the network interface: NCCL takes one that the others do not reach",
            f"set NCCL_SOCKET_IFNAME={interface or 'the interface that hosts reach each other by'} on every host",
            f"{_ENV}#nccl-socket-ifname",
        ),
        IsolationVariant(
            "P2P off", {"NCCL_P2P_DISABLE": "1"}, "the direct path between GPUs over PCIe or NVLink",
            "turn ACS off on the PCIe bridges and the IOMMU off (or to passthrough) in the BIOS or kernel; on virtual "
            "machines ask for a topology with working peer access. NCCL_P2P_DISABLE=1 goes on through host memory",
            f"{_ENV}#nccl-p2p-disable",
        ),
        IsolationVariant(
            "shared memory off", {"NCCL_SHM_DISABLE": "1"}, "shared memory between processes (/dev/shm)",
            "enlarge /dev/shm (docker: --shm-size=16g or --ipc=host) and remove stale files named nccl-* from it",
            f"{_ENV}#nccl-shm-disable",
        ),
    )  # fmt: skip


def run_isolation(
    first: SelfTestResult, again: Callable[[Mapping[str, str]], SelfTestResult], interface: str
) -> dict[str, str]:
    """By variant, why it failed, empty where it passed. `first` is the test as it is, and failed."""
    outcome = {"as is": first.why_not}
    for each in isolation_variants(interface)[1:]:
        if each.environment:
            outcome[each.name] = again(each.environment).why_not
    return outcome


def judge_isolation(outcome: Mapping[str, str], gloo: SelfTestResult | None, interface: str) -> list[Finding]:
    """Which layer it is.

    Args:
        outcome: of `run_isolation`.
        gloo: the same communicators on gloo; None where that was not tried.
    """
    helped = [each for each in isolation_variants(interface)[1:] if outcome.get(each.name) == ""]
    row = ", ".join(f"{name} {'fails' if why else 'passes'}" for name, why in outcome.items())
    row += "" if gloo is None else f", gloo {'passes' if gloo.passed else 'fails'}"
    cost = "" if gloo is None or not gloo.passed else _cost(gloo)
    if len(helped) == 1:
        one = helped[0]
        return [
            Finding("nccl-layer", "error", "", f"NCCL: {row}", f"at fault is {one.layer}", one.fix + cost, one.source)
        ]
    if helped:
        names = " and ".join(each.name for each in helped)
        layers = "; or ".join(each.layer for each in helped)
        why = f"it passes with {names}, each by itself: {layers}. It may also come and go: repeat the check"
        return [Finding("nccl-layer", "error", "", f"NCCL: {row}", why, helped[0].fix + cost, _ENV)]
    if gloo is not None and gloo.passed:
        why = "at fault is none of the four layers but NCCL itself, the driver, a GPU, or a version: hosts talk well"
        fix = "compare the versions of driver, CUDA and NCCL above, and read the kernel log for Xid"
        return [Finding("nccl-layer", "error", "", f"NCCL: {row}", why, fix + cost, _ENV)]
    why = "gloo fails as well, so it is not NCCL: the network between the hosts, or their ranks"
    return [Finding("nccl-layer", "error", "", f"NCCL: {row}", why, "see the pairs and the rendezvous above")]


def _cost(gloo: SelfTestResult) -> str:
    rates = [min(values) for (name, op), values in gloo.rates.items() if op in ("all_reduce", "broadcast")]
    if not rates:
        return ""
    return (
        f". Meanwhile communication.fallback=gloo runs the trainer's collectives on gloo, which carries "
        f"{min(rates):,.0f} MB/s here"
    )
