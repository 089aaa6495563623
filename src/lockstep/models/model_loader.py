"""Loads models and tokenizers from a folder or a hub name, plain or quantized to 4 bits (QLoRA, Dettmers et al. 2023)
or 8 bits (LLM.int8(), Dettmers et al. 2022) by bitsandbytes.
"""

import importlib.util
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from lockstep.base.text import count_noun, first_line
from lockstep.config.model import DType, ModelConfig, QuantizationConfig
from lockstep.models import forest_attention
from lockstep.models.errors import ModelError
from lockstep.models.folder_digests import check_digests
from lockstep.models.hf_checkpoint import fill_head, resolve_folder
from lockstep.models.huggingface import quiet_transformers
from lockstep.models.policy_model import PolicyModel, supports_forest_attention
from lockstep.models.score_model import HEAD_WEIGHT, ScoreModel
from lockstep.models.vision.model_parts import freeze_parts
from lockstep.models.vision.vision_policy import VisionPolicyModel, is_vision_config

_QUANTIZATION_FIELD = "model.quantization.kind"
_MIN_CAPABILITY = {"nf4": (6, 0), "int8": (7, 5)}
"""Minimum compute capability of a GPU, as bitsandbytes documents it."""


def check_quantization(cfg: ModelConfig, device: str) -> None:
    """Raises ModelError if the configured quantization cannot run on a device (`cpu`, `cuda`)."""
    if cfg.quantization is None:
        return
    kind = cfg.quantization.kind
    without = "leave model.quantization out"
    if importlib.util.find_spec("bitsandbytes") is None:
        remedy = f"install it (pip install bitsandbytes), or {without}"
        raise ModelError(_QUANTIZATION_FIELD, kind, "bitsandbytes is not installed", remedy)
    if torch.device(device).type != "cuda":
        raise ModelError(
            _QUANTIZATION_FIELD, kind, f"it is supported on GPUs only, and the trainer is on {device}", without
        )
    if not torch.cuda.is_available():  # this host only starts the run; the GPUs are on other hosts
        return
    found = torch.cuda.get_device_capability(device)
    if found < _MIN_CAPABILITY[kind]:
        least = ".".join(map(str, _MIN_CAPABILITY[kind]))
        raise ModelError(
            _QUANTIZATION_FIELD,
            kind,
            f"the GPU has compute capability {found[0]}.{found[1]}, and {least} is needed",
            without,
        )


def quantization_config(cfg: QuantizationConfig, compute: torch.dtype) -> BitsAndBytesConfig:
    """Returns the config of the quantization for transformers."""
    if cfg.kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_use_double_quant=cfg.double_quant,
    )


def dequantized_shape(module: nn.Module, parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of a parameter without quantization."""
    if isinstance(module, nn.Linear) and parameter is module.weight:
        return module.out_features, module.in_features
    return tuple(parameter.shape)


def dequantized_weight(module: Any) -> Tensor:
    """Returns a layer's weight in a floating-point type."""
    weight: Tensor = dequantize_module_weight(module)
    return weight.detach()


log = logging.getLogger(__name__)

_AUTO_CLASSES: Mapping[str, Any] = {"vocabulary": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}
"""The class of transformers for each `model.head`."""
_WRAPPERS: Mapping[str, Callable[[Any], PolicyModel]] = {"vocabulary": PolicyModel, "score": ScoreModel}
_VISION = (AutoModelForImageTextToText, VisionPolicyModel)
"""The class of transformers for vision-language models, and the wrapper."""
_FILLED_LATER: Mapping[str, set[str]] = {"vocabulary": set(), "score": {HEAD_WEIGHT}}
"""Weights that are read or made after transformers has loaded the others."""
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError)
"""What transformers raises about files that are missing, damaged, or hold values of other types."""
_CONTEXT_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "context_length")


def load_tokenizer(cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, with the configured chat template.

    Raises:
        ModelError: there is no tokenizer, it has no end-of-sequence token, or the template file cannot be read.
    """
    name = cfg.tokenizer or cfg.path
    field = "model.tokenizer" if cfg.tokenizer else "model.path"
    folder = resolve_folder(name, None if cfg.tokenizer else cfg.revision, field=field, weights=False)
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=cfg.trust_remote_code
            )
    except UNREADABLE as error:
        problem = f"its tokenizer cannot be loaded ({first_line(error)})"
        raise ModelError(field, name, problem, "set model.tokenizer to a folder that has one") from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # transformers creates an empty tokenizer of the model's type if the folder has no tokenizer files.
        raise ModelError(field, name, "it has no tokenizer", "set model.tokenizer to a folder that has one")
    if tokenizer.eos_token_id is None:
        remedy = "set `eos_token` in its tokenizer_config.json"
        raise ModelError(field, name, "its tokenizer has no end-of-sequence token", remedy)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if cfg.chat_template is not None:
        try:
            tokenizer.chat_template = Path(cfg.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError("model.chat_template", cfg.chat_template, str(error), "give a Jinja file") from error
    return tokenizer


def load_model_config(cfg: ModelConfig) -> Any:
    """Loads the model's transformers config.

    Raises:
        ModelError: there is no config, or its architecture is unknown.
    """
    folder = resolve_folder(cfg.path, cfg.revision, weights=False)
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
    except (*UNREADABLE, StrictDataclassError) as error:
        problem = f"its config cannot be loaded ({first_line(error)})"
        raise ModelError("model.path", cfg.path, problem, "give the folder of a causal language model") from error


def load_policy(
    cfg: ModelConfig, device: torch.device | str, meta: bool = False, dtype: torch.dtype | None = None
) -> PolicyModel:
    """Loads the model as a `PolicyModel`, in evaluation mode. Parts that `model.vision` does not train are frozen.

    Args:
        device: the device of parameters and buffers.
        meta: whether to leave the parameters, but not the buffers, on the meta device. They are then sharded and filled
            by `lockstep.models.hf_checkpoint.fill_policy`.
        dtype: precision of the parameters, such as float32 for master weights; None: the configured compute precision.

    Raises:
        ModelError: the checkpoint lacks weights, the architecture is not supported, or all parts of it are frozen.
    """
    dtype = dtype or resolve_dtype(cfg.dtype, device)
    config = _load_supported_config(cfg)
    lm = _build_on_meta(cfg, config, dtype) if meta else _load_from_checkpoint(cfg, config, dtype)
    if not meta:
        lm.to(device)
    try:
        policy = _wrapper(cfg, config)(lm)
    except ModelError as error:
        raise ModelError("model.path", cfg.path, f"{type(lm).__name__}: {error.problem}", error.remedy) from error
    if isinstance(policy, ScoreModel) and not meta:
        fill_head(policy, resolve_folder(cfg.path, cfg.revision), seed=None)
    freeze_parts(policy, cfg.vision)
    policy.eval()
    return policy


def load_quantized_policy(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> PolicyModel:
    """Loads the model as a `PolicyModel` with quantized linear layers, except the output layer.

    Raises:
        ModelError: as for `load_policy`, or the quantization cannot run here.
    """
    assert cfg.quantization is not None
    check_quantization(cfg, str(device))
    config = _load_supported_config(cfg)
    settings = quantization_config(cfg.quantization, dtype)
    policy = _wrapper(cfg, config)(
        _load_from_checkpoint(cfg, config, dtype, quantization_config=settings, device_map={"": device})
    )
    freeze_parts(policy, cfg.vision)
    policy.eval()
    return policy


def resolve_dtype(dtype: DType, device: torch.device | str) -> torch.dtype:
    """Returns the compute precision: "auto" is float32 on CPUs and bfloat16 on other devices."""
    if dtype == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


def context_length(hf_config: Any) -> int:
    """Returns the longest sequence of the model, in tokens.

    Raises:
        ModelError: the config has no such value.
    """
    text = hf_config.get_text_config()
    for name in _CONTEXT_LENGTH_KEYS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(
        "model.max_length",
        None,
        f"the config of {hf_config.model_type} has no longest sequence",
        "set it to the number of tokens of prompt and completion",
    )


def usable_context(cfg: ModelConfig, hf_config: Any) -> int:
    """The smaller of the user's limit and the model's limit, which a state-space model may lack.

    Raises:
        ModelError: there is neither limit.
    """
    if cfg.max_length is None:
        return context_length(hf_config)
    try:
        return min(cfg.max_length, context_length(hf_config))
    except ModelError:
        return cfg.max_length


def _load_supported_config(cfg: ModelConfig) -> Any:
    config = load_model_config(cfg)
    if getattr(config, "is_encoder_decoder", False):
        problem = f"{config.model_type} is an encoder-decoder model"
        raise ModelError("model.path", cfg.path, problem, "use a causal language model: a decoder alone")
    if type(config) in AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", False):
        problem = f"{config.model_type} attends in both directions"
        raise ModelError("model.path", cfg.path, problem, "use a causal language model, such as a Llama or a Qwen")
    if cfg.head == "score":
        config.num_labels = 1  # the head itself is checked: many checkpoints have one label, and two in their config
    return config


def _auto_class(cfg: ModelConfig, config: Any) -> Any:
    return _VISION[0] if cfg.head == "vocabulary" and is_vision_config(config) else _AUTO_CLASSES[cfg.head]


def _wrapper(cfg: ModelConfig, config: Any) -> Callable[[Any], PolicyModel]:
    return _VISION[1] if cfg.head == "vocabulary" and is_vision_config(config) else _WRAPPERS[cfg.head]


def _load_from_checkpoint(cfg: ModelConfig, config: Any, dtype: torch.dtype, **settings: Any) -> Any:
    folder = resolve_folder(cfg.path, cfg.revision)
    check_digests(folder)
    with quiet_transformers():
        lm, report = _auto_class(cfg, config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=_attention_implementation(cfg, config),
            trust_remote_code=cfg.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the report lists them by name
            **settings,
        )
    missing = sorted(set(report["missing_keys"]) - _FILLED_LATER[cfg.head])
    if missing or report["mismatched_keys"]:
        wrong = [*missing, *(str(key) for key in report["mismatched_keys"])]
        raise ModelError(
            "model.path",
            cfg.path,
            f"{count_noun(len(wrong), 'weight')} missing or of another shape: {', '.join(wrong[:3])}",
            "give a complete causal language model checkpoint",
        )
    if report["unexpected_keys"]:
        log.warning("%s: %d weights of the checkpoint are not used", cfg.path, len(report["unexpected_keys"]))
    return lm


def _build_on_meta(cfg: ModelConfig, config: Any, dtype: torch.dtype) -> Any:
    # Only parameters are on meta: checkpoints lack buffers such as rotary frequencies, so these must be computed.
    with quiet_transformers(), no_init_weights(), init_empty_weights(include_buffers=False):
        lm = _auto_class(cfg, config).from_config(
            config,
            dtype=dtype,
            attn_implementation=_attention_implementation(cfg, config),
            trust_remote_code=cfg.trust_remote_code,
        )
    lm.tie_weights()
    return lm


def _attention_implementation(cfg: ModelConfig, config: Any) -> str | None:
    """Returns the name of the forest attention if the architecture supports it, else None (the model's default)."""
    mapping = _auto_class(cfg, config)._model_mapping
    if type(config) not in mapping:
        if cfg.trust_remote_code:
            return None
        problem, remedy = f"{config.model_type} is not a causal language model", "use a causal language model"
        if cfg.head == "score" and type(config) in AutoModelForCausalLM._model_mapping:
            problem = f"transformers has no {config.model_type} model with a head for scores"
            remedy = "use another model, such as a Llama or a Qwen"
        elif cfg.head == "score" and is_vision_config(config):
            problem = "it is a vision-language model, of which transformers has none with a head for scores"
            remedy = "use a language model here; critics and reward models read no images"
        raise ModelError("model.path", cfg.path, problem, remedy)
    lm_class = mapping[type(config)]
    return forest_attention.FOREST_ATTENTION if supports_forest_attention(lm_class) else None
