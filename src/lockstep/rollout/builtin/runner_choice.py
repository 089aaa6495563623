"""Chooses at load time the fastest way to run a model that is right for it."""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.images.image_store import PreparedImage
from lockstep.data.samples import PlacedImage
from lockstep.rollout.builtin.cuda_graphs import capture_graph
from lockstep.rollout.builtin.fused_forward import FusedForward, NotFusible
from lockstep.rollout.builtin.model_forward import ModelForward, use_cached_attention, use_plain_attention
from lockstep.rollout.builtin.model_runner import CachedRunner, ModelRunner
from lockstep.rollout.builtin.plain_runner import PlainRunner
from lockstep.rollout.builtin.prompt_images import ImageSource, MergedImages
from lockstep.rollout.builtin.scheduler import CachedPrompt, DecodeRows
from lockstep.rollout.engine_protocol import Request

log = logging.getLogger(__name__)

_PROBE_PROMPTS = (5, 1, 3)
"""Prompt lengths of the groups in the probe batch."""
_PROBE_IMAGE_PROMPT = 8
"""Tokens of the first of these prompts if the probe has images; `_PROBE_PLACES` are the image's."""
_PROBE_PLACES = range(2, 6)
_PROBE_ROWS = (0, 0, 1, 2, 2)
"""Group of each row in the probe batch."""
_PROBE_TOKENS = 4
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@torch.inference_mode()
def choose_runner(
    lm: Any,
    device: torch.device,
    context: int,
    budget: int | None,
    prefix_cache: float = 0.0,
    images: ImageSource | None = None,
) -> tuple[ModelRunner, str]:
    """Returns the fastest runner that is right for the model, and why it is not a faster one ("" for the fastest).

    The candidates are the KV cache with the fused forward, the KV cache with the model's own forward, and whole
    sequences. A candidate is right if its logits for a small probe batch are those of whole sequences. If there are
    `images`, the probe has one: random features in place of those of a tower.
    """
    name, dtype = type(lm).__name__, next(lm.parameters()).dtype
    use_plain_attention(lm)
    probe = None if images is None else RandomImages(lm, images)
    rows, groups = _probe_batch(lm.config.get_text_config().vocab_size, probe)
    expected = _probe_logits(PlainRunner(lm, device, images=probe), rows, groups)
    cached, why = _try_cached_runner(lm, device, context, expected, probe)
    if cached is None:
        use_plain_attention(lm)
        slower = _warn_slower(f"{name} decodes without the KV cache, slowly: {why}")
        return PlainRunner(lm, device, images=images), slower
    forward, why = _try_fused_forward(lm, device, cached.windows, expected, probe)
    if forward is None:
        slower = _warn_slower(f"{name} decodes through its own forward, not the fused one, slower: {why}")
        return CachedRunner(cached.forward, device, dtype, budget, None, prefix_cache, images), slower
    log.info("%s decodes through the fused forward", name)
    capture, slower = capture_graph if device.type == "cuda" else None, ""
    if capture and (
        why := _find_mismatch(CachedRunner(forward, device, dtype, capture=capture, images=probe), expected, probe)
    ):
        capture, slower = None, _warn_slower(f"{name} decodes without CUDA graphs, slower: {why}")
    return CachedRunner(forward, device, dtype, budget, capture, prefix_cache, images), slower


class RandomImages:
    """Features for the probe, at the places of images and with positions like theirs."""

    def __init__(self, lm: Any, source: ImageSource) -> None:
        self.bidirectional, self.three_axes = source.bidirectional, source.three_axes
        embedding = lm.get_input_embeddings()
        self._like: Tensor = embedding(torch.zeros(1, dtype=torch.int64, device=embedding.weight.device))
        self._deepstack = "deepstack_visual_embeds" in inspect.signature(lm.get_decoder().forward).parameters

    def read(self, images: Sequence[PlacedImage]) -> list[PreparedImage]:
        return [PreparedImage(image.digest, {}, len(image.places), (1, 1), (1, 1)) for image in images]

    def positions(
        self, prompt: np.ndarray, images: Sequence[PlacedImage], prepared: Sequence[PreparedImage]
    ) -> np.ndarray | None:
        """As in Qwen's models: an image is a grid here two features wide, and text continues from its largest side."""
        if not self.three_axes:
            return None
        steps = np.ones((3, len(prompt)), np.int64)
        for image in images:
            number = np.arange(len(image.places))
            steps[:, image.places[0]] = 1
            grid = np.stack([np.zeros_like(number), number // 2, number % 2])
            steps[:, image.places[1:]] = np.diff(grid, axis=1)
            steps[:, image.places[-1] + 1] = 1 + grid.max() - grid[:, -1]
        return np.cumsum(steps, 1) - 1

    def features(self, images: Sequence[PlacedImage], prepared: Sequence[PreparedImage]) -> MergedImages:
        places = torch.from_numpy(np.concatenate([image.places for image in images]).astype(np.int64))
        random = torch.Generator().manual_seed(2)
        shape, like = (len(places), self._like.shape[-1]), self._like
        rows, added = (torch.randn(shape, generator=random).to(like) * like.std() for _ in range(2))
        return MergedImages(places.to(like.device), rows, [added] if self._deepstack else [])


def _warn_slower(slower: str) -> str:
    log.warning("%s", slower)
    return slower


def _try_cached_runner(
    lm: Any, device: torch.device, context: int, expected: Tensor, images: RandomImages | None
) -> tuple[CachedRunner | None, str]:
    """Returns a runner with the KV cache and the model's own forward, or None and why they do not work together."""
    config = lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        return None, f"it has layers of type {', '.join(sorted(kinds))}"
    runner = CachedRunner(ModelForward(lm), device, next(lm.parameters()).dtype, images=images)
    try:
        use_cached_attention(lm)
        got = _probe_logits(runner, *_probe_batch(config.vocab_size, images))
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        return None, f"its attention does not use transformers' attention interface ({error})"
    if not runner.cache.prompt_tables:
        return None, "its attention ignores transformers' attention interface"
    if why := _describe_difference(got, expected, runner.dtype):
        return None, why
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < context and not runner.windows:
        return None, f"its sliding window of {window} does not reach the attention interface"
    return runner, ""


def _try_fused_forward(
    lm: Any, device: torch.device, windows: dict[int, int], expected: Tensor, images: RandomImages | None
) -> tuple[FusedForward | None, str]:
    """Returns the fused forward, or None and why it does not compute what the model does.

    Args:
        windows: the sliding windows that layers pass to the attention function. The probe's sequences are too short to
            test them.
    """
    try:
        forward = FusedForward(lm)
    except (NotFusible, AttributeError) as error:
        return None, str(error)
    if forward.windows != windows:
        return None, "its layers have other sliding windows"
    runner = CachedRunner(forward, device, next(lm.parameters()).dtype, images=images)
    why = _find_mismatch(runner, expected, images)
    return (None, why) if why else (forward, "")


def _find_mismatch(runner: CachedRunner, expected: Tensor, images: RandomImages | None) -> str:
    """Describes what is wrong with the runner; "" if its logits for the probe batch are the expected ones."""
    try:
        got = _probe_logits(runner, *_probe_batch(expected.shape[-1], images))
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        return str(error)
    return _describe_difference(got, expected, runner.dtype)


def _describe_difference(got: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """Describes the difference of the logits; "" if they are equal up to rounding."""
    half = dtype in (torch.bfloat16, torch.float16)
    error = float((got - expected).std() / expected.std().clamp(min=1e-12))
    return "" if error < (5e-2 if half else 1e-3) else f"its logits differ from those of whole sequences by {error:.1e}"


def _probe_batch(vocabulary: int, images: RandomImages | None = None) -> tuple[DecodeRows, list[CachedPrompt]]:
    """Makes a few groups with their rows."""
    random = np.random.default_rng(0)
    lengths = _PROBE_PROMPTS if images is None else (_PROBE_IMAGE_PROMPT, *_PROBE_PROMPTS[1:])
    prompts = [random.integers(vocabulary, size=length).astype(np.int32) for length in lengths]
    groups = [CachedPrompt(str(slot), prompt, version=0) for slot, prompt in enumerate(prompts)]
    if images is not None:
        groups[0].images = (PlacedImage("probe", np.array(_PROBE_PLACES, np.int32)),)
    rows = DecodeRows(len(_PROBE_ROWS))
    for row, slot in enumerate(_PROBE_ROWS):
        request = Request(str(row), str(slot), prompts[slot], seed=row, max_tokens=_PROBE_TOKENS)
        request.images = groups[slot].images
        rows.add_row(request, slot)
    return rows, groups


def _probe_logits(runner: ModelRunner, rows: DecodeRows, groups: list[CachedPrompt]) -> Tensor:
    """Returns the centred logits `[tokens x rows, vocabulary]` of a few fixed continuations."""
    random = np.random.default_rng(1)
    runner.prefill(groups, 0)
    collected = []
    for _ in range(_PROBE_TOKENS):
        logits = runner.decode(rows, groups)
        collected.append(logits - logits.mean(-1, keepdim=True))
        vocabulary = logits.shape[-1]
        rows.append_tokens(random.integers(vocabulary, size=len(rows)), np.zeros(len(rows), np.float32), version=0)
    return torch.cat(collected)
