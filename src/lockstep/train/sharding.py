"""FSDP2 and activation checkpointing around a policy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lockstep.models.policy import Policy
from lockstep.train.distributed import Ranks


def shard(policy: Policy, ranks: Ranks, reshard_after_forward: bool, compute: torch.dtype) -> None:
    """Shards every decoder layer, then the root with what is left (embedding, last norm, head).

    Gradients are summed over ranks, not averaged: the denominators are in the weights of the targets. With one rank
    there is nothing to shard and the module stays plain, unless compute is in a lower precision than the master
    weights, which FSDP2's mixed precision provides for one rank as well as for many.

    Weights that an adapter froze are sharded beside those that are trained; they have no gradients to reduce.
    """
    mixed = any(parameter.dtype != compute for parameter in policy.parameters())
    if ranks.group is None or (ranks.world == 1 and not mixed):
        return
    mesh = ranks.mesh()
    precision = MixedPrecisionPolicy(
        param_dtype=compute if mixed else None,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision)
    # The root's own parameters (embedding, last norm, head) are what backward needs first: freeing them is no gain.
    fully_shard(policy, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    for module in sharded_modules(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def checkpoint_activations(policy: Policy) -> None:
    """Recomputes each decoder layer in the backward pass instead of keeping its activations.

    The layer's own forward is replaced, not the module, so that parameter names stay, and FSDP2's hooks stay outside:
    a layer is gathered once for its recomputation and its backward.
    """

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return run

    for layer in policy.layers:
        layer.forward = recomputed(layer.forward)


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """The modules under FSDP2, none where the policy is plain."""
    return [found for found in module.modules() if isinstance(found, FSDPModule)]


def begin_microbatch(policy: nn.Module, last: bool, reshard_after_forward: bool) -> None:
    """Whether the next backward reduces gradients over the ranks (the last micro-batch of a step) or only adds them
    up locally (all others): a constant of the step, whatever the data.

    Where layers stay gathered after forward (ZeRO-2), they stay so for the whole step: one gather, whatever the
    number of micro-batches.
    """
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(last)
        policy.set_reshard_after_backward(last or reshard_after_forward)


def free_gathered(policy: nn.Module) -> None:
    """Frees what a forward without backward has left gathered, so that parameters are this rank's rows again."""
    for module in sharded_modules(policy):
        module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a parameter or gradient, sharing its memory."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
