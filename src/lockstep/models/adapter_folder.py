"""Reads the settings of an existing adapter in peft's format, and checks whether it matches a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lockstep.base.json_text import read_json
from lockstep.config.model import AdapterConfig
from lockstep.models.errors import ModelError
from lockstep.models.folder_digests import check_digests
from lockstep.models.hf_checkpoint import SafetensorsCheckpoint, resolve_folder

ADAPTER_FIELD = "model.adapter.path"
_ADAPTER_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_IGNORED_SETTINGS = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode"),
    *("init_lora_weights", "layers_pattern", "layers_to_transform", "exclude_modules", "loftq_config", "lora_alpha"),
    *("lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_type", "r"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "use_dora"),
    "use_rslora",
}
"""Keys of peft's `LoraConfig` that are read here, or that have no effect on a trained adapter."""
_BASE_CHANGING_INITS = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that change the weights of the base model."""


def resolve_adapter(cfg: AdapterConfig) -> AdapterConfig:
    """Adds the settings of the adapter in `cfg.path` to the config.

    Raises:
        ModelError: there is no such adapter, its kind is not supported, or it contradicts a setting in the config.
    """
    if cfg.path is None:
        return cfg
    with _adapter_checkpoint(cfg.path) as stored:
        found = _read_settings(cfg.path, stored)
    given = {name: getattr(cfg, name) for name in cfg.model_fields_set}
    for name, value in found.items():
        if name == "lora_dropout" or name not in given or _same_setting(given[name], value):
            continue
        problem = f"the adapter in {cfg.path} has {_as_list(value)!r}"
        raise ModelError(f"model.adapter.{name}", _as_list(given[name]), problem, "leave it out")
    return AdapterConfig.model_validate(found | given)


@contextmanager
def open_adapter(
    shapes: dict[str, tuple[int, ...]], aliases: dict[str, list[str]], path: str
) -> Iterator[SafetensorsCheckpoint]:
    """Opens the weights of a stored adapter, if it matches the model.

    Args:
        shapes: shape of each adapter parameter of the model, by its name in peft's files.
        aliases: all names in peft's files of each weight that the model ties.

    Raises:
        ModelError: the adapter has other parameters or shapes, or different values for tied weights.
    """
    with _adapter_checkpoint(path) as stored:
        _check_names(shapes, aliases, path, stored)
        for name, shape in shapes.items():
            if stored.shape(name) != shape:
                what = f"{_short_name([name])} has shape {stored.shape(name)}, in the model {shape}"
                raise ModelError(ADAPTER_FIELD, path, f"it does not match the model: {what}", _REMEDY)
            for alias in aliases.get(name, [name])[1:]:
                if alias not in stored or not torch.equal(stored.read(name), stored.read(alias)):
                    what = f"{_short_name([alias])} and {_short_name([name])}, which the model ties"
                    raise ModelError(
                        ADAPTER_FIELD, path, f"it has different values of {what}", "untie them in the model first"
                    )
        yield stored


def _check_names(
    shapes: dict[str, tuple[int, ...]], aliases: dict[str, list[str]], path: str, stored: SafetensorsCheckpoint
) -> None:
    known = {alias for name in shapes for alias in aliases.get(name, [name])}
    missing = [name for name in shapes if name not in stored]
    unexpected = [name for name in stored.names if name not in known]
    parts = [f"has no {_short_name(missing)}"] if missing else []
    parts += [f"has {_short_name(unexpected)}, which the model lacks"] if unexpected else []
    if parts:
        raise ModelError(ADAPTER_FIELD, path, f"it does not match the model: it {' and '.join(parts)}", _REMEDY)


_REMEDY = "set model.path to the model it was trained on, and leave out target_modules and modules_to_save"


def _adapter_checkpoint(path: str) -> SafetensorsCheckpoint:
    folder = resolve_folder(path, field=ADAPTER_FIELD)
    check_digests(folder, ADAPTER_FIELD)
    return SafetensorsCheckpoint(folder, _ADAPTER_FILE, ADAPTER_FIELD)


def _read_settings(path: str, stored: SafetensorsCheckpoint) -> dict[str, Any]:
    """Reads the settings in an adapter's folder, by the names of `AdapterConfig`."""
    content = _read_config(path, stored.folder)
    others = {name: value for name, value in content.items() if name not in _IGNORED_SETTINGS and value}
    if others.pop("bias", "none") != "none" or others:
        named = ", ".join(f"{name} {value!r}" for name, value in others.items()) or f"bias {content['bias']!r}"
        raise ModelError(ADAPTER_FIELD, path, f"its adapter_config.json has {named}", "this is not supported")
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_BASE_CHANGING_INITS):
        problem = f"it was initialised by {start}, so its base weights were changed"
        raise ModelError(
            ADAPTER_FIELD, path, problem, "convert it with peft's path_initial_model_for_weight_conversion"
        )
    adapted: set[str] = set()
    saved: set[str] = set()
    for name in stored.names:
        module, is_adapter_weight, _ = name.removeprefix(_PEFT_PREFIX).partition(".lora_")
        (adapted if is_adapter_weight else saved).add(module if is_adapter_weight else module.rpartition(".")[0])
    targets, restricted = content.get("target_modules"), content.get("layers_to_transform") is not None
    restricted = restricted or bool(content.get("exclude_modules"))
    return {
        "kind": "dora" if content.get("use_dora") else "lora",
        "r": content.get("r", 8),
        "lora_alpha": float(content.get("lora_alpha", 8)),
        "lora_dropout": content.get("lora_dropout", 0.0),
        "target_modules": _module_names(None if restricted else targets, adapted),
        "modules_to_save": _module_names(content.get("modules_to_save"), saved),
        "use_rslora": bool(content.get("use_rslora")),
    }


def _read_config(path: str, folder: Path) -> dict[str, Any]:
    try:
        content = read_json(folder / "adapter_config.json")
    except (OSError, ValueError) as error:
        raise ModelError(
            ADAPTER_FIELD, path, f"its adapter_config.json cannot be read ({error})", "give peft's folder"
        ) from error
    kind = content.get("peft_type") if isinstance(content, dict) else None
    if kind != "LORA":
        raise ModelError(
            ADAPTER_FIELD, path, f"its adapter_config.json has peft_type {kind!r}", "only LORA is supported"
        )
    return dict(content)


def _module_names(written: Any, modules: set[str]) -> tuple[str, ...]:
    """Returns the module names in the config if they match the names of the weights by their ends. Otherwise returns
    the names of the weights, because peft's config may contain patterns."""
    names = sorted(written) if isinstance(written, list) else []
    ends = tuple(f".{name}" for name in names)
    if all(f".{module}".endswith(ends) for module in modules):
        return tuple(name for name in names if any(f".{module}".endswith(f".{name}") for module in modules))
    return tuple(sorted(modules))


def _same_setting(given: Any, found: Any) -> bool:
    if isinstance(given, tuple) and isinstance(found, tuple):
        return set(given) == set(found)
    return bool(given == found) or given == "all-linear"  # the layers are checked against the model later


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short_name(names: list[str]) -> str:
    return names[0].removeprefix(_PEFT_PREFIX) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
