"""A sharded model as one rank evaluates it: the policy, its reference, or a model that is only served."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.config.algorithm import ModelOutput
from lockstep.config.serve_role import ServeRole
from lockstep.data.micro_batch import MicroBatch
from lockstep.models.model_loader import context_length, resolve_dtype
from lockstep.models.packing_probe import PackingProbeResult, probe_packing
from lockstep.models.policy_model import PolicyModel
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.kept_forward import KeptForward
from lockstep.train.fsdp.parallelize import free_gathered, load_sharded_policy, move_weights, parameter_dtype
from lockstep.watch.beacon.writer import current_beacon


def target_values(
    model: PolicyModel, batch: MicroBatch[Tensor], outputs: Sequence[ModelOutput], temperature: float, chunk: int
) -> dict[ModelOutput, Tensor]:
    """Returns the log-probabilities, and the entropies if they are among the outputs, `[targets]` each, under the
    distribution that the engine samples from; of a model with a score head, the scores.

    Args:
        outputs: one kind of entropy at most.
        temperature: divisor of the logits.
        chunk: number of targets whose logits are computed at once.
    """
    renyi = "renyi_entropy" in outputs
    values, entropy = model(
        batch.tokens,
        batch.layout(),
        batch.sources,
        batch.targets,
        temperature=temperature,
        chunk=chunk,
        entropy="entropy" in outputs,
        renyi_entropy=renyi,
    )
    if "scores" in outputs:
        return {"scores": values}
    kind: ModelOutput = "renyi_entropy" if renyi else "entropy"
    return {"logprobs": values} if entropy is None else {"logprobs": values, kind: entropy}


def evaluate_each(
    model: PolicyModel,
    microbatches: Sequence[MicroBatch[np.ndarray]],
    outputs: Sequence[ModelOutput],
    device: torch.device,
    temperature: float,
    chunk: int,
    kept: KeptForward | None = None,
) -> list[dict[str, np.ndarray]]:
    """Computes the outputs of each micro-batch, float32 `[targets]`. Layers may stay gathered; see `free_gathered`.

    Args:
        kept: gets the forward passes of as many of the first micro-batches as it may have. They are computed last, so
            that they need no memory while others are computed. All others are computed without gradients.
    """
    results: list[dict[str, np.ndarray]] = [{} for _ in microbatches]
    for done, number in enumerate(reversed(range(len(microbatches))), start=1):
        with torch.set_grad_enabled(kept is not None and number < kept.most):
            values = target_values(model, microbatches[number].to(device), outputs, temperature, chunk)
        if kept is not None and number < kept.most:
            kept.add(microbatches[number], values)
        results[number] = {name: values[name].detach().float().cpu().numpy() for name in outputs}
        current_beacon().progress("microbatches", done, len(microbatches))
    return results


class FSDP2ServedModel:
    """One rank of a served model (`lockstep.train.served_model.ServedModel`).

    Args:
        ranks: returned by `lockstep.train.distributed.join_ranks`.

    Raises:
        ModelError: the model cannot be used, or its checkpoint does not match it.
    """

    def __init__(self, role: ServeRole, ranks: ParallelContext) -> None:
        self.role, self.ranks = role, ranks
        self.compute_dtype = resolve_dtype(role.model.dtype, ranks.device)
        adapter = role.model.adapter
        kept = self.compute_dtype if adapter is None else parameter_dtype(role.model, ranks, self.compute_dtype)
        self.model = load_sharded_policy(role.model, ranks, self.compute_dtype, kept, adapter).requires_grad_(False)
        self.offloaded = False

    @property
    def context_length(self) -> int:
        """The longest sequence of the model, in tokens."""
        return context_length(self.model.config)

    def probe_packing(self) -> PackingProbeResult:
        """Finds out how rows may be packed for the model. All ranks call it."""
        result = probe_packing(self.model, self.compute_dtype)
        free_gathered(self.model)
        return result

    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[ModelOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Computes the outputs of each micro-batch, float32 `[targets]`, without gradients. All ranks call it, with the
        same number of micro-batches. Raises RuntimeError while the weights are in host memory."""
        if self.offloaded:
            raise RuntimeError(f"the {self.role.name} model is offloaded to host memory; call onload() first")
        role = self.role
        values = evaluate_each(self.model, microbatches, outputs, self.ranks.device, role.temperature, role.head_chunk)
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
