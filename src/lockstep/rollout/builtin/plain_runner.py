"""Decoding without a KV cache, for models that have no other way. Other ways are compared with it."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.models.logprob_head import LogitTransform, split_head
from lockstep.rollout.builtin.cached_attention import mask_bias
from lockstep.rollout.builtin.kv_cache import PrefixCache
from lockstep.rollout.builtin.model_forward import decode_embeddings
from lockstep.rollout.builtin.prompt_images import ImageSource, MergedImages, image_spans
from lockstep.rollout.builtin.scheduler import CachedPrompt, DecodeRows


@dataclass(frozen=True, slots=True)
class _EncodedPrompt:
    """The images of a prompt for the forwards of its rows."""

    images: MergedImages
    positions: np.ndarray | None
    """int64 `[3, prompt tokens]`."""
    spans: np.ndarray
    """int64 `[prompt tokens]`, see `image_spans`."""


class PlainRunner:
    """Computes whole sequences for every token, rows of equal length together. Slow, but right for any model.

    Sequences with images are computed one by one, with features that are computed once for a prompt and weights.
    """

    def __init__(
        self, lm: Any, device: torch.device, batch_tokens: int = 8192, images: ImageSource | None = None
    ) -> None:
        self.lm, self.device, self.batch_tokens, self.prefixes = lm, device, batch_tokens, PrefixCache()
        self.images = images
        self._encoded: dict[str, _EncodedPrompt] = {}
        """By the name of the group."""
        self._transform: LogitTransform | None = None
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(lm.forward).parameters

    def prefill(self, groups: Sequence[CachedPrompt], first: int) -> None:
        """Does nothing: there is no cache."""

    def keep(self, rows: DecodeRows, groups: Sequence[CachedPrompt], ended: Sequence[int]) -> None:
        """Does nothing: there is no cache."""

    def decode(self, rows: DecodeRows, groups: Sequence[CachedPrompt]) -> Tensor:
        self._forget_all_but(groups)
        by_length: dict[int, list[int]] = {}
        logits: list[Tensor] = []
        order: list[int] = []
        for row, request in enumerate(rows.requests):
            if request.images:
                logits.append(self._image_logits(groups[rows.group_slot[row]], _sequence(rows, row)))
                order.append(row)
            else:
                by_length.setdefault(len(request.prompt) + int(rows.counts[row]), []).append(row)
        for length, same_length in by_length.items():
            size = max(1, self.batch_tokens // length)
            for start in range(0, len(same_length), size):
                chunk = same_length[start : start + size]
                logits.append(self._last_logits([_sequence(rows, row) for row in chunk]))
                order.extend(chunk)
        position = torch.empty(len(order), dtype=torch.int64)
        position[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(logits)[position.to(self.device)]

    def _last_logits(self, sequences: list[np.ndarray]) -> Tensor:
        tokens = torch.from_numpy(np.stack(sequences)).to(self.device)
        keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        logits: Tensor = self.lm(input_ids=tokens, use_cache=False, **keep).logits
        return logits[:, -1].float()

    def _image_logits(self, group: CachedPrompt, sequence: np.ndarray) -> Tensor:
        """The logits `[1, vocabulary]` of the next token of a sequence with images."""
        encoded, length = self._encode(group), len(sequence)
        positions = np.arange(length)
        if encoded.positions is not None:
            after = encoded.positions[:, -1:] + np.arange(1, length - len(group.prompt) + 1)
            positions = np.concatenate([encoded.positions, after], 1)
        hidden = decode_embeddings(
            self.lm,
            torch.from_numpy(sequence).to(self.device).unsqueeze(0),
            torch.from_numpy(positions).to(self.device).unsqueeze(-2),
            encoded.images,
            **self._masks(encoded.spans, length),
        )
        self._transform = self._transform or split_head(self.lm)[1]
        return self._transform(self.lm.get_output_embeddings()(hidden[:, -1])).float()

    def _encode(self, group: CachedPrompt) -> _EncodedPrompt:
        if group.name not in self._encoded:
            assert self.images is not None  # the engine refuses images otherwise
            prepared = self.images.read(group.images)
            self._encoded[group.name] = _EncodedPrompt(
                self.images.features(group.images, prepared),
                self.images.positions(group.prompt, group.images, prepared),
                image_spans(group.images, len(group.prompt)),
            )
        return self._encoded[group.name]

    def _masks(self, spans: np.ndarray, length: int) -> dict[str, Any]:
        """The decoder's argument for attention in both directions inside of images."""
        if self.images is None or not self.images.bidirectional:
            return {}
        span = torch.full((length,), -1)
        span[: len(spans)] = torch.from_numpy(spans)
        token = torch.arange(length)
        visible = (token <= token[:, None]) | ((span == span[:, None]) & (span >= 0))
        config, dtype = self.lm.config.get_text_config(), next(self.lm.parameters()).dtype
        masks = {"full_attention": visible}
        if window := getattr(config, "sliding_window", None):
            masks["sliding_attention"] = visible & (token > token[:, None] - window)
        biases = {kind: mask_bias(each.to(self.device), dtype)[None, None] for kind, each in masks.items()}
        return {"attention_mask": biases if getattr(config, "layer_types", None) else biases["full_attention"]}

    def _forget_all_but(self, groups: Sequence[CachedPrompt]) -> None:
        if self._encoded:
            names = {group.name for group in groups}
            self._encoded = {name: encoded for name, encoded in self._encoded.items() if name in names}

    def forget(self) -> None:
        self._encoded.clear()

    def move_rows(self, sources: list[int], targets: list[int]) -> None: ...

    def move_groups(self, sources: list[int], targets: list[int]) -> None: ...

    def free(self) -> None:
        self.forget()


def _sequence(rows: DecodeRows, row: int) -> np.ndarray:
    """The prompt and the generated tokens of a row, int64."""
    generated = rows.tokens[row, : rows.counts[row]]
    sequence: np.ndarray = np.concatenate([rows.requests[row].prompt, generated]).astype(np.int64)
    return sequence
