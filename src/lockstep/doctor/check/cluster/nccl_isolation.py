"""Finds the faulty layer when the self-test fails on NCCL, by disabling one layer at a time, and NCCL altogether."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.doctor.check.cluster.collective_test import SelfTestResult
from lockstep.doctor.output.findings import Finding

_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


@dataclass(frozen=True, slots=True)
class IsolationVariant:
    """One way to run the test: which layer is disabled, and by which variables."""

    name: str
    environment: Mapping[str, str]
    layer: str
    """The layer at fault if this variant passes and the unchanged test fails."""
    fix: str
    source: str


def isolation_variants(interface: str) -> tuple[IsolationVariant, ...]:
    """All variants, the unchanged test first.

    Args:
        interface: name of the interface with the first host's address; empty if it is not known.
    """
    return (
        IsolationVariant("as is", {}, "", "", ""),
        IsolationVariant(
            "InfiniBand off", {"NCCL_IB_DISABLE": "1"}, "InfiniBand or RoCE (ports, GID index, GPUDirect RDMA, fabric)",
            "check the InfiniBand findings of the hosts: port state, NCCL_IB_HCA, NCCL_IB_GID_INDEX. Workaround: "
            "NCCL_IB_DISABLE=1 uses TCP, which is several times slower",
            f"{_ENV}#nccl-ib-disable",
        ),
        IsolationVariant(
            "interface set", {"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {},
            "the choice of the network interface: NCCL picks one that the others cannot reach",
            f"set NCCL_SOCKET_IFNAME={interface or 'the interface by which hosts reach each other'} on every host",
            f"{_ENV}#nccl-socket-ifname",
        ),
        IsolationVariant(
            "P2P off", {"NCCL_P2P_DISABLE": "1"}, "the direct path between GPUs over PCIe or NVLink",
            "disable ACS on the PCIe bridges and the IOMMU (or set it to passthrough) in the BIOS or kernel; for "
            "virtual "
            "machines, request a topology with peer access. Workaround: NCCL_P2P_DISABLE=1 uses host memory",
            f"{_ENV}#nccl-p2p-disable",
        ),
        IsolationVariant(
            "shared memory off", {"NCCL_SHM_DISABLE": "1"}, "shared memory between processes (/dev/shm)",
            "enlarge /dev/shm (docker: --shm-size=16g or --ipc=host) and remove stale files named nccl-* from it",
            f"{_ENV}#nccl-shm-disable",
        ),
    )  # fmt: skip


def run_isolation(
    first: SelfTestResult, rerun: Callable[[Mapping[str, str]], SelfTestResult], interface: str
) -> dict[str, str]:
    """Runs all variants.

    Args:
        first: the result of the unchanged test, which failed.
        rerun: repeats the test with additional variables.

    Returns:
        By variant, why it failed; an empty text if it passed.
    """
    outcome = {"as is": first.why_not}
    for each in isolation_variants(interface)[1:]:
        if each.environment:
            outcome[each.name] = rerun(each.environment).why_not
    return outcome


def judge_isolation(outcome: Mapping[str, str], gloo: SelfTestResult | None, interface: str) -> list[Finding]:
    """Reports the layer at fault.

    Args:
        outcome: the result of `run_isolation`.
        gloo: the result of the test on gloo; None if it was not tried.
    """
    passing = [each for each in isolation_variants(interface)[1:] if outcome.get(each.name) == ""]
    row = ", ".join(f"{name} {'fails' if why else 'passes'}" for name, why in outcome.items())
    row += "" if gloo is None else f", gloo {'passes' if gloo.passed else 'fails'}"
    cost = "" if gloo is None or not gloo.passed else _workaround_text(gloo)
    if len(passing) == 1:
        one = passing[0]
        return [
            Finding(
                "nccl-layer", "error", "", f"NCCL: {row}", f"the fault is in {one.layer}", one.fix + cost, one.source
            )
        ]
    if passing:
        names = " and ".join(each.name for each in passing)
        layers = "; or ".join(each.layer for each in passing)
        why = f"it passes with {names}, each on its own: {layers}. The fault may also be intermittent: repeat the check"
        return [Finding("nccl-layer", "error", "", f"NCCL: {row}", why, passing[0].fix + cost, _ENV)]
    if gloo is not None and gloo.passed:
        why = "the network works, and no single layer is at fault: suspect NCCL itself, the driver, a GPU, or a version"
        fix = "compare the versions of driver, CUDA and NCCL above, and check the kernel log for Xid"
        return [Finding("nccl-layer", "error", "", f"NCCL: {row}", why, fix + cost, _ENV)]
    why = "gloo fails as well, so NCCL is not at fault: check the network between the hosts, or their ranks"
    return [Finding("nccl-layer", "error", "", f"NCCL: {row}", why, "see the pairs and the rendezvous above")]


def _workaround_text(gloo: SelfTestResult) -> str:
    rates = [min(values) for (name, op), values in gloo.rates.items() if op in ("all_reduce", "broadcast")]
    if not rates:
        return ""
    return (
        f". Workaround: communication.fallback=gloo runs the trainer's collectives on gloo, which carries "
        f"{min(rates):,.0f} MB/s here"
    )
