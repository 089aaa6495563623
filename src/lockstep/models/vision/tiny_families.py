"""What tiny vision-language models of each family have in their configs and processors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

TinyVisionFamily = Literal[
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "gemma3", "internvl", "llava_onevision"
]


class TinySizes(Protocol):
    """The sizes in `TinyVision` that the configs need."""

    @property
    def hidden(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def sliding_window(self) -> int: ...
    @property
    def vision_hidden(self) -> int: ...
    @property
    def vision_layers(self) -> int: ...
    @property
    def vision_heads(self) -> int: ...
    @property
    def vision_ffn(self) -> int: ...
    @property
    def image_size(self) -> int: ...
    @property
    def tiles(self) -> int: ...
    @property
    def patch(self) -> int: ...
    @property
    def merge(self) -> int: ...
    @property
    def features_per_tile(self) -> int: ...


Settings = Callable[[TinySizes], dict[str, Any]]


def _nothing(model: TinySizes) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """What the models of a family have in their configs, in addition to the sizes of the text model."""

    vision: Settings
    """The config of the vision tower."""
    processor_class: str
    image_processor: Settings
    """The content of preprocessor_config.json."""
    placeholder: str
    """What the chat template writes for an image, which the processor expands."""
    token_ids: Mapping[str, str]
    """Special tokens, by the field of the config that has their ids."""
    tokens: Callable[[TinySizes], list[str]] = lambda model: []
    """Further special tokens that the processor writes."""
    named_tokens: Mapping[str, str] | None = None
    """Special tokens, by the attribute of the tokenizer that the processor reads."""
    words: tuple[str, ...] = ()
    """Further tokens of several characters."""
    text: Settings = _nothing
    """The config of the text model, in addition to its sizes."""
    text_type: str | None = None
    """The `model_type` of the text model; None if the family has its own."""
    config: Settings = _nothing
    """Further fields of the config."""
    processor: Settings = _nothing
    """Further fields of processor_config.json."""


def _image_processor(kind: str, **settings: Any) -> dict[str, Any]:
    normalization = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    return {"image_processor_type": kind, **normalization, **settings}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _siglip(model: TinySizes, patch: int) -> dict[str, Any]:
    return {
        "hidden_size": model.vision_hidden,
        "num_hidden_layers": model.vision_layers,
        "num_attention_heads": model.vision_heads,
        "intermediate_size": model.vision_ffn,
        "image_size": model.image_size,
        "patch_size": patch,
    }


def _qwen_processor(model: TinySizes) -> dict[str, Any]:
    return _image_processor(
        "Qwen2VLImageProcessor",
        size={
            "shortest_edge": (model.patch * model.merge) ** 2,
            "longest_edge": (model.image_size * model.tiles) ** 2,
        },
        patch_size=model.patch,
        merge_size=model.merge,
        temporal_patch_size=2,
    )


def _mrope(model: TinySizes, side: int, **settings: Any) -> dict[str, Any]:
    half = model.hidden // model.heads // 2
    sections = [half - 2 * side, side, side]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, **settings}}


def _qwen_text(model: TinySizes) -> dict[str, Any]:
    return _mrope(model, 3 * (model.hidden // model.heads // 2) // 8)


def _qwen3_text(model: TinySizes) -> dict[str, Any]:
    size = model.hidden // model.heads
    return {"head_dim": size, **_mrope(model, 5 * (size // 2) // 16, mrope_interleaved=True)}


def _qwen2_vision(model: TinySizes) -> dict[str, Any]:
    return {
        "depth": model.vision_layers,
        "embed_dim": model.vision_hidden,
        "hidden_size": model.hidden,
        "num_heads": model.vision_heads,
        "mlp_ratio": model.vision_ffn // model.vision_hidden,
        "patch_size": model.patch,
        "spatial_merge_size": model.merge,
    }


def _qwen_vision(model: TinySizes) -> dict[str, Any]:
    return {
        "depth": model.vision_layers,
        "hidden_size": model.vision_hidden,
        "out_hidden_size": model.hidden,
        "num_heads": model.vision_heads,
        "intermediate_size": model.vision_ffn,
        "patch_size": model.patch,
        "spatial_merge_size": model.merge,
    }


def _qwen2_5_vision(model: TinySizes) -> dict[str, Any]:
    """Windows of two by two tokens in all layers but the last."""
    window = 2 * model.patch * model.merge
    return {**_qwen_vision(model), "window_size": window, "fullatt_block_indexes": [model.vision_layers - 1]}


def _qwen3_vision(model: TinySizes) -> dict[str, Any]:
    positions = (model.image_size // model.patch) ** 2
    return {**_qwen_vision(model), "num_position_embeddings": positions, "deepstack_visual_indexes": [0]}


_QWEN_TOKEN_IDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


def _qwen(vision: Settings, text: Settings, processor_class: str) -> VisionFamily:
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    return VisionFamily(vision, processor_class, _qwen_processor, placeholder, _QWEN_TOKEN_IDS, text=text)


def _idefics(name: str) -> VisionFamily:
    def image_processor(model: TinySizes) -> dict[str, Any]:
        return _image_processor(
            f"{name}ImageProcessor",
            size={"longest_edge": model.image_size * model.tiles},
            max_image_size={"longest_edge": model.image_size},
            do_image_splitting=model.tiles > 1,
        )

    def tokens(model: TinySizes) -> list[str]:
        sides = range(1, model.tiles + 1) if model.tiles > 1 else range(0)
        tiles = [f"<row_{row}_col_{column}>" for row in sides for column in sides]
        return ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *tiles]

    return VisionFamily(
        lambda model: _siglip(model, model.patch),
        f"{name}Processor",
        image_processor,
        "<image>",
        {"image_token_id": "<image>"},
        tokens,
        text_type="llama",
        config=lambda model: {"scale_factor": model.merge},
        processor=lambda model: {"image_seq_len": model.features_per_tile},
    )


def _gemma_text(model: TinySizes) -> dict[str, Any]:
    size = model.hidden // model.heads
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(model.layers)]
    return {
        "head_dim": size,
        "query_pre_attn_scalar": size,
        "sliding_window": model.sliding_window,
        "layer_types": kinds,
    }


_GEMMA = VisionFamily(
    lambda model: {**_siglip(model, model.patch), "vision_use_head": False},
    "Gemma3Processor",
    lambda model: _image_processor("Gemma3ImageProcessor", size=_square(model.image_size)),
    "<start_of_image>",
    {
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    named_tokens={
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    words=("\n", "\n\n", "\n\n\n", "\n\n\n\n"),  # vLLM looks them up
    text=_gemma_text,
    config=lambda model: {"mm_tokens_per_image": model.features_per_tile},
    processor=lambda model: {"image_seq_length": model.features_per_tile},
)


_INTERNVL = VisionFamily(
    lambda model: _siglip(model, model.patch),
    "InternVLProcessor",
    lambda model: _image_processor(
        "GotOcr2ImageProcessor",
        size=_square(model.image_size),
        crop_to_patches=True,
        min_patches=1,
        max_patches=model.tiles**2,
    ),
    "<IMG_CONTEXT>",
    {"image_token_id": "<IMG_CONTEXT>"},
    named_tokens={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    text_type="qwen2",
    config=lambda model: {"downsample_ratio": 1 / model.merge, "image_seq_length": model.features_per_tile},
    processor=lambda model: {"image_seq_length": model.features_per_tile},
)


def _grid_sizes(model: TinySizes) -> list[list[int]]:
    sides = [model.image_size * count for count in range(1, model.tiles + 1)]
    return [[height, width] for height in sides for width in sides]


_LLAVA = VisionFamily(
    lambda model: {**_siglip(model, model.patch * model.merge), "vision_use_head": False},
    "LlavaOnevisionProcessor",
    lambda model: _image_processor(
        "LlavaOnevisionImageProcessor", size=_square(model.image_size), image_grid_pinpoints=_grid_sizes(model)
    ),
    "<image>",
    {"image_token_index": "<image>", "video_token_index": "<video>"},
    text_type="qwen2",
    config=lambda model: {"image_grid_pinpoints": _grid_sizes(model)},
    processor=lambda model: {
        "num_image_tokens": model.features_per_tile,
        "vision_feature_select_strategy": "full",
    },
)

VISION_FAMILIES: Mapping[TinyVisionFamily, VisionFamily] = {
    "qwen2_vl": _qwen(_qwen2_vision, _qwen_text, "Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen(_qwen2_5_vision, _qwen_text, "Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen(_qwen3_vision, _qwen3_text, "Qwen3VLProcessor"),
    "smolvlm": _idefics("SmolVLM"),
    "idefics3": _idefics("Idefics3"),
    "gemma3": _GEMMA,
    "internvl": _INTERNVL,
    "llava_onevision": _LLAVA,
}
