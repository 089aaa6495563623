"""Gives the images of requests to vLLM's core, with the pixels that the run has prepared."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.images.image_store import ImageStore, ImageUnavailable, PreparedImage
from lockstep.data.samples import PlacedImage
from lockstep.rollout.engine_protocol import Request
from lockstep.rollout.errors import BadRequest

ROOM_REMEDY = "raise rollout.engine.extra.max_num_batched_tokens, or lower model.vision.max_pixels"
_TILE_DIMS = 4
"""Tiles, channels, height, width."""

FieldLayout = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
"""vLLM's `_get_mm_fields_config`: how the model's inputs are divided into images, by name of the input."""


class VllmImages:
    """Converts the images of requests to features of vLLM's core.

    vLLM's own processor never gets a prompt or a picture: the tokens of prompts are final, and the pixels are those
    that the trainer computes with. All requests whose image is the same share its tensors, as long as the core has one
    of them.

    Args:
        store: the prepared images.
        layout: the layout of vLLM's model.
        room: number of embeddings in vLLM's encoder cache. The core would wait forever for the room of a larger image.
        dtype: dtype of the model's weights.
        token: the placeholder of images, which the layout of some models contains; None if it is not known.
        trained: whether new weights may change the embeddings of an image. Then images have other keys in vLLM's caches
            after each load.
        whole: whether vLLM must not prefill a prompt in chunks. It would do so where the encoder cache has no room for
            the images of all prompts that it begins with.
    """

    def __init__(
        self,
        store: ImageStore,
        layout: FieldLayout,
        room: int,
        dtype: torch.dtype,
        token: int | None = None,
        trained: bool = True,
        whole: bool = False,
    ) -> None:
        self.room, self.trained, self.whole = room, trained, whole
        self._store, self._layout, self._dtype, self._token = store, layout, dtype, token
        self._items: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        """vLLM's form of the images that its core has, by digest."""

    @classmethod
    def of_core(cls, core: Any, store: ImageStore, trained: bool = True) -> "VllmImages":
        """Finds out what the model of vLLM's core needs."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        engine = core.engine_core
        model, scheduler = engine.vllm_config.model_config, engine.scheduler
        layout = MULTIMODAL_REGISTRY.create_processor(model)._get_mm_fields_config
        room = min(scheduler.encoder_cache_manager.cache_size, scheduler.max_num_encoder_input_tokens)
        token = getattr(model.hf_config, "image_token_id", None)
        whole = not engine.vllm_config.scheduler_config.enable_chunked_prefill
        return cls(store, layout, room, model.dtype, token, trained, whole)

    def check(self, request: Request) -> None:
        """Raises BadRequest for an image that is not in the store, or has no room in vLLM's encoder cache."""
        for image in request.images:
            tokens = len(image.places)
            if tokens > self.room:
                raise BadRequest(
                    request.id,
                    f"has an image of {tokens} tokens ({image.source or image.digest}), but vLLM's encoder cache has "
                    f"room for {self.room}: {ROOM_REMEDY}",
                )
            if image.digest not in self._store:
                self._read(request.id, image)

    def fit(self, unstarted: Iterable[Request], request: Request) -> bool:
        """Whether vLLM can begin with another request together with those that it has not begun with."""
        if not (self.whole and request.images):
            return True
        tokens = {image.digest: len(image.places) for each in unstarted for image in each.images}
        tokens |= {image.digest: len(image.places) for image in request.images}
        return sum(tokens.values()) <= self.room

    def features(self, request: Request, loads: int) -> list[Any] | None:
        """Returns the request's images as `MultiModalFeatureSpec`s; None if it has none.

        Args:
            loads: number of weight loads so far.

        Raises:
            BadRequest: a prepared image cannot be read, or does not fit its places.
        """
        if not request.images:
            return None
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        return [
            MultiModalFeatureSpec(
                self._item(request.id, image), "image", self._key(image, loads), placeholders(image.places)
            )
            for image in request.images
        ]

    def forget(self, core: Any) -> None:
        """Drops the embeddings in vLLM's encoder cache, after a load of weights that may change them."""
        if self.trained:
            core.reset_encoder_cache()

    def _key(self, image: PlacedImage, loads: int) -> str:
        """The image's key in the encoder cache and in the prefix cache, where nothing else tells images apart."""
        return f"{image.digest}-{loads}" if self.trained else image.digest

    def _item(self, request: str, image: PlacedImage) -> Any:
        item = self._items.get(image.digest)
        if item is None:
            item = core_item(self._read(request, image), self._layout, self._dtype, self._token)
            self._items[image.digest] = item
        return item

    def _read(self, request: str, image: PlacedImage) -> PreparedImage:
        try:
            prepared = self._store.read(image.digest)
        except ImageUnavailable as error:
            raise BadRequest(request, f"has an unusable image: {error}") from error
        if prepared.features != len(image.places):
            raise BadRequest(
                request,
                f"has {len(image.places)} places for image {image.digest}, which was prepared for {prepared.features}",
            )
        return prepared


def placeholders(places: np.ndarray) -> Any:
    """Converts an image's places, int32 `[features]`, to vLLM's `PlaceholderRange`. There may be text between them."""
    from vllm.multimodal.inputs import PlaceholderRange

    first, length = int(places[0]), int(places[-1] - places[0]) + 1
    if length == len(places):
        return PlaceholderRange(first, length)
    is_embed = torch.zeros(length, dtype=torch.bool)
    is_embed[torch.from_numpy(places - places[0]).long()] = True
    return PlaceholderRange(first, length, is_embed)


def core_item(image: PreparedImage, layout: FieldLayout, dtype: torch.dtype, token: int | None = None) -> Any:
    """Converts a prepared image to vLLM's `MultiModalKwargsItem`.

    Args:
        layout: the layout of vLLM's model.
        dtype: the dtype of floating-point inputs.
        token: the placeholder of images.

    Raises:
        ValueError: the inputs are not those of one image of this model.
    """
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalKwargsItems

    inputs: dict[str, Tensor] = {name: torch.from_numpy(array.copy()) for name, array in image.inputs.items()}
    inputs = {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}
    fields = layout(BatchFeature({}), {})
    _join_tiles(inputs, fields)
    if "image_token_id" in fields and token is not None:
        inputs["image_token_id"] = torch.tensor(token)
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs), layout(BatchFeature(inputs), {}))
    found = {name: len(each) for name, each in items.items()}
    if found != {"image": 1}:
        shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in inputs.items())
        raise ValueError(
            f"image {image.digest}: vLLM's model finds {found or 'no image'} in {shapes}, expected 1 image"
        )
    return items["image"][0]


def _join_tiles(inputs: dict[str, Tensor], fields: Mapping[str, Any]) -> None:
    """Adds the number of an image's tiles, if vLLM's model divides inputs by it: processors of transformers do not give
    it. Such inputs have no dimension for prompts, which some processors put in front."""
    from vllm.multimodal.inputs import MultiModalFlatField

    counts = [name for name in fields if name.endswith("num_patches") and fields[name].modality == "image"]
    if not counts or counts[0] in inputs:
        return
    excess = inputs["pixel_values"].ndim - _TILE_DIMS
    for name in inputs.keys() & fields.keys():
        if excess > 0 and isinstance(fields[name].field, MultiModalFlatField):
            inputs[name] = inputs[name].flatten(0, excess)
    inputs[counts[0]] = torch.tensor([len(inputs["pixel_values"])])
