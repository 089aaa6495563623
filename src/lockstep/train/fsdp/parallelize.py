"""Builds the model that a rank trains or evaluates: loads the rank's rows, and shards it with FSDP2."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from lockstep.config.model import AdapterConfig, ModelConfig
from lockstep.config.trainer import TrainerConfig
from lockstep.models.hf_checkpoint import fill_head, fill_policy, resolve_folder
from lockstep.models.lora import add_adapter, fill_adapter
from lockstep.models.model_loader import load_policy, load_quantized_policy
from lockstep.models.packing_probe import probe_fused_decoder
from lockstep.models.policy_model import PolicyModel
from lockstep.models.score_model import ScoreModel
from lockstep.models.vision.model_parts import changing_parts, find_vision, parameter_parts
from lockstep.train.decoder_layers import prepare_layers
from lockstep.train.distributed import ParallelContext
from lockstep.train.lazy_weights import LazyWeight

log = logging.getLogger(__name__)


def device_mesh(ranks: ParallelContext) -> DeviceMesh:
    """Returns FSDP2's device mesh: `[ranks]`, or `[copies, ranks per copy]` if there are several copies."""
    if ranks.group is None:
        raise RuntimeError("one rank on a CPU has no communicator")
    if ranks.replicas == 1:
        return DeviceMesh.from_group(ranks.group, ranks.device.type, mesh_dim_names=("fsdp",))
    if ranks.copy is None or ranks.across is None:
        raise RuntimeError(f"rank {ranks.rank} has no communicators of its copy; create it with join_ranks()")
    places = torch.arange(ranks.world).view(ranks.replicas, ranks.shards)
    names = ("replicas", "fsdp")
    return DeviceMesh.from_group([ranks.across, ranks.copy], ranks.device.type, mesh=places, mesh_dim_names=names)


def shard_policy(
    policy: PolicyModel, ranks: ParallelContext, reshard_after_forward: bool, compute: torch.dtype
) -> None:
    """Shards every decoder layer, the blocks of a vision tower, its other parameters and the projector, then the root
    with all that remains (embedding, last norm, head).

    A tower or projector of which nothing is trained is not sharded: every rank has a copy, so that it needs no other
    rank to compute the features of its images, and features that never change can be kept.

    Gradients are summed over ranks, not averaged, because the weights of the targets include the denominators. With a
    single rank the module is not sharded, unless it computes in a lower precision than that of the master weights, for
    which FSDP2's mixed precision is needed.

    Frozen weights of a model with an adapter are sharded as well; they have no gradients to reduce.
    """
    mixed = any(parameter.dtype != compute for parameter in policy.parameters())
    if ranks.group is None or (ranks.world == 1 and not mixed):
        return
    mesh, copied = device_mesh(ranks), copied_weights(policy)
    precision = MixedPrecisionPolicy(
        param_dtype=compute if mixed else None,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
    )
    settings: dict[str, Any] = {"mesh": mesh, "ignored_params": copied}
    for layer in policy.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward, mp_policy=precision, **settings)
    for unit, cast in _vision_units(policy, copied):
        # As in a model that is all in the compute precision: rotary frequencies stay in float32.
        whole = replace(precision, output_dtype=None, cast_forward_inputs=cast)
        fully_shard(unit, reshard_after_forward=reshard_after_forward, mp_policy=whole, **settings)
        _restore_recorded_outputs(unit)
    # Backward begins with the root's own parameters (embedding, last norm, head), so freeing them would save nothing.
    fully_shard(policy, reshard_after_forward=False, mp_policy=precision, **settings)
    for module in sharded_modules(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo does not support pre-multiplied sums


def _restore_recorded_outputs(module: nn.Module) -> None:
    """Lets a tower return the hidden states of its blocks: transformers finds out by a model's class, which FSDP2
    changes, what it may record of the model."""
    if isinstance(module, PreTrainedModel):
        _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def copied_weights(policy: PolicyModel) -> set[nn.Parameter]:
    """The weights of which every rank has a copy: those of the tower and of the projector, if nothing of that part is
    trained."""
    parts, changing = parameter_parts(policy.lm), {"language", *changing_parts(policy.lm)}
    return {each for each in policy.parameters() if parts[id(each)] not in changing}


def _vision_units(policy: PolicyModel, copied: set[nn.Parameter]) -> Iterator[tuple[nn.Module, bool]]:
    """Yields what is gathered and freed as one when images are computed, inner modules first, and whether its inputs
    must be converted to the compute precision."""
    vision = find_vision(policy.lm)
    if vision is None:
        return
    beside = () if vision.inside else vision.projector
    for module in (*vision.blocks, vision.tower, *beside):
        if not copied.issuperset(module.parameters()):
            yield module, module not in vision.blocks


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """Returns the modules that FSDP2 shards; none if the policy is not sharded."""
    return [found for found in module.modules() if isinstance(found, FSDPModule)]


def uncalled_modules(policy: PolicyModel) -> list[FSDPModule]:
    """Returns the modules of FSDP2 that no row calls if the data has no images."""
    vision = find_vision(policy.lm)
    parts = () if vision is None else (vision.tower, *vision.projector)
    return list(dict.fromkeys(module for part in parts for module in sharded_modules(part)))


def begin_microbatch(
    policy: nn.Module, last: bool, reshard_after_forward: bool, uncalled: Sequence[FSDPModule] = ()
) -> None:
    """Sets whether the next backward reduces gradients over the ranks (for the last micro-batch of a step) or only sums
    them locally (for all others). So the number of reductions does not depend on the data.

    Without `reshard_after_forward` (ZeRO-2), layers stay gathered for the whole step, so that they are gathered once,
    whatever the number of micro-batches.

    Args:
        uncalled: modules that no row calls, which have no gradients to sum: FSDP2 would look for them.
    """
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(last)
        for module in uncalled:
            module.set_requires_gradient_sync(True)
        policy.set_reshard_after_backward(last or reshard_after_forward)


def free_gathered(policy: nn.Module) -> None:
    """Frees layers that a forward without backward has left gathered, so that parameters hold this rank's rows
    again."""
    for module in sharded_modules(policy):
        module.reshard()


def move_weights(policy: nn.Module, target: torch.device, own: torch.device) -> None:
    """Moves a model's weights between its device and host memory. Bits do not change.

    Args:
        own: the device on which the model computes. When the weights leave it, other processes can use its memory.
    """
    free_gathered(policy)
    policy.to(target)
    if own.type == "cuda" and target.type == "cpu":
        torch.cuda.empty_cache()


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's rows of a parameter or gradient, as a view."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def held_rows(ranks: ParallelContext, parameters: Mapping[str, nn.Parameter]) -> dict[str, LazyWeight]:
    """Returns this rank's rows of parameters, by name. Pass parameters of layers that are not gathered."""
    return {name: LazyWeight(tuple(each.shape), partial(_own_rows, ranks, each)) for name, each in parameters.items()}


def _own_rows(ranks: ParallelContext, parameter: nn.Parameter) -> Tensor:
    """A view of this rank's share of the rows, also if it has a copy of all."""
    held = local_shard(parameter)
    if isinstance(parameter, DTensor) or ranks.shards == 1 or not held.ndim:
        return held
    first, last = ranks.rows(held.shape[0])
    return held[first:last]


def load_sharded_policy(
    model: ModelConfig,
    ranks: ParallelContext,
    compute: torch.dtype,
    kept: torch.dtype,
    adapter: AdapterConfig | None = None,
    trainer: TrainerConfig | None = None,
    seed: int | None = None,
) -> PolicyModel:
    """Loads a policy and shards it over the ranks. Each rank reads its own rows.

    Args:
        compute: precision of forward and backward.
        kept: precision of the parameters; an adapter's are float32, and those of which every rank has a copy are in
            the compute precision.
        adapter: the adapter to add, instead of the model's own.
        trainer: how layers are computed and gathered; None for a model that is only evaluated.
        seed: seed of a new adapter's values, and of a new score head; None if the head must be in the checkpoint.

    Raises:
        ModelError: the model cannot be used, or its checkpoint does not match it.
    """
    trainer, quantized = trainer or TrainerConfig(), model.quantization is not None
    if quantized:
        policy = load_quantized_policy(model, ranks.device, kept)
    else:
        policy = load_policy(model, ranks.device, meta=True, dtype=kept)
    if adapter is not None:
        add_adapter(policy, adapter)
    elif ranks.group is not None:  # FSDP2's mixed precision leaves what it does not shard as it is
        for weight in copied_weights(policy):
            weight.data = weight.data.to(compute)
    not_fused_reason = prepare_layers(policy, trainer, ranks.device, compute)
    if not quantized:
        shard_policy(policy, ranks, trainer.reshard_after_forward, compute)
        fill_policy(policy, _model_folder(model), ranks.device, (ranks.rank, ranks.world), head_seed=seed)
    elif isinstance(policy, ScoreModel):
        fill_head(policy, _model_folder(model), seed)
    if adapter is not None:
        fill_adapter(policy, adapter, seed or 0, ranks.device)
    log.info("rank %d computes decoder layers by %s", ranks.rank, not_fused_reason or probe_fused_decoder(policy))
    free_gathered(policy)
    return policy


def parameter_dtype(model: ModelConfig, ranks: ParallelContext, compute: torch.dtype) -> torch.dtype:
    """Returns the precision of the parameters. Frozen weights need no master weights in float32. But without FSDP2's
    mixed
    precision, frozen weights and weights that are trained in full must have the same precision."""
    if model.adapter is None:
        return torch.float32
    mixes = bool(model.adapter.modules_to_save) and ranks.group is None
    return torch.float32 if mixes and model.quantization is None else compute


def _model_folder(model: ModelConfig) -> Path:
    return resolve_folder(model.path, model.revision)
