"""The communicators that a config will create: who is in them, on which backend, with which operations. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lockstep.config.run import RunConfig

Backend = Literal["nccl", "gloo"]
Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True, slots=True)
class Communicator:
    """Disjoint groups of processes that all have the same one of the same name."""

    name: str
    backend: Backend
    members: tuple[str, ...]
    """Names of processes, in the order of their ranks."""
    operations: tuple[Operation, ...]
    does: str
    """What it is for, in a few words."""

    def json(self, ranks: Sequence[str]) -> dict[str, Any]:
        """For the ranks of the self-test: members as numbers."""
        return {**asdict(self), "members": [ranks.index(each) for each in self.members]}


def communicators(config: RunConfig, device: Literal["cpu", "cuda"]) -> list[Communicator]:
    """Those of a run with this config, as the trainer and the weight sync make them.

    The trainer's default one carries FSDP2's gathers and scatters; with copies (HSDP) these are on one per copy, and
    gradients are summed on one per shard. Checkpoints have theirs on gloo. Weights go to engines on a communicator of
    trainer and engines (NCCL), or by pairs (gloo), where they do not go through memory that both see.
    """
    trainer = config.trainer
    policy = tuple(f"policy-{rank}" for rank in range(trainer.ranks))
    fast: Backend = "nccl" if device == "cuda" else "gloo"
    found = []
    if trainer.ranks > 1:
        found.append(Communicator("trainer", fast, policy, OPERATIONS, "FSDP2's weights and gradients, metrics"))
        found.append(Communicator("checkpoint", "gloo", policy, ("all_gather", "broadcast"), "checkpoints"))
    if trainer.replicas > 1:
        shards = trainer.shards
        for copy in range(trainer.replicas):
            members = policy[copy * shards : (copy + 1) * shards]
            operations: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
            found.append(Communicator(f"copy {copy}", fast, members, operations, "weights and gradients of one copy"))
        for shard in range(shards):
            members = policy[shard::shards]
            found.append(
                Communicator(f"across copies {shard}", fast, members, ("all_reduce",), "gradients across copies")
            )
    return found + _of_weights(config, policy, device)


def _of_weights(config: RunConfig, policy: Sequence[str], device: str) -> list[Communicator]:
    generates = getattr(config, "recipe", "") == "grpo" or config.evaluation is not None
    if not generates:
        return []
    transport = config.weights.transport
    engines = tuple(f"engine-{number}" for number in range(config.rollout.engine.count))
    if transport in ("nccl", "auto") and device == "cuda" and not config.placement.shared:
        return [Communicator("weights", "nccl", (policy[0], *engines), ("broadcast",), "weights to all engines")]
    if transport == "gloo" or (transport == "auto" and config.cluster.kind == "ray"):
        return [
            Communicator(f"weights {engine}", "gloo", (policy[0], engine), ("broadcast",), f"weights to {engine}")
            for engine in engines
        ]
    return []


def processes(found: Iterable[Communicator]) -> list[str]:
    """All that are in one, trainer ranks first, each once."""
    return list(dict.fromkeys(name for each in found for name in each.members))


def on_gloo(found: Iterable[Communicator]) -> list[Communicator]:
    """The same on the other backend."""
    return [replace(each, backend="gloo") for each in found]
