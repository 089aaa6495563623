"""Frozen weights in 4 bits (QLoRA, Dettmers et al. 2023) or 8 (LLM.int8(), Dettmers et al. 2022), by bitsandbytes."""

import importlib.util
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from lockstep.config.model import Model, Quantization
from lockstep.models.errors import ModelError

_FIELD = "model.quantization.kind"
_CAPABILITY = {"nf4": (6, 0), "int8": (7, 5)}
"""Of a GPU, at least, as bitsandbytes documents it."""


def check_quantization(cfg: Model, device: str) -> None:
    """Raises ModelError where the quantization that is asked for cannot run on a device (`cpu`, `cuda`)."""
    if cfg.quantization is None:
        return
    kind = cfg.quantization.kind
    without = "leave model.quantization out"
    if importlib.util.find_spec("bitsandbytes") is None:
        remedy = f"install it (pip install bitsandbytes), or {without}"
        raise ModelError(_FIELD, kind, "bitsandbytes is not installed", remedy)
    if torch.device(device).type != "cuda":
        raise ModelError(_FIELD, kind, f"it is made for GPUs here, the trainer is on {device}", without)
    if not torch.cuda.is_available():  # this host only starts the run, whose GPUs are elsewhere
        return
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY[kind]:
        least = ".".join(map(str, _CAPABILITY[kind]))
        raise ModelError(_FIELD, kind, f"the GPU has compute capability {found[0]}.{found[1]}, not {least}", without)


def quantization_config(cfg: Quantization, compute: torch.dtype) -> BitsAndBytesConfig:
    """As transformers wants it."""
    if cfg.kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_use_double_quant=cfg.double_quant,
    )


def plain_shape(module: nn.Module, parameter: Tensor) -> tuple[int, ...]:
    """Of a linear layer's weight, also where it is packed."""
    if isinstance(module, nn.Linear) and parameter is module.weight:
        return module.out_features, module.in_features
    return tuple(parameter.shape)


def plain_weight(module: Any) -> Tensor:
    """A layer's weight in a floating-point type: what its quantized bits stand for."""
    weight: Tensor = dequantize_module_weight(module)
    return weight.detach()
