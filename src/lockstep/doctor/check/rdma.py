"""InfiniBand and RoCE adapters from sysfs, and what GPUDirect needs."""

import ipaddress
from pathlib import Path

from lockstep.doctor.check.facts import Port, Rdma
from lockstep.doctor.check.system import System, entries, number_of, text_of

COUNTERS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "port_rcv_constraint_errors", "VL15_dropped",
)  # fmt: skip
"""Of a port: the link. Names of Documentation/ABI/stable/sysfs-class-infiniband of the kernel."""
HARDWARE = (
    "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "out_of_buffer", "implied_nak_seq_err",
    "req_cqe_error", "resp_cqe_error", "duplicate_request",
)  # fmt: skip
"""Of an mlx5 port: transport."""


def gather_rdma(system: System) -> Rdma:
    """All ports of all adapters; none where there are none."""
    ports = [
        _port(device.name, port)
        for device in entries(system.sys / "class/infiniband")
        for port in entries(device / "ports")
    ]
    modules = system.sys / "module"
    peer = (modules / "nvidia_peermem").is_dir() or (modules / "nv_peer_mem").is_dir()
    open_kind = "Open Kernel Module" in (text_of(system.proc / "driver/nvidia/version") or "")
    hca = system.environ.get("NCCL_IB_HCA", "")
    return Rdma(ports, peer, open_kind, bool(entries(system.dev / "infiniband")), hca)


def _port(device: str, folder: Path) -> Port:
    words = (text_of(folder / "rate") or "").split()
    rate = float(words[0]) if words and words[0].replace(".", "", 1).isdigit() else None
    layer = text_of(folder / "link_layer") or ""
    netdev = text_of(folder / "gid_attrs/ndevs/0") or ""
    errors = {name: count for name in COUNTERS if (count := number_of(folder / "counters" / name))}
    errors |= {name: count for name in HARDWARE if (count := number_of(folder / "hw_counters" / name))}
    return Port(
        device,
        int(folder.name) if folder.name.isdigit() else 0,
        _word(folder / "state"),
        _word(folder / "phys_state"),
        layer,
        rate,
        errors,
        netdev,
        text_of(folder.parents[1] / "board_id") or "",
        _routable(folder) if layer == "Ethernet" else None,
    )


def _word(path: Path) -> str:
    """`ACTIVE` of `4: ACTIVE`."""
    return (text_of(path) or "").rpartition(":")[2].strip()


def _routable(folder: Path) -> bool:
    """Whether there is a RoCE v2 GID that is not link-local: IPv4 as ::ffff:a.b.c.d, or a global IPv6 address."""
    for path in entries(folder / "gids"):
        if text_of(folder / "gid_attrs/types" / path.name) != "RoCE v2":
            continue
        try:
            gid = ipaddress.IPv6Address(text_of(path) or "::")
        except ValueError:
            continue
        if not gid.is_unspecified and not gid.is_link_local:
            return True
    return False
