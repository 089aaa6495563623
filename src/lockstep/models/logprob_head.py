"""Computes log-probabilities from hidden states, a chunk of targets at a time.

No `[targets, vocabulary]` tensor is kept: forward stores the log-sum-exp of each target, and backward computes the
logits of each chunk again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers.modeling_outputs import BaseModelOutputWithPast

from lockstep.models.errors import ModelError

DIRECT_ELEMENTS = 2**18
"""With at most this many logits (1 MB), autograd is used, which is faster than computing the logits twice."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The function that a model applies to the output of its head's matrix: `softcap * tanh(scale * z / softcap)`."""

    scale: float = 1.0
    """Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`."""
    softcap: float | None = None
    """Gemma's `final_logit_softcapping`."""

    def __call__(self, scores: Tensor) -> Tensor:
        if self.scale != 1.0:
            scores = scores * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores


def target_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes log-probabilities of targets under softmax(logits / temperature), in float32.

    Args:
        hidden: `[targets, hidden]`.
        weight: `[vocabulary, hidden]`.
        bias: `[vocabulary]` or None.
        targets: int64 `[targets]`.
        chunk: number of targets whose logits are computed at once.
        entropy: also return the entropy of each target's distribution, in nats.

    Returns:
        (log-probabilities `[targets]`, entropies `[targets]` or None), both differentiable.
    """
    # Autograd accumulates a bias's gradient before the matrix's, `_ChunkedHead` after it. Ranks that reduce gradients
    # as they arrive (ZeRO) need the same order for all rows, so a head with a bias is always chunked.
    if bias is None and targets.numel() * weight.shape[0] <= DIRECT_ELEMENTS:
        logits = transform(linear(hidden, weight, bias).float()) / temperature
        every = torch.log_softmax(logits, dim=-1)
        # Not a view, because FSDP2 registers its backward hook on the root's output and warns if that is a view.
        chosen = every.gather(-1, targets[:, None]).squeeze(-1).clone()
        return chosen, -(every.exp() * every).sum(-1) if entropy else None
    chosen, entropies = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, transform, temperature, chunk, entropy
    )
    return chosen, entropies if entropy else None


class _ChunkedHead(torch.autograd.Function):
    """`target_logprobs` with an explicit gradient; see `_gradient_of_scores` for the formulas."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        temperature: float,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        normalizer = hidden.new_empty(len(targets), dtype=torch.float32)
        chosen, entropies = torch.empty_like(normalizer), torch.zeros_like(normalizer)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = transform(linear(hidden[part], weight, bias).float()).div_(temperature)
            normalizer[part] = torch.logsumexp(logits, dim=-1)
            chosen[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer[part]
            if entropy:
                probabilities = torch.exp(logits - normalizer[part, None])
                entropies[part] = normalizer[part] - probabilities.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropies)
        ctx.settings = (transform, temperature, chunk, entropy)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_chosen: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropies = ctx.saved_tensors
        transform, temperature, chunk, entropy = ctx.settings
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Sums over chunks are kept in float32, because every addition in bfloat16 would lose bits.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            scores = linear(hidden[part], weight, bias).float()
            entropy_part = (grad_entropy[part], entropies[part]) if entropy else None
            grad_scores = _gradient_of_scores(
                scores, targets[part], normalizer[part], grad_chosen[part], entropy_part, transform, temperature
            ).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_scores @ weight
            if grad_weight is not None:
                grad_weight += grad_scores.t() @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_scores.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _gradient_of_scores(
    scores: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    grad_chosen: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    transform: LogitTransform,
    temperature: float,
) -> Tensor:
    """Computes the gradient of the matrix's output `[chunk, vocabulary]`.

    With x = logits / temperature, p = softmax(x) and H the entropy of p: d log p_t / dx = onehot_t - p and dH / dx =
    -p (log p + H). The chain rule adds temperature, softcap (1 - tanh^2) and scale.
    """
    logits = transform(scores).div_(temperature)
    log_probabilities = logits - normalizer[:, None]
    probabilities = torch.exp(log_probabilities)
    if entropy is None:
        gradient = probabilities.mul_(-grad_chosen[:, None])
    else:
        grad_entropy, entropies = entropy
        log_probabilities.add_(entropies[:, None]).mul_(grad_entropy[:, None]).add_(grad_chosen[:, None])
        gradient = probabilities.mul_(log_probabilities).neg_()
    gradient[torch.arange(len(targets), device=targets.device), targets] += grad_chosen
    gradient.mul_(transform.scale / temperature)
    if transform.softcap is not None:
        gradient.mul_(1 - (logits * (temperature / transform.softcap)).square_())
    return gradient


@torch.no_grad()
def target_renyi_entropies(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: LogitTransform,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Tensor:
    """Computes the Renyi entropy of order 2, -log sum_v p_v^2, of each target's distribution, in nats: float32
    `[targets]`, without gradient. Arguments as in `target_logprobs`."""
    entropies = hidden.new_empty(len(hidden), dtype=torch.float32)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        logits = transform(linear(hidden[part], weight, bias).float()) / temperature
        entropies[part] = 2 * torch.logsumexp(logits, dim=-1) - torch.logsumexp(logits.mul_(2), dim=-1)
    return entropies


def split_head(lm: Any) -> tuple[str, LogitTransform]:
    """Finds the backbone of a causal language model and the transform of its logits, and checks both with its forward.

    The check is cheap and needs no weights: for one call, the backbone is replaced by a few random hidden states, and
    the head by a small random matrix.

    Returns:
        (name of the backbone within the model, the transform).

    Raises:
        ModelError: the model computes its logits from the backbone's output in an unsupported way.
    """
    problem = "it has no module that computes hidden states for its head"
    for name in _backbone_names(lm):
        try:
            hidden, small, reference = _logits_of_small_head(lm, name)
        except (TypeError, AttributeError, RuntimeError, LookupError, NotImplementedError) as error:
            problem = f"its head cannot be separated from its backbone {name!r} ({error})"
            continue
        scores = linear(hidden, small.weight, small.bias).float()
        for candidate in _candidate_transforms(lm):
            if reference.shape == scores.shape and torch.allclose(candidate(scores), reference, rtol=1e-4, atol=1e-5):
                return name, candidate
        problem = "its logits are not a scaled or soft-capped linear map of its last hidden states"
    raise ModelError("model.path", type(lm).__name__, problem, "use a model with an ordinary head")


def _backbone_names(lm: Any) -> list[str]:
    """Returns the names of the modules that may be the backbone, the most likely first."""
    modules = [lm.base_model, lm.get_decoder(), *(child for child in lm.children() if hasattr(child, "base_model"))]
    names = {id(module): name for name, module in lm.named_modules() if name}
    return list(dict.fromkeys(names[id(module)] for module in modules if id(module) in names))


def _candidate_transforms(lm: Any) -> Iterator[LogitTransform]:
    config = lm.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    scales = [1.0]
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            scales += [float(value), 1.0 / value]
    for scale in scales:
        for cap in (None, softcap) if softcap else (None,):
            yield LogitTransform(scale, cap)


class _StubOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """The backbone's output with hidden states; all other attributes, which a head may pass on, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _logits_of_small_head(lm: Any, backbone: str) -> tuple[Tensor, nn.Linear, Tensor]:
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError("model.path", type(lm).__name__, "it has no linear output head", "use a causal language model")
    generator = torch.Generator().manual_seed(0)
    small = nn.Linear(head.in_features, 16, bias=head.bias is not None)
    with torch.no_grad():
        for parameter in small.parameters():
            # Large enough for a soft cap to have an effect, small enough not to saturate it.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 4 / head.in_features**0.5)
    hidden = torch.randn(1, 3, head.in_features, generator=generator)
    body = lm.get_submodule(backbone)
    with _replaced_head(lm, head, small), replaced_backbone(body, hidden), torch.no_grad():
        logits = lm(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False).logits
    return hidden, small, logits.float()


@contextmanager
def _replaced_head(lm: nn.Module, head: nn.Linear, small: nn.Linear) -> Iterator[None]:
    name = next(name for name, module in lm.named_modules() if module is head)
    parent_name, _, leaf = name.rpartition(".")
    parent = lm.get_submodule(parent_name)
    setattr(parent, leaf, small)
    try:
        yield
    finally:
        setattr(parent, leaf, head)


@contextmanager
def replaced_backbone(backbone: Any, hidden: Tensor) -> Iterator[None]:
    """Makes a backbone return the given last hidden states."""

    def forward(*args: object, **kwargs: object) -> _StubOutput:
        return _StubOutput(last_hidden_state=hidden)

    backbone.forward = forward
    try:
        yield
    finally:
        del backbone.forward
