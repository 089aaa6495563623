"""What a decoder layer does beside attention, with fewer passes over memory than autograd of the plain formulas takes:
what can be computed again is not saved, and gradients of one input are added up inside the products.

Compilers fuse the plain formulas themselves, so these are what they see.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_silu_backward = torch.ops.aten.silu_backward


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467) over the last of `[..., size]`."""
    if torch.compiler.is_compiling():
        return torch.mul(weight, x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    out: Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    """y = w x r with r = 1 / sqrt(mean(x^2) + eps), so dx = w g r - x r^3 mean(w g x) and dw = sum(g x r)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        products = (grad * x).reshape(-1, size)
        grad_weight = products.t().mv(inverse.view(-1)) if ctx.needs_input_grad[1] else None
        pull = products.mv(weight).view_as(inverse).mul_(inverse.pow(3))
        grad_x = torch.mul(grad, weight, out=products.view(x.shape)).mul_(inverse).addcmul_(x, pull, value=-1 / size)
        return grad_x, grad_weight, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_silu = grad * up
        grad_gate = _silu_backward.grad_input(grad_silu, gate, grad_input=grad_silu)
        return grad_gate, F.silu(gate).mul_(grad)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of `[tokens, heads, size]`, halves paired; cos and
    sin are `[tokens, 1, size]`."""
    if torch.compiler.is_compiling():
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
    out: Tensor = _Rotated.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        out = grad * cos
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out, None, None


def projections(modules: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """What several linear layers make of the same `[tokens, size]`; of any other modules, what they make one by one."""
    if torch.compiler.is_compiling() or any(type(module) is not nn.Linear for module in modules):
        return tuple(module(x) for module in modules)
    parts = [part for module in modules for part in (module.weight, module.bias)]
    made: tuple[Tensor, ...] = _Projections.apply(x, *parts)  # type: ignore[no-untyped-call]
    return made


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parts[::2], parts[1::2]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad
        grad_x: Tensor | None = None
        if wants_x:
            grad_x = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
        found: list[Tensor | None] = []
        for grad, wants_weight, wants_bias in zip(grads, wants[::2], wants[1::2], strict=True):
            found += [grad.t() @ x if wants_weight else None, grad.sum(0) if wants_bias else None]
        return grad_x, *found


def added(total: Tensor, module: nn.Module, x: Tensor) -> Tensor:
    """`total + module(x)`, in one product where the module is a plain linear layer."""
    if type(module) is nn.Linear and getattr(module, "bias", None) is None:
        return torch.addmm(total, x, module.weight.t())
    found: Tensor = total + module(x)
    return found
