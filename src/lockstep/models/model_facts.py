"""Measures a model from its config, without loading its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.model import AdapterConfig, ModelConfig
from lockstep.models.hf_checkpoint import check_weights, named_weights
from lockstep.models.lora import (
    add_adapter,
    check_adapter,
    named_adapter,
    named_saved_weights,
    starts_from_other_weights,
)
from lockstep.models.model_loader import load_policy, resolve_dtype, usable_context
from lockstep.models.policy_model import PolicyModel
from lockstep.models.router_loss import RouterRecorder, router_coefficient
from lockstep.models.vision.model_parts import MODEL_PARTS, ModelPart, changing_parts
from lockstep.models.vision.vision_facts import VisionFacts, vision_facts
from lockstep.models.weight_conversion import checkpoint_groups


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """The size of an adapter."""

    parameters: int
    trained_blocks: int
    """Number of decoder layers with adapter weights, plus one if weights outside of the layers are trained."""
    first_trained_layer: int
    """The first layer that needs a backward pass."""
    saved: int = 0
    """Number of the base model's parameters that are trained in full, in addition to the adapter."""
    reference_differs_from_base: bool = False
    """Whether the initial policy, which is the reference of a KL penalty, differs from the model without adapter."""

    @property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return self.parameters + self.saved


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The size of a model."""

    parameters: int
    """Number of the model's parameters, without an adapter's."""
    layers: int
    hidden: int
    vocabulary: int
    kv_heads: int
    head_dim: int
    context: int
    dtype: str
    """Compute precision after `auto` was resolved."""
    largest_layer: int
    """Number of parameters of the largest decoder layer, or of what is gathered as one of the vision part if that has
    more."""
    root: int
    """Number of parameters outside of the decoder layers and the vision part: embedding, last norm, output layer."""
    adapter: AdapterFacts | None = None
    router_aux_loss: float = 0.0
    """Coefficient of the routers' auxiliary loss; 0 for none."""
    layout_refusal: str | None = None
    """Why the model cannot take rows of several segments; None if the rank has to find out."""
    device: str = "cuda"
    """The kind of device of the ranks, for which `dtype` was resolved."""
    fused_layers: bool = False
    """Whether the decoder layers have a fused forward, which is used in float32 on a CPU."""
    vision: VisionFacts | None = None
    """The tower and the projector; None for a model that reads no images."""
    frozen: int = 0
    """Number of parameters of the parts that `model.vision` does not train, if there is no adapter."""
    changing: frozenset[ModelPart] = frozenset(MODEL_PARTS)
    """Parts of which anything is trained, be it an adapter."""

    @property
    def trained(self) -> int:
        """Number of parameters that are trained: those of an adapter, or all that are not frozen."""
        return self.parameters - self.frozen if self.adapter is None else self.adapter.trained

    @property
    def copied(self) -> int:
        """Number of frozen parameters of which FSDP2 leaves a copy on every rank: those of a tower, and of a projector,
        of which nothing is trained."""
        if self.vision is None:
            return 0
        sizes = {"tower": self.vision.tower, "projector": self.vision.projector}
        return sum(size for part, size in sizes.items() if part not in self.changing)

    @property
    def vision_units(self) -> int:
        """Number of modules of the vision part that FSDP2 gathers as one when images are computed."""
        if self.vision is None:
            return 0
        tower, projector = "tower" in self.changing, "projector" in self.changing
        own = tower * self.vision.blocks + (tower or (projector and not self.vision.beside))
        return own + projector * self.vision.beside


def model_facts(cfg: ModelConfig, device: str) -> ModelFacts:
    """Builds the model without weights and measures it. Raises ModelError if the model cannot be built or exported, or
    if the weights in a local folder or the adapter do not match it."""
    policy = load_policy(cfg, "cpu", meta=True)
    weights = dict(named_weights(policy))
    checkpoint_groups(policy.lm, {name: tuple(weight.shape) for name, weight in weights.items()})
    folder = Path(cfg.path).expanduser()
    if folder.is_dir():  # weights of a hub name may not be downloaded yet
        check_weights(policy, folder)
    total = sum(parameter.numel() for parameter in weights.values())
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in policy.layers]
    frozen = 0 if cfg.adapter else sum(weight.numel() for weight in weights.values() if not weight.requires_grad)
    vision = vision_facts(policy.lm)
    seeing, largest_unit = (0, 0) if vision is None else (vision.tower + vision.projector, vision.largest_unit)
    adapter = None if cfg.adapter is None else _adapter_facts(policy, cfg.adapter)
    config: Any = policy.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)  # a state-space model has none
    return ModelFacts(
        parameters=total,
        layers=len(policy.layers),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1),
        context=usable_context(cfg, policy.config),
        dtype=str(resolve_dtype(cfg.dtype, device)).removeprefix("torch."),
        largest_layer=max([*layers, largest_unit]),
        root=total - sum(layers) - seeing,
        adapter=adapter,
        router_aux_loss=_router_coefficient(cfg, policy),
        layout_refusal=policy.layout_refusal,
        device=device,
        fused_layers=policy.fuse_layers() is None,
        vision=vision,
        frozen=frozen,
        changing=changing_parts(policy.lm),
    )


def _router_coefficient(cfg: ModelConfig, policy: PolicyModel) -> float:
    coefficient = router_coefficient(cfg, policy.config)
    if coefficient:
        RouterRecorder(policy, coefficient)  # raises ModelError for a model without routers
    return coefficient


def _adapter_facts(policy: PolicyModel, cfg: AdapterConfig) -> AdapterFacts:
    add_adapter(policy, cfg)
    check_adapter(policy, cfg)
    adapter_parameters = sum(parameter.numel() for _, parameter in named_adapter(policy))
    saved = sum(parameter.numel() for _, parameter in named_saved_weights(policy))
    inside = {id(parameter) for layer in policy.layers for parameter in layer.parameters()}
    outside = any(p.requires_grad for p in policy.parameters() if id(p) not in inside)
    embedding = policy.lm.get_input_embeddings().weight.requires_grad
    trained = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in policy.layers]
    return AdapterFacts(
        parameters=adapter_parameters,
        saved=saved,
        trained_blocks=sum(trained) + outside,
        first_trained_layer=0 if embedding else trained.index(True) if any(trained) else len(trained),
        reference_differs_from_base=starts_from_other_weights(policy, cfg),
    )
