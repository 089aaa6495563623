"""What makes a trainer's process faster without changing what it computes: compiled layers."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.models.attention import hide_from_compiler
from lockstep.models.policy import Policy


class NoCompiler(ValueError):
    """Layers are to be compiled for the CPU, and there is no C++ compiler."""

    def __init__(self) -> None:
        super().__init__(
            "trainer.compile is layers, which needs a C++ compiler on the CPU, and none was found (CXX, g++, clang++): "
            "install g++, or set trainer.compile: off"
        )


def compile_layers(policy: Policy, device: torch.device) -> None:
    """Compiles the decoder layers' forward and backward, attention left as it is.

    Shapes are symbolic: one compilation serves all rows, no padding to buckets. Evaluations and empty micro-batches
    (of one token, which the compiler takes for a constant) run as before, so that they cost no compilation.

    Raises:
        NoCompiler: on a CPU without one.
    """
    if device.type == "cpu":
        require_compiler()
    torch._inductor.config.compile_threads = 1  # its pool would be processes that nobody watches
    hide_from_compiler()

    def faster(forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(forward, dynamic=True)

        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            plain = not torch.is_grad_enabled() or hidden.shape[1] < 2
            return forward(hidden, *args, **kwargs) if plain else compiled(hidden, *args, **kwargs)

        return run

    for layer in policy.layers:
        layer.forward = faster(layer.forward)


def require_compiler() -> None:
    """Raises NoCompiler where torch would find none for C++."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
        raise NoCompiler
