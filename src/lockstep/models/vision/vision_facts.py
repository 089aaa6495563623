"""The size of the vision part of a model, and what images cost, without its weights."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.models.vision.model_parts import find_vision


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """The size of a vision tower and its projector."""

    tower: int
    """Number of parameters of the tower, without the projector."""
    projector: int
    blocks: int
    """Number of the tower's transformer blocks."""
    block: int
    """Number of parameters of one of them."""
    hidden: int
    largest_unit: int
    """Number of parameters of the largest module that is gathered as one: a block, the rest of the tower, or the
    projector."""
    patches_per_token: int
    """How many patches become one token of the language model."""
    beside: int = 0
    """Number of the projector's modules beside the tower; 0 if the tower contains the projector."""

    def flops(self, tokens: int) -> int:
        """Estimates the floating-point operations of the forward for one image.

        Each patch costs two operations per weight and, for the scores and the mixture of the values, `4 * hidden` per
        other patch and block: an upper bound for towers whose blocks attend within windows.

        Args:
            tokens: number of the image's tokens in the language model.
        """
        patches = tokens * self.patches_per_token
        mixing = 4 * self.hidden * self.blocks * patches
        return patches * (2 * self.blocks * self.block + mixing) + 2 * tokens * self.projector

    def activation_bytes(self, tokens: int, width: int, checkpointing: bool) -> int:
        """Estimates the bytes that are kept for the backward pass, as for the layers of a language model (Korthikanti
        et al. 2022, eq. 2, without the attention term).

        Args:
            tokens: number of the images' tokens in the language model.
            width: bytes of a value in the compute precision.
            checkpointing: whether the blocks are computed again in the backward pass.
        """
        per_patch = (2 if checkpointing else 34) * self.hidden * self.blocks * width // 2
        return tokens * self.patches_per_token * per_patch


def vision_facts(lm: Any) -> VisionFacts | None:
    """Measures the vision part of a model of transformers, possibly on the meta device; None if it has none."""
    vision = find_vision(lm)
    if vision is None:
        return None
    projector = sum(map(_count, vision.projector)) + sum(each.numel() for each in vision.loose)
    inside = projector if vision.inside else 0
    blocks = [_count(block) for block in vision.blocks]
    rest = _count(vision.tower) - sum(blocks)
    return VisionFacts(
        tower=_count(vision.tower) - inside,
        projector=projector,
        blocks=len(blocks),
        block=max(blocks, default=0),
        hidden=_hidden(lm.config.vision_config),
        largest_unit=max([*blocks, rest, *map(_count, () if vision.inside else vision.projector)]),
        patches_per_token=patches_per_token(lm.config),
        beside=0 if vision.inside else len(vision.projector),
    )


def patches_per_token(config: Any) -> int:
    """Returns how many patches become one token, by the names that the configs of transformers have for it; 1 if there
    is none."""
    vision = config.vision_config
    for owner, name in ((vision, "spatial_merge_size"), (config, "spatial_merge_size"), (config, "scale_factor")):
        if isinstance(side := getattr(owner, name, None), int):
            return side * side
    if ratio := getattr(config, "downsample_ratio", None):
        return round(1 / float(ratio) ** 2)
    if tokens := getattr(config, "mm_tokens_per_image", None):
        return int((vision.image_size // vision.patch_size) ** 2 // tokens)
    return 1


def _hidden(config: Any) -> int:
    # Qwen2-VL's hidden_size is that of the language model
    found: int = getattr(config, "embed_dim", None) or config.hidden_size
    return found


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
