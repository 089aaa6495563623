"""The policy model for vision-language models of transformers.

There is no table of architectures: the model's own tower and projector compute the features of images, which replace
the embeddings of their places; the model's own rule gives positions; its language model computes the row.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from lockstep.data.images.image_store import PreparedImage
from lockstep.data.row_layout import RowLayout
from lockstep.data.samples import PlacedImage
from lockstep.models.attention_plan import QuerySubset
from lockstep.models.errors import ModelError
from lockstep.models.logprob_head import LogitTransform, split_head
from lockstep.models.policy_model import PolicyModel
from lockstep.models.vision.image_positions import vision_layout
from lockstep.models.vision.row_images import RowImages, deepstack_arguments, image_features

_TOKEN_TYPE_ARGUMENTS = ("token_type_ids", "mm_token_type_ids")


class VisionPolicyModel(PolicyModel):
    """A `PolicyModel` whose rows may have images. Without images, the tower is not called.

    Raises:
        ModelError: as for `PolicyModel`, or the model's language model or vision tower cannot be found.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__(lm)
        self._takes_deepstack = "deepstack_visual_embeds" in _parameters(self.backbone)

    def _split(self, lm: Any) -> tuple[str, LogitTransform]:
        _, transform = split_head(lm)
        decoder, tower = lm.get_decoder(), lm.get_encoder(modality="image")
        names = {id(module): name for name, module in lm.named_modules()}
        if decoder is None or not names.get(id(decoder)) or tower is None or tower is lm:
            problem = "its language model and its vision tower cannot be told apart"
            raise ModelError("model.path", type(lm).__name__, problem, "use another vision-language model")
        return names[id(decoder)], transform

    @property
    def tower(self) -> nn.Module:
        """The vision tower: it computes features of patches."""
        tower: nn.Module = self.lm.get_encoder(modality="image")
        return tower

    @property
    def image_token(self) -> int:
        """The placeholder token of images."""
        return int(self.config.image_token_id)

    def row_layout(
        self,
        lengths: Sequence[int],
        parents: Sequence[int],
        placed: Sequence[PlacedImage],
        prepared: Sequence[PreparedImage],
    ) -> RowLayout:
        """Returns the layout of a row for `forward`. Arguments and errors as in `vision_layout`."""
        return vision_layout(self.lm, lengths, parents, placed, prepared)

    def forward(
        self,
        tokens: Tensor,
        layout: RowLayout,
        sources: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        chunk: int = 1024,
        entropy: bool = False,
        renyi_entropy: bool = False,
        images: RowImages | None = None,
        own_forward: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes log-probabilities as `PolicyModel.forward` does.

        Args:
            images: the row's images; then `layout` is one of `row_layout`. None if the data has no images.
            own_forward: compute one sequence by the model's own forward of everything, which finds the places of
                images by its placeholder token, to compare with.

        Raises:
            ValueError: as `PolicyModel.forward`, or the model cannot take rows with images (`layout_refusal`).
        """
        if own_forward:
            chosen = self._own_hidden(tokens, images)[sources]
        else:
            inputs = None if images is None else self._embed(tokens, images)
            chosen = self._hidden_at(tokens, layout, sources, inputs)
        return self._target_outputs(chosen, targets, temperature, chunk, entropy, renyi_entropy)

    def _query_subset(self, layout: RowLayout, sources: Tensor) -> QuerySubset | None:
        if self._takes_deepstack and self._deepstack_layers >= len(self.layers):
            return None  # features are added to the output of the last layer, which must have all tokens
        return super()._query_subset(layout, sources)

    @property
    def _deepstack_layers(self) -> int:
        return len(getattr(self.config.vision_config, "deepstack_visual_indexes", None) or [])

    def _embed(self, tokens: Tensor, images: RowImages) -> dict[str, Any]:
        """Returns the arguments of the language model: embeddings with the features of images at their places."""
        if self.layout_refusal is not None:
            raise ValueError(f"a row with images was given, but {self.layout_refusal}")
        # Some models' placeholder has no embedding. Elsewhere than at the places, it is text.
        embeddings: Tensor = self.lm.get_input_embeddings()(tokens.index_fill(0, images.places, 0))
        features = images.features or image_features(self.lm, images.inputs)
        if not images.real:
            # Within the graph, so that backward calls the tower's hooks as often on every rank.
            embeddings = embeddings + sum((rows * 0).sum() for rows in (features.rows, *(features.deepstack or [])))
            return {"inputs_embeds": embeddings[None]}
        if len(features.rows) != len(images.places):
            raise ValueError(f"the images of a row have {len(features.rows)} features and {len(images.places)} places")
        embeddings = embeddings.index_copy(0, images.places, features.rows.to(embeddings.dtype))
        added = deepstack_arguments(features.deepstack, images.places, len(tokens))
        return {"inputs_embeds": embeddings[None], **added}

    def _own_hidden(self, tokens: Tensor, images: RowImages | None) -> Tensor:
        """Computes `[tokens, hidden]` by the model's own forward."""
        types = torch.zeros(1, len(tokens), dtype=torch.int64, device=tokens.device)
        inputs: dict[str, Tensor] = {}
        if images is not None:
            types[0, images.places] = 1
            inputs = images.inputs
        accepted = _parameters(self.lm.base_model)
        inputs |= {name: types for name in _TOKEN_TYPE_ARGUMENTS if name in accepted}
        hidden: Tensor = self.lm.base_model(input_ids=tokens[None], use_cache=False, **inputs).last_hidden_state
        return hidden.squeeze(0)


def is_vision_config(config: Any) -> bool:
    """Returns whether a config is one of a vision-language model that transformers can load."""
    return hasattr(config, "vision_config") and type(config) in AutoModelForImageTextToText._model_mapping


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(inspect.unwrap(module.forward)).parameters)
