"""What is known about one host: plain data that is gathered there, sent as JSON and judged anywhere."""

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

T = TypeVar("T")

MAX_TEXT = 400
"""Letters of what somebody else says, at most, where it is shown."""


def _numeric(address: str) -> str:
    return str(ipaddress.ip_address(address))


NumericAddress = Annotated[str, AfterValidator(_numeric)]
"""A number and no name, so that dialling it asks no name server."""
PortNumber = Annotated[int, Field(gt=0, lt=1 << 16)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ShortText = Annotated[str, Field(max_length=256)]
PortText = Annotated[str, Field(pattern=r"^[0-9]{1,5}$")]


def parser_of(kind: type[T]) -> Callable[[Any], T]:
    """What makes one of that type of data.

    The function raises ValueError, with the first thing that is not as it should be.
    """
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
    """What is installed; None where it is not."""

    packages: dict[str, str | None] = field(default_factory=dict)
    """By distribution: torch, transformers, vllm, ray, deepspeed, lockstep-rl and others; `python`, `cuda` (that torch
    was built for), `nccl_choice` (the wheel's, else that of the system), `driver`, `driver_cuda` (newest CUDA of the
    driver),
    `kernel`."""
    unmet: list[str] = field(default_factory=list)
    """Requirements of installed packages that what is installed does not meet: `vllm 0.20 needs torch==2.11, ...`."""
    twice: list[str] = field(default_factory=list)
    """Of distributions that carry the same library, those that are there together."""
    compat: str = ""
    """Folder of the library of CUDA's forward compatibility; empty where there is none."""
    compat_asked: bool = False
    """Whether LD_LIBRARY_PATH has that folder."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Somebody who holds memory of a GPU."""

    pid: int
    name: str
    memory_mib: int | None
    ours: bool = False
    """Whether it is this process or one that started it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver tells it. Memory in MiB, temperatures in degrees Celsius."""

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
    """From which the GPU slows down."""
    throttled: list[str] = field(default_factory=list)
    """Reasons that slow it down now, without idleness and the settings of its user."""
    ecc: bool | None = None
    uncorrected: int = 0
    """Uncorrected errors since the driver was loaded."""
    remap_pending: bool = False
    remap_failed: bool = False
    fabric: str = ""
    """State of its registration with the NVSwitch fabric; empty where there is none."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    replays: int | None = None
    links_up: int | None = None
    links_down: int | None = None
    """NVLinks; None where it has none or they were not asked for."""
    processes: list[GpuProcess] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GpuTopology:
    """How devices reach each other."""

    names: list[str] = field(default_factory=list)
    """GPU0, GPU1, ..., then NICs."""
    paths: list[list[str]] = field(default_factory=list)
    """For each, to each: X, NV4, PIX, PXB, PHB, NODE, SYS."""
    numa: dict[str, str] = field(default_factory=dict)
    """By GPU, its NUMA node."""
    nics: dict[str, str] = field(default_factory=dict)
    """By NIC0, NIC1, ... the device's name, such as mlx5_0."""


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
    """The most that the port above it can do; None where there is none."""
    slot_speed_gts: float | None = None
    numa: int | None = None
    iommu: str = ""
    """Type of its IOMMU group: `identity`, `DMA`, `DMA-FQ`; empty where there is none."""


@dataclass(frozen=True, slots=True)
class PciBus:
    """The PCI bus."""

    devices: list[PciDevice] = field(default_factory=list)
    redirecting: list[str] = field(default_factory=list)
    """Bridges whose access control (ACS) sends peer-to-peer traffic up to the root complex."""
    acs_known: bool = False
    """Whether their configuration could be read; that takes root."""
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
    """Counters that are not 0."""
    netdev: str = ""
    board: str = ""
    """Which kind of card it is of: its board id; empty where the driver tells none."""
    routable_gid: bool | None = None
    """Of RoCE, whether a RoCE v2 GID with an IPv4 or global IPv6 address is there."""


@dataclass(frozen=True, slots=True)
class RdmaAdapters:
    """Remote direct memory access."""

    ports: list[RdmaPort] = field(default_factory=list)
    peer_memory: bool = False
    """Whether nvidia_peermem (or nv_peer_mem) is loaded."""
    open_driver: bool = False
    """Whether NVIDIA's driver is of the open kind, which registers GPU memory by dma-buf."""
    device_files: bool = False
    """Whether /dev/infiniband is there: in a container it has to be given."""
    hca: str = ""
    """NCCL_IB_HCA, which says what of it NCCL takes."""


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A line of the kernel's log that matters."""

    kind: str
    """`xid`, `sxid`, `host_memory`, `pcie`, `oom`, `nic`, `hung`."""
    text: str
    code: int | None = None
    device: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class KernelLog:
    """What the kernel's log says since the host started."""

    events: list[KernelEvent] = field(default_factory=list)
    said_by: str = ""


@dataclass(frozen=True, slots=True)
class ShmSpace:
    """/dev/shm. Bytes."""

    total: int
    free: int
    kind: str = "tmpfs"
    noexec: bool = False
    stale: int = 0
    """Bytes of segments of NCCL, torch, vLLM and Ray that no process has open."""
    stale_names: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """What the kernel allows this process. None is no limit."""

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
    """Of the control group, without what the page cache could give back."""
    memory_host: int = 0
    swap: int = 0
    map_count: int | None = None
    cgroup: str = ""
    """`v1`, `v2` or nothing."""
    cpus: float | None = None
    """How many CPUs' time it may use."""
    cpus_host: int = 0


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """A folder that a run writes to. Bytes, seconds."""

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
    """Why nothing could be written."""


@dataclass(frozen=True, slots=True)
class ClockSync:
    """This host's time."""

    synchronised: bool | None = None
    offset_s: float | None = None
    """Against its time servers."""
    said_by: str = ""


@dataclass(frozen=True, slots=True)
class NameResolution:
    """Name resolution, both ways."""

    host: str
    addresses: list[str] = field(default_factory=list)
    """Of the own name, in the resolver's order."""
    names: dict[str, str] = field(default_factory=dict)
    """By address, the name that it has; empty where it has none."""
    asked: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of other names that the run uses; none where a name is unknown."""
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class HostInterface:
    """A network interface and its addresses, in the kernel's order."""

    name: str
    addresses: list[Annotated[str, AfterValidator(_check_address)]] = field(default_factory=list)
    """IPv4 before IPv6, as `getifaddrs` gives them, each with its prefix length: `10.0.0.5/24`."""
    up: bool = True
    running: bool = True
    """Up, and with a carrier."""
    kind: str = "physical"
    """`loopback`, `bridge`, `virtual` (on no card of this host), `wireless`, `infiniband`, `physical`."""
    carries_host: bool = True
    """Whether it is a card of the host or stands on one: a bridge with one among its ports, a bond, a VLAN. Then its
    address is the host's own."""
    mtu: int = 0
    speed_mbps: int = 0

    @property
    def plain(self) -> list[str]:
        """Its addresses without their prefix lengths."""
        return [address.partition("/")[0] for address in self.addresses]


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """By which addresses this host could be known."""

    interfaces: list[HostInterface] = field(default_factory=list)
    route_v4: str = ""
    """Own address on the way to the internet; empty where there is no way."""
    route_v6: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    """The variables that choose an interface or address."""


@dataclass(frozen=True, slots=True)
class RayToken:
    """What Ray would go by to decide whether its cluster asks for a token."""

    mode: str = ""
    """RAY_AUTH_MODE."""
    where: str = ""
    """What holds a token: the name of a variable or file; empty where nothing does."""


@dataclass(frozen=True, slots=True)
class PlannedPort:
    """A port that something of the run would listen on here."""

    port: int
    purpose: str
    taken_by: str | None = None
    """`python3 (pid 4711)`, or `a process that cannot be seen from here`; None where it is free."""
    fleeting: bool = False
    """Whether the kernel hands it out to connections (net.ipv4.ip_local_port_range)."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything; None where it could not be found out, and then `unchecked` says why."""

    host: str
    at: float = 0.0
    """When, in seconds since 1970 by the host's own clock."""
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
    """By the name of the part, why it is not known."""
    faults: dict[str, str] = field(default_factory=dict)
    """By the name of the part, what says itself that it is not well."""
    seconds: dict[str, float] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


_parse_facts = parser_of(HostFacts)


def host_facts_from_json(data: object) -> HostFacts:
    """What `json()` gave, perhaps on another host and by another version: what is not known is left out.

    Raises:
        ValueError: it is something else.
    """
    return _parse_facts(data)


def interface_addresses(interfaces: Sequence[HostInterface]) -> Iterator[tuple[str, str]]:
    for each in interfaces:
        for address in each.addresses:
            yield each.name, str(ipaddress.ip_interface(address).ip)


def interface_with_address(interfaces: Sequence[HostInterface], address: str) -> str:
    """The interface that has the address; empty where none has it, or it is none."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return next((name for name, own in interface_addresses(interfaces) if ipaddress.ip_address(own) == wanted), "")
