"""Which roles are on which nodes, in the words of those who place GPUs."""

from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.config.base import Section

Placed = Literal["policy", "rollout"]


class RolePlacement(Section):
    """Of one role. What is absent follows from how many processes the role has, and from what nodes have."""

    nodes: int | None = Field(None, gt=0)
    """How many nodes its processes are on, the same number on each."""
    gpus_per_node: int | None = Field(None, gt=0)
    """How many GPUs it takes of each of its nodes."""
    cpus: float = Field(1.0, gt=0)
    """CPU cores that are reserved for each process."""


class Placement(Section):
    """Where a cluster of several nodes (`cluster.kind: ray`) runs the roles. The reference has no processes of its own:
    it is evaluated on the policy's ranks, and so always colocated with them."""

    strategy: Literal["pack", "spread"] = "pack"
    """`pack` fills a node before the next is used, `spread` takes as many nodes as there are."""
    colocate: Literal["all"] | tuple[Placed, ...] = ()
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
