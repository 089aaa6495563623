"""A sharded model that is only served, as one rank evaluates it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lockstep.config.algorithm import ModelOutput
from lockstep.config.serve_role import ServeRole
from lockstep.data.micro_batch import MicroBatch
from lockstep.models.model_loader import context_length, resolve_dtype
from lockstep.models.packing_probe import PackingProbeResult, probe_packing
from lockstep.train.distributed import ParallelContext
from lockstep.train.forward.image_inputs import image_inputs
from lockstep.train.forward.target_values import ForwardSettings, evaluate_each
from lockstep.train.fsdp.parallelize import free_gathered, load_sharded_policy, move_weights, parameter_dtype


class FSDP2ServedModel:
    """One rank of a served model (`lockstep.train.served_model.ServedModel`).

    Args:
        ranks: returned by `lockstep.train.distributed.join_ranks`.
        images: the folder of the run's prepared images; None if the data has none.

    Raises:
        ModelError: the model cannot be used, or its checkpoint does not match it.
    """

    def __init__(self, role: ServeRole, ranks: ParallelContext, images: Path | None = None) -> None:
        self.role, self.ranks = role, ranks
        self.compute_dtype = resolve_dtype(role.model.dtype, ranks.device)
        adapter = role.model.adapter
        kept = self.compute_dtype if adapter is None else parameter_dtype(role.model, ranks, self.compute_dtype)
        self.model = load_sharded_policy(role.model, ranks, self.compute_dtype, kept, adapter).requires_grad_(False)
        inputs = image_inputs(images, role.model, self.model, ranks.device)
        self.forward = ForwardSettings(ranks.device, role.temperature, role.head_chunk, inputs)
        self.offloaded = False

    @property
    def context_length(self) -> int:
        """The longest sequence of the model, in tokens."""
        return context_length(self.model.config)

    def probe_packing(self) -> PackingProbeResult:
        """Finds out how rows may be packed for the model. All ranks call it."""
        result = probe_packing(self.model, self.compute_dtype, self.forward.probe_image())
        free_gathered(self.model)
        return result

    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[ModelOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Computes the outputs of each micro-batch, float32 `[targets]`, without gradients. All ranks call it, with the
        same number of micro-batches. Raises RuntimeError while the weights are in host memory."""
        if self.offloaded:
            raise RuntimeError(f"the {self.role.name} model is offloaded to host memory; call onload() first")
        values = evaluate_each(self.model, microbatches, outputs, self.forward)
        free_gathered(self.model)
        return values

    def offload(self) -> None:
        """Moves the weights to host memory, so that another role can use the device's memory."""
        move_weights(self.model, torch.device("cpu"), self.ranks.device)
        self.offloaded = True

    def onload(self) -> None:
        """Moves the weights back to the device."""
        move_weights(self.model, self.ranks.device, self.ranks.device)
        self.offloaded = False

    def close(self) -> None:
        """Leaves the communicators."""
        self.ranks.leave()
