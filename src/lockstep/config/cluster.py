"""The cluster of a run, and the placement of roles on its nodes."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from lockstep.config.roles import section_of_role
from lockstep.config.section import Section, default_kind

_GPU_REASON = "it numbers GPUs, and every worker gets the GPUs that are reserved for it on its node"
_INTERNAL_REASON = "it belongs to one process of one run"
RESERVED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": _GPU_REASON, "NVIDIA_VISIBLE_DEVICES": _GPU_REASON, "HIP_VISIBLE_DEVICES": _GPU_REASON,
    "ROCR_VISIBLE_DEVICES": _GPU_REASON, "ASCEND_RT_VISIBLE_DEVICES": _GPU_REASON,
    "LOCKSTEP_TOKEN": _INTERNAL_REASON, "LOCKSTEP_WORKER": _INTERNAL_REASON, "LOCKSTEP_WATCH*": _INTERNAL_REASON,
    "LOCKSTEP_BEACONS": "it belongs to one node: set it where that node's Ray is started",
}  # fmt: skip
"""Variables that no config may set for all workers, by name or by prefix and `*`, with the reason."""


def matching_reason(name: str, reasons: Mapping[str, str]) -> str | None:
    """The reason that a table of names and patterns gives for a variable; None if no entry matches."""
    return next((why for pattern, why in reasons.items() if fnmatchcase(name, pattern)), None)


class LocalClusterConfig(Section):
    """Processes on this host, spawned by a node agent."""

    kind: Literal["local"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    orphan_grace_s: float = Field(0.0, ge=0)
    """How long workers outlive a controller that died; a run that is resumed within this time reuses its engines and
    scorers."""
    stall_limit_s: float = Field(900.0, gt=0)
    """A call fails when its worker shows no progress for this long."""
    notice_after_s: float = Field(10.0, gt=0)
    """Warn on the console after this many seconds without progress."""
    tls: bool = False
    """Encrypt the connections between the run's processes; on one host only root could read them."""


class RayClusterConfig(Section):
    """Processes on the nodes of a Ray cluster, in placement groups that reserve their CPUs and GPUs. On each node a
    detached actor holds a node agent, which spawns them."""

    kind: Literal["ray"] = "ray"
    address: str | None = None
    """`HOST:PORT` of a running cluster's head, or `auto` for the cluster of this host. When absent, `RAY_ADDRESS`; if
    that is not set, a private Ray on this host, which starts and stops with the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses GPUs if the cluster has any."""
    env: dict[str, str] = {}
    """Variables for all workers on all nodes, except those that select GPUs."""
    forward_env: tuple[str, ...] = (
        "NCCL_*", "TORCH_*", "GLOO_*", "CUDA_*", "UCX_*", "FI_*", "VLLM_*", "HF_*", "OMP_*", "TOKENIZERS_*",
        "LOCKSTEP_*", "WANDB_*", "PYTHONPATH",
    )  # fmt: skip
    """Variables of the starting shell, by name or pattern with `*`, that all workers on all nodes get. A warning names
    other variables that differ there."""
    interface: str | None = None
    """Name, or prefix of the name, of the network interface between nodes; that of the node's Ray address when
    absent."""
    ports: tuple[int, int] | None = None
    """First and last port on which the controller (two ports) and the node agents (one each) listen; any ports when
    absent. Connections for tensors always use any port, see `docs/cluster.md`."""
    orphan_grace_s: float = Field(300.0, ge=0)
    """How long workers outlive a controller that died; a run that is resumed within this time reuses its engines and
    scorers."""
    stall_limit_s: float = Field(900.0, gt=0)
    """A call fails when its worker shows no progress for this long."""
    notice_after_s: float = Field(10.0, gt=0)
    """Warn on the console after this many seconds without progress."""
    node_lost_after_s: float = Field(6.0, gt=0)
    """A node counts as lost when it has not responded for this long. This also sets the health check of a private Ray;
    a running one has its own setting (`RAY_health_check_*`)."""
    tls: bool = False
    """Encrypt the connections between the run's processes, see `docs/security.md`. Weights and collectives have
    connections of their own, which are not encrypted."""
    busy_limit_s: float | None = Field(None, gt=0)
    """How long to wait for resources that are in use; without limit when absent, with regular notices."""

    @field_validator("ports")
    @classmethod
    def _check_ports(cls, ports: tuple[int, int] | None) -> tuple[int, int] | None:
        if ports is not None and not 1024 <= ports[0] <= ports[1] - 2 <= 65533:
            raise ValueError(
                f"expected the first and last of at least 3 ports between 1024 and 65535, not {list(ports)}: the "
                "controller listens on two, and an agent on the same host on one"
            )
        return ports

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if why := matching_reason(name, RESERVED_VARIABLES):
                raise ValueError(f"cannot set {name} for all workers: {why}")
        return env


ClusterConfig = Annotated[LocalClusterConfig | RayClusterConfig, Field(discriminator="kind"), default_kind("local")]


PlacedRole = Literal["policy", "rollout", "critic", "reference", "reward_model"]
PLACED_ROLES: tuple[str, ...] = get_args(PlacedRole)
"""Roles with a section in `placement`."""


class RolePlacement(Section):
    """The placement of one role. Absent fields follow from the role's number of processes and from the nodes."""

    nodes: int | None = Field(None, gt=0)
    """Number of nodes for its processes, the same number of processes on each."""
    gpus_per_node: int | None = Field(None, gt=0)
    """Number of GPUs that it uses on each of its nodes."""
    cpus: float = Field(1.0, gt=0)
    """CPU cores that are reserved for each process."""


class PlacementConfig(Section):
    """The placement of roles on several nodes (`cluster.kind: ray`)."""

    strategy: Literal["pack", "spread"] = "pack"
    """`pack` fills a node before it uses the next one, `spread` uses as many nodes as there are."""
    colocate: Literal["all"] | tuple[PlacedRole, ...] = ()
    """Roles whose processes share GPUs (`all` or `[policy, rollout]`): engines sleep while the trainer trains. With
    `rollout.engine.kind: vllm` their weights and KV cache leave the GPU in the meantime."""
    policy: RolePlacement = RolePlacement()
    critic: RolePlacement = RolePlacement()
    rollout: RolePlacement = RolePlacement()
    reference: RolePlacement = RolePlacement()
    """Without a section `reference`, the reference model is on the policy's ranks."""
    reward_model: RolePlacement = RolePlacement()
    """For each reward model of `reward.terms`; `nodes` and `gpus_per_node` for the first of them."""

    @model_validator(mode="after")
    def _check_colocate(self) -> Self:
        if self.colocate and self.colocate != "all" and set(self.colocate) != {"policy", "rollout"}:
            raise ValueError(f"colocate {list(self.colocate)}: expected all, or [policy, rollout]")
        return self

    def of_role(self, role: str) -> RolePlacement | None:
        """The placement of a role; None if it has no settings of its own."""
        section = section_of_role(role)
        return getattr(self, section) if section in PLACED_ROLES else None

    @property
    def shared(self) -> bool:
        """Whether engines and trainer ranks take turns on the same GPUs."""
        return bool(self.colocate)
