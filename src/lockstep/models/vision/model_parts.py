"""The parts of a vision-language model: vision tower, projector, and language model.

They are found by transformers' own accessors and by the structure of the model, never by names: the language model is
`get_decoder()` and the output layer, the tower `get_encoder(modality="image")`, and the projector the rest. A model
whose tower contains the projector (Qwen-VL) has no rest: there, the projector is what the tower has after its blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from lockstep.config.vision import VisionConfig
from lockstep.models.errors import ModelError

if TYPE_CHECKING:
    from lockstep.models.policy_model import PolicyModel

ModelPart = Literal["tower", "projector", "language"]
MODEL_PARTS: tuple[ModelPart, ...] = get_args(ModelPart)
_DEPTHS = ("depth", "num_hidden_layers")
"""Names of the number of a tower's blocks in the vision configs of transformers."""


@dataclass(frozen=True, slots=True)
class VisionModules:
    """The modules that compute the features of images."""

    tower: nn.Module
    blocks: tuple[nn.Module, ...]
    """The tower's transformer blocks in order."""
    projector: tuple[nn.Module, ...]
    """Modules within the tower, or beside it."""
    inside: bool
    """Whether the projector is within the tower."""
    loose: tuple[nn.Parameter, ...]
    """Parameters of the projector that belong to no module of it, such as the embedding of a line's end."""

    @property
    def parts(self) -> dict[int, ModelPart]:
        """The part of each module within the tower and the projector, by the module's `id`."""
        found: dict[int, ModelPart] = {id(each): "tower" for each in self.tower.modules()}
        return found | {id(each): "projector" for module in self.projector for each in module.modules()}


def find_vision(lm: Any) -> VisionModules | None:
    """Returns the modules that see; None for a language model without them.

    Args:
        lm: a model of transformers with its head. It may be on the meta device, and have an adapter.
    """
    tower, decoder = _tower(lm), lm.get_decoder() if hasattr(lm, "get_decoder") else None
    if tower is None or decoder is None:
        return None
    model = lm.base_model if lm.base_model is not lm else lm
    beside = tuple(_beside(model, tower, decoder))
    within = {id(each) for module in (tower, decoder, *beside) for each in module.parameters()}
    head = lm.get_output_embeddings()
    within |= set() if head is None else {id(each) for each in head.parameters()}
    loose = tuple(each for each in lm.parameters() if id(each) not in within)
    blocks = _blocks(tower, lm.config.vision_config)
    if beside or loose:
        return VisionModules(tower, blocks, beside, inside=False, loose=loose)
    return VisionModules(tower, blocks, tuple(_after_blocks(tower, blocks)), inside=True, loose=())


def parameter_parts(lm: Any) -> dict[int, ModelPart]:
    """Returns the part of each parameter, by the parameter's `id`. An adapter belongs to the part that it adapts."""
    vision = find_vision(lm)
    parts: dict[int, ModelPart] = {id(each): "language" for each in lm.parameters()}
    if vision is not None:
        parts |= {id(each): "tower" for each in vision.tower.parameters()}
        parts |= {id(each): "projector" for module in vision.projector for each in module.parameters()}
        parts |= {id(each): "projector" for each in vision.loose}
    return parts


def module_parts(lm: Any) -> dict[int, ModelPart]:
    """Returns the part of each module of tower and projector, by the module's `id`. All others are of the language
    model."""
    vision = find_vision(lm)
    return {} if vision is None else vision.parts


def freeze_parts(policy: "PolicyModel", config: VisionConfig) -> None:
    """Freezes the parts of a policy that the config does not train.

    Raises:
        ModelError: nothing of the model would be trained.
    """
    frozen = frozenset(part for part in MODEL_PARTS if not getattr(config, part).train)
    if not frozen:
        return
    parts = parameter_parts(policy.lm)
    if frozen.issuperset(parts.values()):
        there = " and ".join(part for part in MODEL_PARTS if part in set(parts.values()))
        remedy = "set train to true for one of them"
        raise ModelError("model.vision", there, "these are all parts that the model has, and they are frozen", remedy)
    for parameter in policy.parameters():
        if parts[id(parameter)] in frozen:
            parameter.requires_grad_(False)
    policy.frozen_parts = frozen


def changing_parts(lm: Any) -> frozenset[ModelPart]:
    """Returns the parts of which anything is trained, be it an adapter."""
    parts = parameter_parts(lm)
    return frozenset(parts[id(each)] for each in lm.parameters() if each.requires_grad)


def _tower(lm: Any) -> nn.Module | None:
    if getattr(lm.config, "vision_config", None) is None or not hasattr(lm, "get_encoder"):
        return None
    tower = lm.get_encoder(modality="image")
    return tower if isinstance(tower, nn.Module) and tower is not lm and tower is not lm.base_model else None


def _beside(module: nn.Module, *others: nn.Module) -> Iterator[nn.Module]:
    """Yields the largest modules with parameters that have no parameter of the others."""
    apart = [{id(each) for each in other.modules()} for other in others]
    for child in module.children():
        inner = {id(each) for each in child.modules()}
        if not any(inner & other for other in apart):
            if any(True for _ in child.parameters()):
                yield child
        elif not any(id(child) in other for other in apart):  # it contains one of the others
            yield from _beside(child, *others)


def _blocks(tower: nn.Module, config: Any) -> tuple[nn.Module, ...]:
    """The first list of modules that is as long as the config says; empty if there is none."""
    depths = {depth for name in _DEPTHS if isinstance(depth := getattr(config, name, None), int)}
    lists = (module for module in tower.modules() if isinstance(module, nn.ModuleList) and len(module) in depths)
    return tuple(next(lists, ()))


def _after_blocks(tower: nn.Module, blocks: tuple[nn.Module, ...]) -> Iterator[nn.Module]:
    """Yields the children of a tower with parameters that follow the one that contains the blocks."""
    inside, passed = {id(block) for block in blocks}, False
    for child in tower.children():
        if inside & {id(each) for each in child.modules()}:
            passed = True
        elif passed and any(True for _ in child.parameters()):
            yield child
