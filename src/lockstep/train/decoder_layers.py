"""Changes the forward of a policy's decoder layers before a trainer uses or shards them: fuses or compiles them, and
recomputes their activations.
"""

import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lockstep.config.trainer import TrainerConfig
from lockstep.models.forest_attention import hide_from_compiler
from lockstep.models.policy_model import PolicyModel
from lockstep.models.vision.model_parts import changing_parts, find_vision
from lockstep.train.compile_progress import show_compilation

log = logging.getLogger(__name__)


def prepare_layers(
    policy: PolicyModel, trainer: TrainerConfig, device: torch.device, compute: torch.dtype, fuse: bool = True
) -> str | None:
    """Changes the layers' forward as the config says. Parameters and their names stay the same.

    Args:
        policy: may be on the meta device.
        compute: precision of forward and backward.
        fuse: whether layers may be fused; a fused layer does not call its modules.

    Returns:
        Why the layers are not fused, or None. If they are, call `probe_fused_decoder` once the policy has its weights.

    Raises:
        CompilerMissing: `compile` is `layers`, the device is a CPU, and there is no C++ compiler.
    """
    not_fused_reason = (
        _fuse_layers(policy, device, compute) if fuse else "the model's own forward: its modules are called"
    )
    if trainer.compile == "layers":
        compile_layers(policy, device)
    if trainer.activation_checkpointing:
        checkpoint_activations(policy)
    return not_fused_reason


def checkpoint_activations(policy: PolicyModel) -> None:
    """Recomputes each decoder layer, and each trained block of a vision tower, in the backward pass instead of keeping
    its activations.

    Replaces the layer's forward and not the module, so that parameter names do not change and FSDP2's hooks run outside
    of it: a layer is gathered once for its recomputation and its backward.
    """

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return run

    vision = find_vision(policy.lm)
    blocks = () if vision is None or "tower" not in changing_parts(policy.lm) else vision.blocks
    for layer in (*policy.layers, *blocks):
        layer.forward = recomputed(layer.forward)


class CompilerMissing(ValueError):
    """trainer.compile is `layers` on a CPU, but there is no C++ compiler."""

    def __init__(self) -> None:
        self.remedy = "install g++, or set trainer.compile: off"
        super().__init__(
            "trainer.compile is layers, which needs a C++ compiler on the CPU, and none was found (CXX, g++, clang++): "
            f"{self.remedy}"
        )


def compile_layers(policy: PolicyModel, device: torch.device) -> None:
    """Compiles the decoder layers' forward and backward, except attention. A vision tower is not compiled: its shapes
    are those of the images, and its attention is that of the model.

    Shapes are symbolic: one compilation serves rows of all sizes, without padding. Evaluations and empty micro-batches
    run uncompiled, so that they cost no compilation. (Empty ones have one token, a size that the compiler would
    specialize.)

    Raises:
        CompilerMissing: the device is a CPU and there is no C++ compiler.
    """
    if device.type == "cpu":
        require_compiler()
    torch._inductor.config.compile_threads = 1  # more would start a pool of processes that nothing monitors
    hide_from_compiler()
    show_compilation()

    def compiled_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(forward, dynamic=True)

        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            uncompiled = not torch.is_grad_enabled() or hidden.shape[1] < 2
            return forward(hidden, *args, **kwargs) if uncompiled else compiled(hidden, *args, **kwargs)

        return run

    for layer in policy.layers:
        layer.forward = compiled_forward(layer.forward)


def require_compiler() -> None:
    """Raises CompilerMissing if torch would find no C++ compiler."""
    if not has_compiler():
        raise CompilerMissing


def has_compiler() -> bool:
    """Whether torch would find a C++ compiler on this host."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)


def _fuse_layers(policy: PolicyModel, device: torch.device, compute: torch.dtype) -> str | None:
    """Fuses the layers if memory bandwidth limits them: in float32 on a CPU. Returns why they are not fused, or
    None."""
    if device.type != "cpu" or compute != torch.float32:
        return "the model's own forward: there is no other for this device and precision"
    refusal = policy.fuse_layers()
    return refusal and f"the model's own forward: {refusal}"
