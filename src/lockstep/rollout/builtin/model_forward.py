"""The model's own forward on the batches of the engine, and the attention that it uses."""

import inspect
from typing import Any, Protocol

from torch import Tensor

from lockstep.models.vision.vision_policy import is_vision_config
from lockstep.rollout.builtin.cached_attention import ATTENTION_NAME, ForwardBatch
from lockstep.rollout.builtin.prompt_images import MergedImages


class ForwardFunction(Protocol):
    """A model's forward, whose attention is that of a batch."""

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch) -> Tensor:
        """Returns the logits `[tokens, vocabulary]`; int64 `positions` `[tokens]` are below `longest`."""

    def fill(
        self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch, images: MergedImages | None = None
    ) -> None:
        """Computes only the keys and values. With images, positions may have three axes: `[3, tokens]`."""


class ModelForward:
    """The model's own forward, with `engine_attention`."""

    def __init__(self, lm: Any) -> None:
        self.lm = lm
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(lm.forward).parameters

    def __call__(self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch) -> Tensor:
        return self._logits(tokens, positions, batch)

    def fill(
        self, tokens: Tensor, positions: Tensor, longest: int, batch: ForwardBatch, images: MergedImages | None = None
    ) -> None:
        if images is None:
            self._logits(tokens, positions, batch, **({"logits_to_keep": 1} if self._takes_logits_to_keep else {}))
            return
        decode_embeddings(self.lm, tokens.unsqueeze(0), positions.unsqueeze(-2), images, forward_batch=batch)

    def _logits(self, tokens: Tensor, positions: Tensor, batch: ForwardBatch, **keep: int) -> Tensor:
        logits: Tensor = self.lm(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            forward_batch=batch,
            **keep,
        ).logits[0]
        return logits


def decode_embeddings(lm: Any, tokens: Tensor, positions: Tensor, images: MergedImages, **settings: Any) -> Tensor:
    """Computes the last hidden states `[1, tokens, hidden]` of int64 tokens `[1, tokens]` with images, at positions
    `[1, tokens]` or `[3, 1, tokens]`."""
    embeddings = lm.get_input_embeddings()(tokens).clone()
    images.merge(embeddings[0])
    hidden: Tensor = lm.get_decoder()(
        inputs_embeds=embeddings,
        position_ids=positions,
        use_cache=False,
        **images.decoder_arguments(tokens.shape[1]),
        **settings,
    ).last_hidden_state
    return hidden


def use_cached_attention(lm: Any) -> None:
    """Makes the model use `engine_attention`, except for its vision tower. Raises ValueError if its class does not
    allow that."""
    (lm.get_decoder() if is_vision_config(lm.config) else lm).set_attn_implementation(ATTENTION_NAME)


def use_plain_attention(lm: Any) -> None:
    """Makes the model use transformers' own attention."""
    lm.set_attn_implementation("sdpa" if getattr(lm, "_supports_sdpa", False) else "eager")
