"""Computes a model's outputs for the targets of micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.algorithm import ModelOutput, TrainerOutput
from lockstep.data.images.image_store import PreparedImage
from lockstep.data.micro_batch import MicroBatch
from lockstep.data.row_layout import RowLayout
from lockstep.models.policy_model import PolicyModel
from lockstep.train.forward.image_inputs import ImageInputs
from lockstep.train.forward.kept_forward import KeptForward
from lockstep.watch.beacon.writer import current_beacon


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """How a rank computes the outputs of its models."""

    device: torch.device
    temperature: float
    """Divisor of the logits."""
    chunk: int
    """Number of targets whose logits are computed at once."""
    images: ImageInputs | None = None
    """The images of the rows; None if the data has none."""

    def probe_image(self) -> PreparedImage | None:
        """Returns an image to compare packed rows with; None if the data has none."""
        return None if self.images is None else self.images.probe_image()

    def row(self, model: PolicyModel, batch: MicroBatch[Tensor]) -> tuple[RowLayout, dict[str, Any]]:
        """Returns the layout of a row, and the argument about its images with which the model is called.

        Raises:
            RuntimeError: the row has images, and the rank got no folder of them.
        """
        if self.images is not None:
            return self.images.row(model, batch)
        if batch.images:
            raise RuntimeError("a row has images, but this rank was started without the folder of the run's images")
        return batch.layout(), {}


def target_values(
    model: PolicyModel,
    batch: MicroBatch[Tensor],
    outputs: Sequence[ModelOutput],
    settings: ForwardSettings,
    call: Callable[..., Any] | None = None,
) -> dict[ModelOutput, Tensor]:
    """Returns the log-probabilities, and the entropies if they are among the outputs, `[targets]` each, under the
    distribution that the engine samples from; of a model with a score head, the scores.

    Args:
        outputs: one kind of entropy at most.
        call: what is called instead of the model, such as an engine that contains it.
    """
    renyi = "renyi_entropy" in outputs
    layout, images = settings.row(model, batch)
    values, entropy = (call or model)(
        batch.tokens,
        layout,
        batch.sources,
        batch.targets,
        temperature=settings.temperature,
        chunk=settings.chunk,
        entropy="entropy" in outputs,
        renyi_entropy=renyi,
        **images,
    )
    if "scores" in outputs:
        return {"scores": values}
    kind: ModelOutput = "renyi_entropy" if renyi else "entropy"
    return {"logprobs": values} if entropy is None else {"logprobs": values, kind: entropy}


def evaluate_each(
    model: PolicyModel,
    microbatches: Sequence[MicroBatch[np.ndarray]],
    outputs: Sequence[ModelOutput],
    settings: ForwardSettings,
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
            values = target_values(model, microbatches[number].to(settings.device), outputs, settings)
        if kept is not None and number < kept.most:
            kept.add(microbatches[number], values)
        results[number] = {name: values[name].detach().float().cpu().numpy() for name in outputs}
        current_beacon().finish_unit("microbatches", done, len(microbatches))
    return results


def split_outputs(outputs: Sequence[TrainerOutput], has_reference: bool) -> list[ModelOutput]:
    """Returns those of the outputs that the trained model computes.

    Raises:
        ValueError: reference log-probabilities are requested and no reference is loaded.
    """
    if "reference_logprobs" in outputs and not has_reference:
        raise ValueError(
            "reference_logprobs are requested, but these ranks hold no reference: loss.kl.coefficient is 0, or the "
            "role `reference` serves it"
        )
    return [name for name in outputs if name != "reference_logprobs"]


def add_reference(
    results: Sequence[dict[str, np.ndarray]],
    reference: PolicyModel,
    microbatches: Sequence[MicroBatch[np.ndarray]],
    settings: ForwardSettings,
) -> None:
    """Adds `reference_logprobs`, float32 `[targets]`, to the results of each micro-batch."""
    values = evaluate_each(reference, microbatches, ["logprobs"], settings)
    for result, value in zip(results, values, strict=True):
        result["reference_logprobs"] = value["logprobs"]
