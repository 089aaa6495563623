"""Loads the models of a rank: the one that is trained, and its reference."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from lockstep.config.train_role import TrainRole
from lockstep.models.hf_checkpoint import fill_policy, resolve_folder
from lockstep.models.lora import ADAPTER_NAME, adapted_layers, add_adapter, fill_adapter
from lockstep.models.model_loader import load_policy, resolve_dtype
from lockstep.models.packing_probe import probe_fused_decoder
from lockstep.models.policy_model import PolicyModel
from lockstep.models.vision.model_parts import find_vision
from lockstep.train.decoder_layers import prepare_layers
from lockstep.train.deepspeed.deepspeed_library import make_engine, make_partition
from lockstep.train.deepspeed.engine_settings import may_change_layers, zero_stage
from lockstep.train.distributed import ParallelContext


def make_model(role: TrainRole, ranks: ParallelContext) -> PolicyModel:
    """Returns the role's model without values, on the meta device, with its adapter if it has one. Raises ModelError if
    it cannot be used."""
    compute = resolve_dtype(role.model.dtype, ranks.device)
    policy = load_policy(role.model, ranks.device, meta=True, dtype=compute)
    if role.model.adapter is not None:
        add_adapter(policy, role.model.adapter)
    # DeepSpeed casts an adapter, and the weights trained with it, only if no parameter was partitioned before.
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(compute)
    prepare_layers(policy, role.trainer, ranks.device, compute, may_change_layers(role))
    return policy


def fill_model(
    policy: PolicyModel, role: TrainRole, ranks: ParallelContext, settings: Mapping[str, Any], seed: int | None = None
) -> None:
    """Reads the values of the role's model. At stage 3, a parameter is partitioned as soon as it is read, so that a
    rank never holds more than one of them whole (but all with DoRA, whose first magnitudes are norms of the weights).

    Args:
        settings: of the engine that gets the model.
        seed: seed of a new adapter's values, and of a new score head; None if the head must be in the checkpoint.

    Raises:
        ModelError: the checkpoint does not match the model.
    """
    folder, adapter = resolve_folder(role.model.path, role.model.revision), role.model.adapter
    divides = zero_stage(role) == 3 and (adapter is None or adapter.kind != "dora")
    partition = make_partition(ranks, settings) if divides else None
    if partition is not None and adapter is not None:
        partition = partial(_partition_frozen, partition)
    fill_policy(policy, folder, ranks.device, (ranks.rank, ranks.world), head_seed=seed, on_filled=partition)
    if adapter is not None:
        fill_adapter(policy, adapter, seed or 0, ranks.device)
    if may_change_layers(role):
        probe_fused_decoder(policy)


def _partition_frozen(partition: Callable[[nn.Parameter], None], parameter: nn.Parameter) -> None:
    """A stored adapter replaces the values of weights that are trained with it: they stay whole until then."""
    if not parameter.requires_grad:
        partition(parameter)


class Reference:
    """The frozen reference: sharded at stage 3, else a copy on each rank.

    Args:
        settings: of the engine of the trained model.
    """

    def __init__(self, role: TrainRole, ranks: ParallelContext, settings: Mapping[str, Any]) -> None:
        self.policy = make_model(role, ranks).requires_grad_(False)
        fill_model(self.policy, role, ranks, settings)
        self._engine = make_engine(ranks, self.policy, settings) if zero_stage(role) == 3 else None
        if self._engine is not None:
            register_parameters(self.policy)

    def close(self) -> None:
        """Releases DeepSpeed's engine."""
        if self._engine is not None:
            self._engine.destroy()


def register_parameters(policy: PolicyModel) -> None:
    """Has stage 3 gather parameters that are used without a call of their own module: the head's weight and those of a
    projector that are in no module of it, for the forward of the whole model; and what DoRA's norms are computed from,
    for the forward of the adapted layer."""
    zero, vision = import_module("deepspeed.runtime.zero.partition_parameters"), find_vision(policy.lm)
    for parameter in (*policy.head.parameters(), *(() if vision is None else vision.loose)):
        zero.register_external_parameter(policy, parameter)
    for layer in adapted_layers(policy).values():
        if ADAPTER_NAME in layer.lora_magnitude_vector:
            for module in (layer.get_base_layer(), layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]):
                zero.register_external_parameter(layer, module.weight)
