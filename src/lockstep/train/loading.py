"""A policy as the trainer holds it: each rank's own rows, in the precision that they are kept in."""

import logging
from pathlib import Path

import torch

from lockstep.config.model import Adapter, Model
from lockstep.config.recipes import Config
from lockstep.models.load import load_policy, load_quantized
from lockstep.models.lora import add_adapter, fill_adapter
from lockstep.models.policy import Policy
from lockstep.models.probe import probe_layers
from lockstep.models.weights import fill, folder_digest, resolve_folder
from lockstep.train.distributed import Ranks
from lockstep.train.sharding import checkpoint_activations, free_gathered, shard
from lockstep.train.speed import compile_layers

log = logging.getLogger(__name__)


def load(
    config: Config, ranks: Ranks, compute: torch.dtype, kept: torch.dtype, adapter: Adapter | None = None
) -> Policy:
    """A policy with its parameters in `kept` that computes in `compute`, an adapter in float32, each rank reading its
    own rows.

    Raises:
        ModelError: the model cannot be used, or its checkpoint does not fit it.
    """
    trainer, quantized = config.trainer, config.model.quantization is not None
    if quantized:
        policy = load_quantized(config.model, ranks.device, kept)
    else:
        policy = load_policy(config.model, ranks.device, meta=True, dtype=kept)
    if adapter is not None:
        add_adapter(policy, adapter)
    apart = _fuse_layers(policy, ranks.device, compute)
    if trainer.compile == "layers":
        compile_layers(policy, ranks.device)
    if trainer.activation_checkpointing:
        checkpoint_activations(policy)
    if not quantized:
        shard(policy, ranks, trainer.reshard_after_forward, compute)
        fill(policy, _folder(config.model), ranks.device)
    if adapter is not None:
        fill_adapter(policy, adapter, config.seed, ranks.device)
    log.info("rank %d computes decoder layers by %s", ranks.rank, apart or probe_layers(policy))
    free_gathered(policy)
    return policy


def kept_dtype(model: Model, ranks: Ranks, compute: torch.dtype) -> torch.dtype:
    """Of the parameters. What an adapter freezes needs no master weights; but a plain module, without FSDP2's mixed
    precision, cannot mix it with weights that are trained whole."""
    if model.adapter is None:
        return torch.float32
    mixes = bool(model.adapter.modules_to_save) and ranks.group is None
    return torch.float32 if mixes and model.quantization is None else compute


def digests(model: Model) -> dict[str, str]:
    """What a checkpoint of an adapter stands on; empty without one."""
    if model.adapter is None:
        return {}
    begun = model.adapter.path
    first = {} if begun is None else {"adapter": folder_digest(resolve_folder(begun, field="model.adapter.path"))}
    return {"base": folder_digest(_folder(model)), **first}


def _fuse_layers(policy: Policy, device: torch.device, compute: torch.dtype) -> str | None:
    """Layers with fewer passes over memory, where that is what takes time; says why not."""
    if device.type != "cpu" or compute != torch.float32:
        return "the model's own forward: there is no other for this device and precision"
    refusal = policy.fuse_layers()
    return refusal and f"the model's own forward: {refusal}"


def _folder(model: Model) -> Path:
    return resolve_folder(model.path, model.revision)
