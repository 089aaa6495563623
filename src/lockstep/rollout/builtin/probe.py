"""At load: does this model decode through our cache and attention as it computes whole sequences?

Models whose layers keep other state (state space, linear attention, convolutions), or attend without the
interface, would generate nonsense in silence; they get the plain runner, and it is said aloud.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.rollout.builtin.rows import Rows
from lockstep.rollout.builtin.runner import CachedRunner, PlainRunner, Runner, use_cached, use_plain
from lockstep.rollout.builtin.scheduler import Group
from lockstep.rollout.protocol import Request

log = logging.getLogger(__name__)

_PROMPTS = (5, 1, 3)
_ROWS = (0, 0, 1, 2, 2)  # group of each row
_TOKENS = 4
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@torch.inference_mode()
def choose_runner(lm: Any, device: torch.device, context: int, budget: int | None) -> Runner:
    """The cached runner where the model passes the probe, else the plain one, with a warning that says why."""
    why = _refusal(lm, device, context)
    if why is None:
        use_cached(lm)
        return CachedRunner(lm, device, budget)
    use_plain(lm)
    log.warning("%s decodes without our KV cache, slowly: %s", type(lm).__name__, why)
    return PlainRunner(lm, device)


def _refusal(lm: Any, device: torch.device, context: int) -> str | None:
    """Why the model cannot use the cached runner; None where it can."""
    config = lm.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    use_plain(lm)
    rows, groups = _play(config.vocab_size)
    expected = _logits(PlainRunner(lm, device), rows, groups)
    rows, groups = _play(config.vocab_size)
    runner = CachedRunner(lm, device)
    try:
        use_cached(lm)
        got = _logits(runner, rows, groups)
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        return f"its attention does not go through the interface ({error})"
    if not runner.cache.prompts:
        return "its attention ignores the interface"
    half = next(lm.parameters()).dtype in (torch.bfloat16, torch.float16)
    error_size = float((got - expected).std() / expected.std().clamp(min=1e-12))
    if not error_size < (5e-2 if half else 1e-3):
        return f"its logits differ from those of whole sequences by {error_size:.1e} of their spread"
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < context and not runner.windows:
        return f"its sliding window of {window} does not reach the attention interface"
    return None


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
