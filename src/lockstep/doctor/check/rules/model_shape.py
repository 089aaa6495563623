"""Derives a model's size from its `config.json` alone, without torch or the weights: parameters by part, and keys and
values per token. Pure.

Only the listed families are supported, with the layers that transformers builds for them
(`src/transformers/models/<family>/modeling_<family>.py`,
https://github.com/huggingface/transformers/tree/main/src/transformers/models).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class UnknownModelShape(ValueError):
    """The number of parameters cannot be derived from the model's config."""


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The vision tower and the projector of a model, and what the images of a run's samples cost."""

    parameters: int
    largest_unit: int
    """Parameters of the largest module that is gathered as one."""
    trained: bool = True
    """Whether any of them is trained."""
    most_tokens: int = 0
    """Tokens that the images of one sample take, at most."""
    flops: float = 0.0
    """Floating-point operations of the forward for the images of one sample, on average."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine memory and time."""

    family: str
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    embedding: int
    """Parameters of the embedding."""
    head: int
    """Parameters of the output layer; 0 if it is tied to the embedding."""
    per_layer: tuple[int, ...]
    """Parameters of each decoder layer."""
    active_per_layer: tuple[int, ...]
    """Parameters of each layer that are applied to one token; of experts, only those that the router selects."""
    last_norm: int
    dtype: str
    """Data type of the weights on disk."""
    vision: VisionShape | None = None
    """The parts that read images; None for a model without, and for one of which only the language model is known."""

    @property
    def parameters(self) -> int:
        seeing = 0 if self.vision is None else self.vision.parameters
        return self.embedding + self.head + sum(self.per_layer) + self.last_norm + seeing

    @property
    def sent(self) -> int:
        """Number of parameters that engines get again in each step: not those of a frozen tower and projector."""
        return self.parameters - (self.vision.parameters if self.vision and not self.vision.trained else 0)

    @property
    def active(self) -> int:
        """Number of parameters that are applied to each token: those of the layers and of the output layer."""
        return sum(self.active_per_layer) + (self.head or self.embedding)

    @property
    def largest_unit(self) -> int:
        """Maximum number of parameters that FSDP2 gathers at once: a layer, a module of a vision tower of which
        anything is trained, or embedding, head and last norm."""
        seeing = self.vision.largest_unit if self.vision and self.vision.trained else 0
        return max([*self.per_layer, seeing, self.embedding + self.head + self.last_norm])

    def kv_bytes(self, width: int) -> int:
        """Bytes of one token's keys and values (Kwon et al. 2023, section 3: 2 x layers x key-value width)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


def model_shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Derives the shape from the content of a `config.json`.

    Raises:
        UnknownModelShape: the family is not supported, or a field is missing.
    """
    named = str(config.get("model_type", ""))
    family = _TEXT_MODELS.get(named, named)
    if family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UnknownModelShape(f"model_type {family or 'is missing'}: supported families are {known}")
    try:
        return _read_shape(family, config)
    except (KeyError, TypeError) as error:
        raise UnknownModelShape(f"config.json of a {family} model: {error} is missing or not a number") from error


_GATED = {
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3", "phi3",
    "olmo2",
}  # fmt: skip
_FAMILIES = _GATED | {"gpt2"}
_TEXT_MODELS: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "gemma3_text": "gemma3",
}  # fmt: skip
"""The families that have the layers of the language model in a vision-language model."""
_TIED = {"gemma", "gemma2", "gemma3", "gpt2"}
"""Families that by default tie the output layer to the embedding."""


def _read_shape(family: str, config: Mapping[str, Any]) -> ModelShape:
    if family == "gpt2":
        return _read_gpt2(config)
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or _default_head_dim(family, hidden, heads))
    attention = _attention_parameters(family, config, hidden, heads, kv_heads, head_dim)
    norms = (4 if family in ("gemma2", "gemma3") else 2) * hidden
    whole, active = [], []
    for layer in range(layers):
        mlp, used = _mlp_parameters(family, config, hidden, layer)
        whole.append(attention + norms + mlp)
        active.append(attention + norms + used)
    vocabulary = int(config["vocab_size"])
    tied = bool(config.get("tie_word_embeddings", family in _TIED))
    return ModelShape(
        family, layers, hidden, vocabulary, heads, kv_heads, head_dim, int(config.get("max_position_embeddings", 0)),
        vocabulary * hidden, 0 if tied else vocabulary * hidden, tuple(whole), tuple(active), hidden,
        _dtype(config),
    )  # fmt: skip


def _default_head_dim(family: str, hidden: int, heads: int) -> int:
    # In transformers, the default of these families is a constant instead of the quotient.
    constants = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3": 256}
    return constants.get(family, hidden // heads)


def _attention_parameters(
    family: str, config: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int
) -> int:  # fmt: skip
    queries, keys = heads * head_dim, kv_heads * head_dim
    count = hidden * (queries + 2 * keys) + queries * hidden
    if family in ("qwen2", "qwen2_moe") and config.get("qkv_bias", True):
        count += queries + 2 * keys
    elif config.get("attention_bias", False) and family in (
        "llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "olmo2",
    ):  # fmt: skip
        count += queries + 2 * keys + hidden
    if family in ("qwen3", "qwen3_moe", "gemma3"):
        count += 2 * head_dim
    if family == "olmo2":
        count += queries + keys
    return count


def _mlp_parameters(family: str, config: Mapping[str, Any], hidden: int, layer: int) -> tuple[int, int]:
    """Parameters of a layer's feed-forward part, and how many of them are applied to one token."""
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    dense = layer in (config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    if family == "mixtral":
        dense, step = False, 1
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe") or not experts or dense or (layer + 1) % step:
        size = int(config["intermediate_size"])
        count = 3 * hidden * size
        if family == "llama" and config.get("mlp_bias", False):
            count += 2 * size + hidden
        return count, count
    size = int(config["intermediate_size"] if family == "mixtral" else config["moe_intermediate_size"])
    one = 3 * hidden * size
    router = hidden * experts
    shared = 0
    if family == "qwen2_moe":
        shared = 3 * hidden * int(config["shared_expert_intermediate_size"]) + hidden
    chosen = int(config.get("num_experts_per_tok") or 1)
    return experts * one + router + shared, chosen * one + router + shared


def _read_gpt2(config: Mapping[str, Any]) -> ModelShape:
    hidden, layers, heads = int(config["n_embd"]), int(config["n_layer"]), int(config["n_head"])
    inner = int(config.get("n_inner") or 4 * hidden)
    per_layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    vocabulary, context = int(config["vocab_size"]), int(config["n_positions"])
    return ModelShape(
        "gpt2", layers, hidden, vocabulary, heads, heads, hidden // heads, context, (vocabulary + context) * hidden,
        0 if config.get("tie_word_embeddings", True) else vocabulary * hidden,
        (per_layer,) * layers, (per_layer,) * layers, 2 * hidden, _dtype(config),
    )  # fmt: skip


def _dtype(config: Mapping[str, Any]) -> str:
    seen = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return seen if seen in DTYPE_BYTES else "float32"
