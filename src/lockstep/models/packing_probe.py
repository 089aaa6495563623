"""Tests at load whether a model respects a row layout, and how rows may be packed for it.

A model whose layers ignore the layout (linear attention, state space, own kernels) would let samples of one row see
each other without any error. So a two-segment row and a tree are compared with separate forwards.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.data.packing import PackingMode
from lockstep.data.row_layout import RowLayout
from lockstep.models.policy_model import PolicyModel

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
    """Packed against separate."""
    leak: float
    """The difference if the segments attended to each other."""
    noise: float
    """The difference caused by the row's other length alone, where the result must not change."""

    def respected(self, floor: float) -> bool:
        return self.error <= self.tolerance(floor)

    def tolerance(self, floor: float) -> float:
        return max(4 * self.noise, floor)


@torch.no_grad()
def probe_packing(policy: PolicyModel, compute_dtype: torch.dtype | None = None) -> PackingProbeResult:
    """How rows may be packed for this model: as a forest, as blocks, or one sample per row.

    Under FSDP every rank calls it: each makes the same forwards.

    Args:
        compute_dtype: of the forward, where FSDP computes in another precision than that of the parameters.
    """
    if policy.layout_refusal is not None:
        return PackingProbeResult("single", policy.layout_refusal)
    name = type(policy.lm).__name__
    parameter = next(policy.parameters())
    floor = 1e-5 if (compute_dtype or parameter.dtype) == torch.float32 else 2e-2
    tokens = _random_tokens(policy, parameter.device)
    block, tree = _compare_block(policy, tokens), _compare_tree(policy, tokens)
    for what, found in (("two segments of a row", block), ("the branches of a tree", tree)):
        if found.leak <= found.tolerance(floor):
            seen = f"{found.leak:.1e} where they see each other, {found.tolerance(floor):.1e} is noise"
            return PackingProbeResult("single", f"{name}: cannot tell whether {what} are kept apart ({seen})")
    if not block.respected(floor):
        return PackingProbeResult("single", _ignores_layout(name, "two segments of a row see each other", block))
    if not tree.respected(floor):
        return PackingProbeResult("block", _ignores_layout(name, "the branches of a tree are not kept apart", tree))
    worst = max(block.error, tree.error)
    return PackingProbeResult("forest", f"{name}: packed rows and trees agree with separate forwards to {worst:.1e}")


@torch.no_grad()
def probe_fused_decoder(policy: PolicyModel) -> str:
    """Keeps the fused forward of `PolicyModel.fuse_layers` where it agrees with the model's own on a tree with targets
    in its branches, and disables it elsewhere; returns a description. Under FSDP every rank calls it."""
    layers = policy.fused_decoder
    if layers is None:
        return "the model's own forward"
    tokens = _random_tokens(policy, next(policy.parameters()).device)
    pairs = _next_token_pairs(_SEGMENT_LENGTH - 1, 2 * _SEGMENT_LENGTH)
    fused = _logprobs(policy, tokens.flatten(), [-1, 0, 0], pairs)
    layers.enabled = False
    own = _logprobs(policy, tokens.flatten(), [-1, 0, 0], pairs)
    noise = _max_difference(own, _logprobs(policy, tokens[:2].flatten(), [-1], pairs))
    error = _max_difference(fused, own)
    layers.enabled = error <= max(4 * noise, 1e-5)
    if layers.enabled:
        return f"a fused forward, which agrees with the model's own to {error:.1e}"
    return f"the model's own forward, as the fused one disagrees with it by {error:.1e}"


def _ignores_layout(name: str, what: str, found: _Comparison) -> str:
    return f"{name} ignores the layout: {what} (log-probabilities differ by {found.error:.1e}, noise {found.noise:.1e})"


def _random_tokens(policy: PolicyModel, device: torch.device) -> Tensor:
    """int64 `[3, length]`, the same on every rank."""
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
    """A prompt with two completions against two rows of prompt and completion."""
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
    """Each token of `[start, stop)` predicts the next, as (source, target) places."""
    return [(place, place + 1) for place in range(start, stop - 1)]


def _logprobs(policy: PolicyModel, row: Tensor, parents: list[int], pairs: list[tuple[int, int]]) -> Tensor:
    places = torch.tensor(pairs, device=row.device)
    layout = RowLayout([len(row) // len(parents)] * len(parents), parents)
    logprobs, _ = policy(row, layout, places[:, 0], row[places[:, 1]])
    assert isinstance(logprobs, Tensor)
    return logprobs


def _max_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
