"""The images of a rank's rows, as the rank's models get them.

If the data has images, a vision tower that is trained or sharded is called exactly once for every row: a row without
images gives it a small grey one, whose features are multiplied by zero. So all ranks enter the same collectives. A
tower and a projector that are frozen, and of which the rank has a copy, enter none: their features are computed once
for the images of each prompt and kept, and rows without images do not call them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.config.model import ModelConfig
from lockstep.data.images.image_processor import ImageProcessor, load_image_processor
from lockstep.data.images.image_store import ImageStore, PreparedImage
from lockstep.data.micro_batch import MicroBatch
from lockstep.data.row_layout import RowLayout
from lockstep.data.samples import PlacedImage
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import resolve_folder
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.policy_model import PolicyModel
from lockstep.models.vision.image_positions import images_of_segments
from lockstep.models.vision.image_probe import probe_image
from lockstep.models.vision.model_parts import parameter_parts
from lockstep.models.vision.row_images import ImageFeatures, RowImages, image_features, row_images
from lockstep.models.vision.vision_policy import VisionPolicyModel

KEPT_BYTES = 2**30
"""How much host memory the features of a frozen tower may take on a rank."""


@dataclass(frozen=True, slots=True)
class _KnownImages:
    """The images of a prompt whose features are known."""

    images: list[PreparedImage]
    """Without pixels."""
    rows: Tensor
    """`[features, hidden]`, in host memory."""
    deepstack: list[Tensor] | None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.rows, *(self.deepstack or ())))


class ImageInputs:
    """Reads the images of rows from the run's store.

    Args:
        folder: the folder of the store.
        model: the config of the model that gets the images.
        policy: that model as this rank has loaded it. Others that get the same rows, such as its reference, must have
            the same tower and projector if those are frozen.

    Raises:
        ModelError: the model reads no images.
    """

    def __init__(
        self, folder: Path, model: ModelConfig, policy: PolicyModel, device: torch.device, kept_bytes: int = KEPT_BYTES
    ) -> None:
        if not isinstance(policy, VisionPolicyModel):
            problem, remedy = "the data has images, and this model reads none", "use a vision-language model"
            raise ModelError("model.path", model.path, problem, remedy)
        self._store, self._model, self._device, self._kept_bytes = ImageStore(folder), model, device, kept_bytes
        self.constant = has_constant_vision(policy)
        """Whether images have the same features in every pass, and no rank needs another to compute them."""
        self._known: OrderedDict[tuple[str, ...], _KnownImages] = OrderedDict()

    def row(self, policy: PolicyModel, batch: MicroBatch[Tensor]) -> tuple[RowLayout, dict[str, Any]]:
        """Returns the layout of a row, and the argument about its images with which the policy is called.

        Raises:
            ImageUnavailable: an image is not in the store.
        """
        placed = batch.images or []
        assert isinstance(policy, VisionPolicyModel)
        if self.constant:
            if not placed:
                return batch.layout(), {}
            prepared, images = self._known_row(policy, batch, placed)
        else:
            prepared = [self._store.read(image.digest) for image in placed]
            images = row_images(prepared or [self._smallest], placed, self._device)
        return policy.row_layout(batch.lengths.tolist(), batch.parents.tolist(), placed, prepared), {"images": images}

    @cached_property
    def _smallest(self) -> PreparedImage:
        """What the tower gets for a row without images."""
        return self._processor.smallest()

    @cached_property
    def _processor(self) -> ImageProcessor:
        folder = resolve_folder(self._model.path, self._model.revision, weights=False)
        processor = load_image_processor(self._model, load_tokenizer(self._model), folder)
        if processor is None:
            problem, remedy = "the data has images, and this model reads none", "use a vision-language model"
            raise ModelError("model.path", self._model.path, problem, remedy)
        return processor

    def probe_image(self) -> PreparedImage:
        """Returns an image to compare packed rows with."""
        return probe_image(self._processor)

    def _known_row(
        self, policy: VisionPolicyModel, batch: MicroBatch[Tensor], placed: Sequence[PlacedImage]
    ) -> tuple[list[PreparedImage], RowImages]:
        """Returns the images of a row without their pixels, and their features."""
        prompts = [inside for inside in images_of_segments(batch.lengths.tolist(), placed) if inside]
        known = [self._features(policy, [placed[index] for index in prompt]) for prompt in prompts]
        order = [index for prompt in prompts for index in prompt]
        prepared = [image for each in known for image in each.images]
        images = row_images(prepared, [placed[index] for index in order], self._device)
        stacks = [each.deepstack for each in known if each.deepstack is not None]
        images.features = ImageFeatures(
            self._joined([each.rows for each in known]),
            [self._joined(list(layer)) for layer in zip(*stacks, strict=True)] if stacks else None,
        )
        by_index = dict(zip(order, prepared, strict=True))
        return [by_index[index] for index in range(len(placed))], images

    def _joined(self, rows: list[Tensor]) -> Tensor:
        return torch.cat(rows).to(self._device)

    def _features(self, policy: VisionPolicyModel, prompt: Sequence[PlacedImage]) -> _KnownImages:
        """Returns the features of a prompt's images, which are always computed together: so they have the same bits
        whenever that is, also in a resumed run."""
        key = tuple(image.digest for image in prompt)
        known = self._known.pop(key, None)
        if known is None:
            known = self._compute([self._store.read(digest) for digest in key], policy)
        self._known[key] = known
        while len(self._known) > 1 and sum(each.nbytes for each in self._known.values()) > self._kept_bytes:
            self._known.popitem(last=False)
        return known

    @torch.no_grad()
    def _compute(self, prepared: list[PreparedImage], policy: VisionPolicyModel) -> _KnownImages:
        dtype = next(policy.tower.parameters()).dtype
        images = row_images(prepared, (), self._device)
        inputs = {name: each.to(dtype) if each.is_floating_point() else each for name, each in images.inputs.items()}
        found = image_features(policy.lm, inputs)
        deepstack = None if found.deepstack is None else [each.cpu() for each in found.deepstack]
        return _KnownImages([_without_pixels(image) for image in prepared], found.rows.cpu(), deepstack)


def image_inputs(
    folder: Path | None, model: ModelConfig, policy: PolicyModel, device: torch.device
) -> ImageInputs | None:
    """The images of a rank's rows; None if the data has none. Raises ModelError."""
    return None if folder is None else ImageInputs(folder, model, policy, device)


def has_constant_vision(policy: PolicyModel) -> bool:
    """Whether tower and projector are frozen, and this rank has all their weights."""
    parts = parameter_parts(policy.lm)
    seeing = [each for each in policy.parameters() if parts[id(each)] != "language"]
    sharded = any(isinstance(each, DTensor) or hasattr(each, "ds_tensor") for each in seeing)
    return not sharded and not any(each.requires_grad for each in seeing)


def _without_pixels(image: PreparedImage) -> PreparedImage:
    """The image with its grids and sizes, from which positions follow, but without pixels and masks of pixels."""
    kept = {name: each for name, each in image.inputs.items() if each.ndim <= 2 and each.dtype.kind != "f"}
    return replace(image, inputs=kept)
