"""The cluster of a run, and the placement of roles on its nodes."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self, get_args

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
    """First and last port on which the controller (two ports), node agents and, with more than 32 nodes, call relays
    (one port each) listen; any ports when absent. Connections for tensors always use any port, see
    `docs/cluster.md`."""
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


COLOCATED_PAIRS: Mapping[str, tuple[PlacedRole, PlacedRole]] = {
    "actor_ref": ("policy", "reference"),
    "critic_reward": ("critic", "reward_model"),
}
"""Short names of sets of roles, those of OpenRLHF."""
_SETS_EXPECTED = (
    f"expected all, a list of roles ({', '.join(PLACED_ROLES)}), or a list of such lists, where "
    f"{' and '.join(COLOCATED_PAIRS)} are short for [policy, reference] and [critic, reward_model]"
)


class PlacementConfig(Section):
    """The placement of roles on several nodes (`cluster.kind: ray`), and which of them share devices."""

    strategy: Literal["pack", "spread"] = "pack"
    """`pack` fills a node before it uses the next one, `spread` uses as many nodes as there are."""
    colocate: Literal["all"] | tuple[tuple[PlacedRole, ...], ...] = ()
    """Sets of roles whose processes share devices, rank beside rank: `all`, one set (`[policy, rollout]`) or several
    (`[[policy, reference], [critic, reward_model]]`, short `[actor_ref, critic_reward]`). The roles of a set take
    turns. Those that do not compute leave the devices, trained roles as their `trainer.offload` says; engines sleep:
    with `rollout.engine.kind: vllm` their weights and KV cache leave the GPU."""
    policy: RolePlacement = RolePlacement()
    critic: RolePlacement = RolePlacement()
    rollout: RolePlacement = RolePlacement()
    reference: RolePlacement = RolePlacement()
    """Without a section `reference`, the reference model is on the policy's ranks."""
    reward_model: RolePlacement = RolePlacement()
    """For each reward model of `reward.terms`."""

    @field_validator("colocate", mode="before")
    @classmethod
    def _read_sets(cls, value: Any) -> Any:
        """One set is a list of roles; the short name of a set stands for it."""
        if isinstance(value, str):
            value = value if value == "all" else [value]
        if isinstance(value, list | tuple):
            value = [COLOCATED_PAIRS.get(each, each) if isinstance(each, str) else each for each in value]
            roles = [each for each in value if isinstance(each, str)]
            if roles and len(roles) < len(value):
                raise ValueError(f"roles and sets of roles in one list: {_SETS_EXPECTED}")
            value = [value] if roles else value
            for each in value:
                if not isinstance(each, list | tuple) or not set(map(str, each)) <= set(PLACED_ROLES):
                    raise ValueError(f"{each}: {_SETS_EXPECTED}")
        return value

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        if self.colocate == "all":
            return self
        names = [role for roles in self.colocate for role in roles]
        for roles in self.colocate:
            if len(roles) < 2:
                raise ValueError(f"colocate {list(roles)}: a set has two roles or more: {_SETS_EXPECTED}")
            if "rollout" in roles and "policy" not in roles:
                raise ValueError(
                    f"colocate {list(roles)}: engines get their weights from the policy, so that rollout can share "
                    "devices only with the policy: add policy to the set, or leave rollout out"
                )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"colocate names {', '.join(twice)} twice: a role shares the devices of one set")
        return self

    def of_role(self, role: str) -> RolePlacement | None:
        """The placement of a role; None if it has no settings of its own."""
        section = section_of_role(role)
        return getattr(self, section) if section in PLACED_ROLES else None

    def set_of(self, role: str) -> tuple[str, ...]:
        """The sections of the roles that share devices with this one, itself included; only itself if it has devices of
        its own."""
        section = section_of_role(role)
        if self.colocate == "all":
            return PLACED_ROLES if section in PLACED_ROLES else (section,)
        return next((roles for roles in self.colocate if section in roles), (section,))

    def device_key(self, role: str) -> tuple[str, ...]:
        """A value that roles have in common if they share devices, and else have not."""
        together = self.set_of(role)
        return together if len(together) > 1 else (role,)

    @property
    def shared(self) -> bool:
        """Whether engines and the policy's ranks take turns on the same devices."""
        return "rollout" in self.set_of("policy")
