"""The cluster that a run uses, and on which of its nodes the roles are placed."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from lockstep.config.section import Section, default_kind

_GPU_REASON = "it numbers GPUs, and every worker gets those of its own node that were reserved for it"
_INTERNAL_REASON = "it is of one process of one run"
RESERVED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": _GPU_REASON, "NVIDIA_VISIBLE_DEVICES": _GPU_REASON, "HIP_VISIBLE_DEVICES": _GPU_REASON,
    "ROCR_VISIBLE_DEVICES": _GPU_REASON, "ASCEND_RT_VISIBLE_DEVICES": _GPU_REASON,
    "LOCKSTEP_TOKEN": _INTERNAL_REASON, "LOCKSTEP_WORKER": _INTERNAL_REASON, "LOCKSTEP_WATCH*": _INTERNAL_REASON,
    "LOCKSTEP_BEACONS": "it is of one node: set it where that node's Ray is started",
}  # fmt: skip
"""Variables, by name or its beginning and `*`, that no config sets for all workers: why."""


def matching_reason(name: str, reasons: Mapping[str, str]) -> str | None:
    """What is said of a variable in such a table; None where it is not in it."""
    return next((why for pattern, why in reasons.items() if fnmatchcase(name, pattern)), None)


class LocalClusterConfig(Section):
    """Processes on this host, spawned by a node agent."""

    kind: Literal["local"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    orphan_grace_s: float = Field(0.0, ge=0)
    """How long workers outlive a controller that died; a run that is resumed within it keeps engines and scorers."""
    stall_limit_s: float = Field(900.0, gt=0)
    """A call whose worker shows no progress for this long fails; progress resets it."""
    notice_after_s: float = Field(10.0, gt=0)
    """A wait without progress for this long is told on the console."""


class RayClusterConfig(Section):
    """Processes on the nodes of a Ray cluster, where its placement group reserves their CPUs and GPUs. On each node a
    detached actor holds a node agent, which spawns them."""

    kind: Literal["ray"] = "ray"
    address: str | None = None
    """`HOST:PORT` of a running cluster's head, or `auto` for the one that this host belongs to. When absent, that of
    `RAY_ADDRESS`, else a Ray of this host alone, started for the run and stopped with it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs where the cluster has some."""
    env: dict[str, str] = {}
    """Variables that every worker on every node gets; none that number GPUs."""
    forward_env: tuple[str, ...] = (
        "NCCL_*", "TORCH_*", "GLOO_*", "CUDA_*", "UCX_*", "FI_*", "VLLM_*", "HF_*", "OMP_*", "TOKENIZERS_*",
        "LOCKSTEP_*", "WANDB_*", "PYTHONPATH",
    )  # fmt: skip
    """Variables of the shell that starts the run, by name or with `*`, that reach every worker on every node. What else
    differs there is told."""
    interface: str | None = None
    """Name, or beginning of the name, of the network interface that nodes reach each other by; the one of the node's
    Ray address when absent."""
    ports: tuple[int, int] | None = None
    """The first and the last port on which a run's controller (two) and its node agents (one each) listen; any when
    absent. Connections for tensors take any ports all the same, see `docs/cluster.md`."""
    orphan_grace_s: float = Field(300.0, ge=0)
    """How long workers outlive a controller that died; a run that is resumed within it keeps engines and scorers."""
    stall_limit_s: float = Field(900.0, gt=0)
    """A call whose worker shows no progress for this long fails; progress resets it."""
    notice_after_s: float = Field(10.0, gt=0)
    """A wait without progress for this long is told on the console."""
    node_lost_after_s: float = Field(6.0, gt=0)
    """A node from which nothing is heard for this long is lost. A Ray that is started for the run is told so as well;
    one that runs already has its own setting (`RAY_health_check_*`)."""
    busy_limit_s: float | None = Field(None, gt=0)
    """How long to wait for resources that others use at the moment; as long as it takes when absent, visibly."""

    @field_validator("ports")
    @classmethod
    def _are_enough(cls, ports: tuple[int, int] | None) -> tuple[int, int] | None:
        if ports is not None and not 1024 <= ports[0] <= ports[1] - 2 <= 65533:
            raise ValueError(
                f"expected the first and the last of 3 ports or more, from 1024 to 65535, and not {list(ports)}: the "
                "controller listens on two, and an agent beside it on one"
            )
        return ports

    @field_validator("env")
    @classmethod
    def _may_be_declared(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if why := matching_reason(name, RESERVED_VARIABLES):
                raise ValueError(f"cannot set {name} for all workers: {why}")
        return env


ClusterConfig = Annotated[LocalClusterConfig | RayClusterConfig, Field(discriminator="kind"), default_kind("local")]


PlacedRole = Literal["policy", "rollout"]


class RolePlacement(Section):
    """Of one role. What is absent follows from how many processes the role has, and from what nodes have."""

    nodes: int | None = Field(None, gt=0)
    """How many nodes its processes are on, the same number on each."""
    gpus_per_node: int | None = Field(None, gt=0)
    """How many GPUs it takes of each of its nodes."""
    cpus: float = Field(1.0, gt=0)
    """CPU cores that are reserved for each process."""


class PlacementConfig(Section):
    """Where a cluster of several nodes (`cluster.kind: ray`) runs the roles. The reference has no processes of its own:
    it is evaluated on the policy's ranks, and so always colocated with them."""

    strategy: Literal["pack", "spread"] = "pack"
    """`pack` fills a node before the next is used, `spread` takes as many nodes as there are."""
    colocate: Literal["all"] | tuple[PlacedRole, ...] = ()
    """Roles whose processes share GPUs (`all` or `[policy, rollout]`): engines sleep while the trainer trains. With
    `rollout.engine.kind: vllm` their weights and K/V cache leave the GPU meanwhile."""
    policy: RolePlacement = RolePlacement()
    rollout: RolePlacement = RolePlacement()

    @model_validator(mode="after")
    def _colocates_two(self) -> Self:
        if self.colocate and self.colocate != "all" and set(self.colocate) != {"policy", "rollout"}:
            raise ValueError(f"colocate {list(self.colocate)}: expected all, or [policy, rollout]")
        return self

    @property
    def shared(self) -> bool:
        """Whether engines and trainer ranks take turns on the same GPUs."""
        return bool(self.colocate)
