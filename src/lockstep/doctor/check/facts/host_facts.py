"""The facts about one host, as plain data: gathered on that host, sent as JSON, and judged on any host."""

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

T = TypeVar("T")

MAX_TEXT = 400
"""Maximum number of characters that are shown of a text from another host."""


def _numeric(address: str) -> str:
    return str(ipaddress.ip_address(address))


NumericAddress = Annotated[str, AfterValidator(_numeric)]
"""A numeric address, so that no name server is needed to dial it."""
PortNumber = Annotated[int, Field(gt=0, lt=1 << 16)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ShortText = Annotated[str, Field(max_length=256)]
PortText = Annotated[str, Field(pattern=r"^[0-9]{1,5}$")]


def parser_of(kind: type[T]) -> Callable[[Any], T]:
    """Returns a parser of data of this type, which ignores unknown fields and raises ValueError for invalid ones."""
    adapter = TypeAdapter(kind)

    def read(data: Any) -> T:
        try:
            return adapter.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{where[:80]}: {first['msg'][:MAX_TEXT]}") from None

    return read


def _check_address(text: str) -> str:
    ipaddress.ip_interface(text)
    return text


@dataclass(frozen=True, slots=True)
class HostVersions:
    """Installed versions; None if not installed."""

    packages: dict[str, str | None] = field(default_factory=dict)
    """Versions of distributions (torch, vllm, ray, ...), and of `python`, `cuda` (for which torch is built), `nccl` (of
    the wheel, or else of the system), `driver` and `kernel`."""
    unmet: list[str] = field(default_factory=list)
    """Unmet requirements of installed packages, such as `vllm 0.20 needs torch==2.11, ...`."""
    twice: list[str] = field(default_factory=list)
    """Installed distributions that contain the same library."""
    compat: str = ""
    """Folder with CUDA's forward compatibility library; empty if there is none."""
    compat_asked: bool = False
    """Whether LD_LIBRARY_PATH contains that folder."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses memory of a GPU."""

    pid: int
    name: str
    memory_mib: int | None
    ours: bool = False
    """Whether it is this process or one of its ancestors."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as reported by the driver. Memory in MiB, temperatures in degrees Celsius."""

    index: int
    bus: str
    """PCI address as sysfs writes it: `0000:07:00.0`."""
    name: str
    uuid: str = ""
    capability: str = ""
    memory_mib: int | None = None
    used_mib: int | None = None
    mig: bool = False
    compute_mode: str = ""
    persistence: bool | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """Slowdown threshold."""
    throttled: list[str] = field(default_factory=list)
    """Active reasons for reduced clocks, except idleness and user settings."""
    ecc: bool | None = None
    uncorrected: int = 0
    """Uncorrected errors since the driver was loaded."""
    remap_pending: bool = False
    remap_failed: bool = False
    fabric: str = ""
    """State of the GPU's registration with the NVSwitch fabric; empty without a fabric."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    replays: int | None = None
    links_up: int | None = None
    links_down: int | None = None
    """Number of NVLinks that are down; None if the GPU has no NVLinks or they were not queried."""
    processes: list[GpuProcess] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GpuTopology:
    """How devices are connected."""

    names: list[str] = field(default_factory=list)
    """GPU0, GPU1, ..., then NICs."""
    paths: list[list[str]] = field(default_factory=list)
    """Types of the paths from each device to each: X, NV4, PIX, PXB, PHB, NODE, SYS."""
    numa: dict[str, str] = field(default_factory=dict)
    """NUMA node by GPU."""
    nics: dict[str, str] = field(default_factory=dict)
    """Device name, such as mlx5_0, by NIC0, NIC1, ..."""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A GPU or network card on the PCI bus."""

    bus: str
    kind: str
    """`gpu` or `nic`."""
    width: int | None = None
    width_max: int | None = None
    speed_gts: float | None = None
    speed_max_gts: float | None = None
    slot_width: int | None = None
    """Maximum width of the port above the device; None if there is none."""
    slot_speed_gts: float | None = None
    numa: int | None = None
    iommu: str = ""
    """Type of the device's IOMMU group: `identity`, `DMA`, `DMA-FQ`; empty without a group."""


@dataclass(frozen=True, slots=True)
class PciBus:
    """GPUs, network cards and bridges on the PCI bus."""

    devices: list[PciDevice] = field(default_factory=list)
    redirecting: list[str] = field(default_factory=list)
    """Bridges whose access control (ACS) redirects peer-to-peer traffic to the root complex."""
    acs_known: bool = False
    """Whether the configuration of the bridges could be read, which requires root."""
    iommu: bool = False
    virtual: bool = False
    """Whether this is a virtual machine."""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an InfiniBand or RoCE adapter."""

    device: str
    port: int
    state: str
    physical: str
    layer: str
    rate_gbps: float | None = None
    errors: dict[str, int] = field(default_factory=dict)
    """Non-zero counters."""
    netdev: str = ""
    board: str = ""
    """Board id, which identifies the model of the card; empty if the driver does not report it."""
    routable_gid: bool | None = None
    """For RoCE: whether it has a RoCE v2 GID with an IPv4 or global IPv6 address."""


@dataclass(frozen=True, slots=True)
class RdmaAdapters:
    """InfiniBand and RoCE adapters."""

    ports: list[RdmaPort] = field(default_factory=list)
    peer_memory: bool = False
    """Whether nvidia_peermem (or nv_peer_mem) is loaded."""
    open_driver: bool = False
    """Whether NVIDIA's open kernel module is loaded, which registers GPU memory by dma-buf."""
    device_files: bool = False
    """Whether /dev/infiniband exists; a container does not have it by default."""
    hca: str = ""
    """Value of NCCL_IB_HCA, which selects the ports that NCCL uses."""


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A relevant line of the kernel log."""

    kind: str
    """`xid`, `sxid`, `bus`, `driver`, `oom`, `memory`, `pcie`, `nic`, `hung`."""
    text: str
    code: int | None = None
    device: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class KernelLog:
    """Relevant lines of the kernel log since boot."""

    events: list[KernelEvent] = field(default_factory=list)
    said_by: str = ""


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """Space in /dev/shm, in bytes."""

    total: int
    free: int
    kind: str = "tmpfs"
    noexec: bool = False
    stale: int = 0
    """Bytes in shared-memory segments of NCCL, torch, vLLM and Ray that no process has open."""
    stale_names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Resource limits of this process. None means unlimited."""

    shm: ShmSpace | None = None
    memlock: int | None = None
    nofile: int | None = None
    nofile_hard: int | None = None
    nproc: int | None = None
    threads_of_user: int | None = None
    pids_max: int | None = None
    pids_used: int | None = None
    memory_limit: int | None = None
    memory_used: int | None = None
    """Memory used by the control group, without reclaimable page cache."""
    memory_host: int = 0
    swap: int = 0
    map_count: int | None = None
    cgroup: str = ""
    """`v1`, `v2` or empty."""
    cpus: float | None = None
    """CPU time limit, in CPUs."""
    cpus_host: int = 0


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space and write speed of a folder that a run writes to, in bytes and seconds."""

    path: str
    purpose: str
    filesystem: str = ""
    total: int = 0
    free: int = 0
    files_free: int | None = None
    read_only: bool = False
    written: int = 0
    took_s: float = 0.0
    problem: str = ""
    """Why writing failed."""


@dataclass(frozen=True, slots=True)
class ClockSync:
    """Clock synchronisation of this host."""

    synchronised: bool | None = None
    offset_s: float | None = None
    """Offset from the time servers; None if it is not known."""
    said_by: str = ""


@dataclass(frozen=True, slots=True)
class NameResolution:
    """Forward and reverse name resolution."""

    host: str
    addresses: list[str] = field(default_factory=list)
    """Addresses of the host's own name, in the resolver's order."""
    names: dict[str, str] = field(default_factory=dict)
    """By address, the name that it resolves to; empty if there is none."""
    asked: dict[str, list[str]] = field(default_factory=dict)
    """By name of another host in the config, its addresses; empty if the name is unknown."""
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class HostInterface:
    """A network interface and its addresses, in the kernel's order."""

    name: str
    addresses: list[Annotated[str, AfterValidator(_check_address)]] = field(default_factory=list)
    """IPv4 before IPv6, in the order of `getifaddrs`, with prefix length: `10.0.0.5/24`."""
    up: bool = True
    running: bool = True
    """Whether it is up and has a carrier."""
    kind: str = "physical"
    """`loopback`, `bridge`, `virtual` (not backed by a card), `wireless`, `infiniband`, `physical`."""
    carries_host: bool = True
    """Whether it is a network card or is backed by one (a bridge with a card among its ports, a bond, a VLAN), so that
    its address belongs to the host."""
    mtu: int = 0
    speed_mbps: int = 0

    @property
    def plain(self) -> list[str]:
        """The addresses without prefix lengths."""
        return [address.partition("/")[0] for address in self.addresses]


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """Interfaces and routes of this host."""

    interfaces: list[HostInterface] = field(default_factory=list)
    route_v4: str = ""
    """The host's IPv4 address on the route to the internet; empty without a route."""
    route_v6: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    """The environment variables that select an interface or address."""


@dataclass(frozen=True, slots=True)
class RayToken:
    """What determines whether a Ray cluster that is started on this host requires a token."""

    mode: str = ""
    """RAY_AUTH_MODE."""
    where: str = ""
    """Name of the variable or file that holds a token; empty if there is no token."""


@dataclass(frozen=True, slots=True)
class PlannedPort:
    """A port on this host that a part of the run will listen on."""

    port: int
    purpose: str
    taken_by: str | None = None
    """`python3 (pid 4711)`, or `a process that cannot be seen from here`; None if the port is free."""
    fleeting: bool = False
    """Whether the kernel may assign the port to any connection (net.ipv4.ip_local_port_range)."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All facts about a host; a fact that could not be gathered is None, with the reason in `unchecked`."""

    host: str
    at: float = 0.0
    """When the facts were gathered, in seconds since 1970 by the host's clock."""
    versions: HostVersions | None = None
    gpus: list[Gpu] | None = None
    topology: GpuTopology | None = None
    pci: PciBus | None = None
    rdma: RdmaAdapters | None = None
    kernel: KernelLog | None = None
    limits: ResourceLimits | None = None
    disks: list[DiskSpace] | None = None
    clock: ClockSync | None = None
    names: NameResolution | None = None
    network: HostNetwork | None = None
    ports: list[PlannedPort] | None = None
    ray_token: RayToken | None = None
    unchecked: dict[str, str] = field(default_factory=dict)
    """By part, why it could not be gathered."""
    faults: dict[str, str] = field(default_factory=dict)
    """By part, the error that its source reported, such as a GPU driver that fails."""
    seconds: dict[str, float] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)


_parse_facts = parser_of(HostFacts)


def host_facts_from_json(data: object) -> HostFacts:
    """Parses the output of `json()`, which may come from another host and version; ignores unknown fields.

    Raises:
        ValueError: the data is invalid.
    """
    return _parse_facts(data)


def interface_addresses(interfaces: Sequence[HostInterface]) -> Iterator[tuple[str, str]]:
    """Name and address of every address of every interface."""
    for each in interfaces:
        for address in each.addresses:
            yield each.name, str(ipaddress.ip_interface(address).ip)


def interface_with_address(interfaces: Sequence[HostInterface], address: str) -> str:
    """Name of the interface that has this address; empty if none has it or it is invalid."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return next((name for name, own in interface_addresses(interfaces) if ipaddress.ip_address(own) == parsed), "")
