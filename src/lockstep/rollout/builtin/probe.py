"""At load: does this model decode through our cache and attention as it computes whole sequences?

Models whose layers keep other state (state space, linear attention, convolutions), or attend without the
interface, would generate nonsense in silence; they get the plain runner, and it is said aloud.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.rollout.builtin.fused import FusedForward, NotFusible
from lockstep.rollout.builtin.graphs import captured
from lockstep.rollout.builtin.rows import Rows
from lockstep.rollout.builtin.runner import CachedRunner, ModelForward, PlainRunner, Runner, use_cached, use_plain
from lockstep.rollout.builtin.scheduler import Group
from lockstep.rollout.protocol import Request

log = logging.getLogger(__name__)

_PROMPTS = (5, 1, 3)
_ROWS = (0, 0, 1, 2, 2)  # group of each row
_TOKENS = 4
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@torch.inference_mode()
def choose_runner(
    lm: Any, device: torch.device, context: int, budget: int | None, prefix_cache: float = 0.0
) -> tuple[Runner, str]:
    """The fastest runner that computes what the model computes: our cache under the fused forward, our cache under
    the model's own forward, or whole sequences; and why not a faster one, which is logged (empty for the fastest)."""
    name, dtype = type(lm).__name__, next(lm.parameters()).dtype
    use_plain(lm)
    rows, groups = _play(lm.config.get_text_config().vocab_size)
    expected = _logits(PlainRunner(lm, device), rows, groups)
    own, why = _cached(lm, device, context, expected)
    if own is None:
        use_plain(lm)
        return PlainRunner(lm, device), _told(f"{name} decodes without our KV cache, slowly: {why}")
    forward, why = _fused(lm, device, own.windows, expected)
    if forward is None:
        slower = _told(f"{name} decodes through its own forward, not the fused one, slower: {why}")
        return CachedRunner(own.forward, device, dtype, budget, None, prefix_cache), slower
    log.info("%s decodes through the fused forward", name)
    capture, slower = captured if device.type == "cuda" else None, ""
    if capture and (why := _wrong(CachedRunner(forward, device, dtype, capture=capture), expected)):
        capture, slower = None, _told(f"{name} decodes without CUDA graphs, slower: {why}")
    return CachedRunner(forward, device, dtype, budget, capture, prefix_cache), slower


def _told(slower: str) -> str:
    log.warning("%s", slower)
    return slower


def _cached(lm: Any, device: torch.device, context: int, expected: Tensor) -> tuple[CachedRunner | None, str]:
    """A runner through the model's own forward; None and why where our cache cannot serve it."""
    config = lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        return None, f"it has layers of type {', '.join(sorted(kinds))}"
    runner = CachedRunner(ModelForward(lm), device, next(lm.parameters()).dtype)
    try:
        use_cached(lm)
        got = _logits(runner, *_play(config.vocab_size))
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        return None, f"its attention does not go through the interface ({error})"
    if not runner.cache.prompts:
        return None, "its attention ignores the interface"
    if why := _differs(got, expected, runner.dtype):
        return None, why
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < context and not runner.windows:
        return None, f"its sliding window of {window} does not reach the attention interface"
    return runner, ""


def _fused(lm: Any, device: torch.device, windows: dict[int, int], expected: Tensor) -> tuple[FusedForward | None, str]:
    """The fused forward; None and why where it is not this model's computation.

    Args:
        windows: what the layers ask the interface for. The probe's sequences are shorter than any real window.
    """
    try:
        forward = FusedForward(lm)
    except (NotFusible, AttributeError) as error:
        return None, str(error)
    if forward.windows != windows:
        return None, "its layers have other sliding windows"
    why = _wrong(CachedRunner(forward, device, next(lm.parameters()).dtype), expected)
    return (None, why) if why else (forward, "")


def _wrong(runner: CachedRunner, expected: Tensor) -> str:
    """What is wrong with the runner; nothing where its logits are the expected ones."""
    try:
        got = _logits(runner, *_play(expected.shape[-1]))
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        return str(error)
    return _differs(got, expected, runner.dtype)


def _differs(got: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with the logits; nothing where they are the expected ones."""
    half = dtype in (torch.bfloat16, torch.float16)
    error = float((got - expected).std() / expected.std().clamp(min=1e-12))
    return "" if error < (5e-2 if half else 1e-3) else f"its logits differ from those of whole sequences by {error:.1e}"


def _play(vocabulary: int) -> tuple[Rows, list[Group]]:
    """Some groups and rows that enter them."""
    random = np.random.default_rng(0)
    prompts = [random.integers(vocabulary, size=length).astype(np.int32) for length in _PROMPTS]
    groups = [Group(str(slot), prompt, version=0) for slot, prompt in enumerate(prompts)]
    rows = Rows(len(_ROWS))
    for row, slot in enumerate(_ROWS):
        rows.enter(Request(str(row), str(slot), prompts[slot], seed=row, max_tokens=_TOKENS), slot)
    return rows, groups


def _logits(runner: Runner, rows: Rows, groups: list[Group]) -> Tensor:
    """Centred logits `[tokens x rows, vocabulary]` of a few fixed continuations."""
    random = np.random.default_rng(1)
    runner.prefill(groups, 0)
    seen = []
    for _ in range(_TOKENS):
        logits = runner.decode(rows, groups)
        seen.append(logits - logits.mean(-1, keepdim=True))
        vocabulary = logits.shape[-1]
        rows.append(random.integers(vocabulary, size=len(rows)), np.zeros(len(rows), np.float32), version=0)
    return torch.cat(seen)
