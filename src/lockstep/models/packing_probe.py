"""Tests whether a loaded model respects row layouts, which determines how rows may be packed for it.

In a model whose layers ignore the layout (linear attention, state space models, custom kernels), samples of one row
would attend to each other without any error. So the probe compares a row of two segments, and a tree, with separate
forwards.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.data.images.image_store import PreparedImage
from lockstep.data.packing import PackingMode
from lockstep.data.row_layout import RowLayout
from lockstep.models.errors import ModelError
from lockstep.models.policy_model import PolicyModel
from lockstep.models.vision.image_probe import compare_image
from lockstep.models.vision.vision_policy import VisionPolicyModel

_SEGMENT_LENGTH = 12


@dataclass(frozen=True, slots=True)
class PackingProbeResult:
    """How rows may be packed for a model, and why."""

    mode: PackingMode
    reason: str


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Largest differences of log-probabilities over a few random tokens."""

    error: float
    """Difference between packed and separate forwards."""
    leak: float
    """Difference if the segments attend to each other."""
    noise: float
    """Difference due to another row length alone, which should not change the result."""

    def respected(self, floor: float) -> bool:
        return self.error <= self.tolerance(floor)

    def tolerance(self, floor: float) -> float:
        return max(4 * self.noise, floor)


@torch.no_grad()
def probe_packing(
    policy: PolicyModel, compute_dtype: torch.dtype | None = None, image: PreparedImage | None = None
) -> PackingProbeResult:
    """Finds out how rows may be packed for this model: as a forest, as blocks, or one sample per row.

    With FSDP, every rank must call it.

    Args:
        compute_dtype: precision of the forward, if FSDP computes in another precision than that of the parameters.
        image: an image to compare rows with, if the data has images.

    Raises:
        ModelError: the results for a prompt with an image differ from those of the model's own forward.
    """
    result = _probe_text(policy, compute_dtype)
    if image is None or not isinstance(policy, VisionPolicyModel):
        return result
    return _probe_image(policy, image, compute_dtype, result)


def _probe_text(policy: PolicyModel, compute_dtype: torch.dtype | None) -> PackingProbeResult:
    if policy.layout_refusal is not None:
        return PackingProbeResult("single", policy.layout_refusal)
    name = type(policy.lm).__name__
    parameter = next(policy.parameters())
    floor = _floor(compute_dtype or parameter.dtype)
    tokens = _random_tokens(policy, parameter.device)
    block, tree = _compare_block(policy, tokens), _compare_tree(policy, tokens)
    for what, found in (("two segments of a row", block), ("the branches of a tree", tree)):
        if found.leak <= found.tolerance(floor):
            values = f"difference {found.leak:.1e} if they attend to each other, noise {found.tolerance(floor):.1e}"
            return PackingProbeResult("single", f"{name}: cannot tell whether {what} are kept apart ({values})")
    if not block.respected(floor):
        return PackingProbeResult("single", _ignores_layout(name, "two segments of a row attend to each other", block))
    if not tree.respected(floor):
        return PackingProbeResult("block", _ignores_layout(name, "the branches of a tree are not kept apart", tree))
    worst = max(block.error, tree.error)
    return PackingProbeResult("forest", f"{name}: packed rows and trees agree with separate forwards to {worst:.1e}")


def _floor(dtype: torch.dtype) -> float:
    """Returns the difference that rounding may cause."""
    return 1e-5 if dtype == torch.float32 else 2e-2


def _probe_image(
    policy: VisionPolicyModel, image: PreparedImage, compute_dtype: torch.dtype | None, text: PackingProbeResult
) -> PackingProbeResult:
    """Returns the mode for rows with images, which is at most that of rows without. Raises ModelError."""
    name, parameter = type(policy.lm).__name__, next(policy.parameters())
    if policy.layout_refusal is not None:
        problem = f"it cannot compute prompts with images, because {policy.layout_refusal}"
        raise ModelError("model.path", name, problem, "use another vision-language model, or data without images")
    found, tolerance = compare_image(policy, image), _floor(compute_dtype or parameter.dtype)
    if found.alone > tolerance:
        problem = f"log-probabilities after an image differ by {found.alone:.1e} from its own forward"
        raise ModelError("model.path", name, problem, "use another vision-language model, or data without images")
    if found.block > tolerance:
        reason = f"two prompts with images in a row differ by {found.block:.1e} from separate forwards"
        return PackingProbeResult("single", f"{name}: {reason}")
    if found.tree > tolerance and text.mode == "forest":
        reason = f"completions that share an image differ by {found.tree:.1e} from separate forwards"
        return PackingProbeResult("block", f"{name}: {reason}")
    worst = max(found.alone, found.block, found.tree)
    return PackingProbeResult(text.mode, f"{text.reason}; with images, its own forward to {worst:.1e}")


@torch.no_grad()
def probe_fused_decoder(policy: PolicyModel) -> str:
    """Disables the fused forward of `PolicyModel.fuse_layers` if its results on a tree differ from those of the model's
    own forward. Returns a description of the forward in use. With FSDP, every rank must call it."""
    layers = policy.fused_decoder
    if layers is None:
        return "the model's own forward"
    tokens = _random_tokens(policy, next(policy.parameters()).device)
    pairs = _next_token_pairs(_SEGMENT_LENGTH - 1, 2 * _SEGMENT_LENGTH)
    fused = _logprobs(policy, tokens.flatten(), [-1, 0, 0], pairs)
    layers.enabled = False
    unfused = _logprobs(policy, tokens.flatten(), [-1, 0, 0], pairs)
    noise = _max_difference(unfused, _logprobs(policy, tokens[:2].flatten(), [-1], pairs))
    error = _max_difference(fused, unfused)
    layers.enabled = error <= max(4 * noise, 1e-5)
    if layers.enabled:
        return f"a fused forward, which agrees with the model's own forward to {error:.1e}"
    return f"the model's own forward, because the fused one differs from it by {error:.1e}"


def _ignores_layout(name: str, what: str, found: _Comparison) -> str:
    return f"{name} ignores the layout: {what} (log-probabilities differ by {found.error:.1e}, noise {found.noise:.1e})"


def _random_tokens(policy: PolicyModel, device: torch.device) -> Tensor:
    """Returns random tokens, int64 `[3, length]`, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (3, _SEGMENT_LENGTH), generator=generator).to(device)


def _compare_block(policy: PolicyModel, tokens: Tensor) -> _Comparison:
    first, second = tokens[0], tokens[1]
    row = torch.cat([first, second])
    inner = _next_token_pairs(0, _SEGMENT_LENGTH)
    outer = [(source + _SEGMENT_LENGTH, target + _SEGMENT_LENGTH) for source, target in inner]
    alone = torch.cat([_logprobs(policy, first, [-1], inner), _logprobs(policy, second, [-1], inner)])
    packed = _logprobs(policy, row, [-1, -1], inner + outer)
    joined = _logprobs(policy, row, [-1], inner + outer)
    count = len(inner)
    return _Comparison(
        _max_difference(packed, alone),
        _max_difference(joined[count:], alone[count:]),
        _max_difference(joined[:count], alone[:count]),
    )


def _compare_tree(policy: PolicyModel, tokens: Tensor) -> _Comparison:
    """Compares a prompt with two completions with two rows of prompt and completion."""
    prompt, left, right = tokens
    inside = _next_token_pairs(_SEGMENT_LENGTH - 1, 2 * _SEGMENT_LENGTH)
    branch = [(_SEGMENT_LENGTH - 1, 2 * _SEGMENT_LENGTH), *_next_token_pairs(2 * _SEGMENT_LENGTH, 3 * _SEGMENT_LENGTH)]
    alone = torch.cat([_logprobs(policy, torch.cat([prompt, side]), [-1], inside) for side in (left, right)])
    packed = _logprobs(policy, torch.cat(list(tokens)), [-1, 0, 0], inside + branch)
    joined = _logprobs(policy, torch.cat(list(tokens)), [-1], inside + branch)
    count = len(inside)
    return _Comparison(
        _max_difference(packed, alone),
        _max_difference(joined[count:], alone[count:]),
        _max_difference(joined[:count], alone[:count]),
    )


def _next_token_pairs(start: int, stop: int) -> list[tuple[int, int]]:
    """Returns (source, target) positions in which each token of `[start, stop)` predicts the next."""
    return [(place, place + 1) for place in range(start, stop - 1)]


def _logprobs(policy: PolicyModel, row: Tensor, parents: list[int], pairs: list[tuple[int, int]]) -> Tensor:
    places = torch.tensor(pairs, device=row.device)
    layout = RowLayout([len(row) // len(parents)] * len(parents), parents)
    with policy.probed():
        found, *_ = policy(row, layout, places[:, 0], row[places[:, 1]])
    assert isinstance(found, Tensor)
    return found


def _max_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
