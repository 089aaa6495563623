"""Low-rank adapters through peft: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024).

peft's layers replace the linear layers that they adapt. The model's own weights keep their checkpoint
names (`hf_name` leaves `base_layer` out), the adapter's have those of peft's files.
"""

import difflib
import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from lockstep.config.model import AdapterConfig
from lockstep.models.adapter_folder import open_adapter
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import (
    ParameterSlots,
    SafetensorsCheckpoint,
    is_adapter_parameter,
    named_weights,
    tied_names,
)
from lockstep.models.model_loader import dequantized_weight
from lockstep.models.policy_model import PolicyModel, hf_name

ADAPTER_NAME = "default"
"""peft's name of a model's only adapter."""
_TARGETS_FIELD = "model.adapter.target_modules"
_MODULES_TO_SAVE_FIELD = "model.adapter.modules_to_save"


def add_adapter(policy: PolicyModel, cfg: AdapterConfig) -> None:
    """Puts peft's layers into a policy, on the meta device, and freezes everything else but `modules_to_save`. What
    is trained is float32.

    Raises:
        ModelError: a target that the model does not have, or that cannot have an adapter; a module to save that it
            does not have, or that has an adapter in it.
    """
    modules = dict(_base_modules(policy))
    saved = {id(parameter) for name in find_modules_to_save(policy, cfg) for parameter in modules[name].parameters()}
    settings = peft_config(policy, cfg)
    settings.modules_to_save = None  # peft would copy them: here they are trained where they are
    with warnings.catch_warnings():
        # It would advise on settings that are made here, not by the user.
        warnings.simplefilter("ignore")
        inject_adapter_in_model(settings, policy.lm, ADAPTER_NAME, low_cpu_mem_usage=True)
    for name, parameter in policy.named_parameters():
        trained = is_adapter_parameter(name) or id(parameter) in saved
        parameter.requires_grad_(trained)
        if trained:
            parameter.data = parameter.data.float()
    policy.eval()


def find_targets(policy: PolicyModel, cfg: AdapterConfig) -> list[str]:
    """The full names of the layers to adapt, in the model's order. Raises ModelError."""
    modules = dict(_base_modules(policy))
    possible = [
        name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and module is not policy.head
    ]
    if cfg.target_modules == "all-linear":
        saved = set(find_modules_to_save(policy, cfg))
        found = {name for name in possible if not _is_within(name, saved)}
    else:
        found = {name for target in cfg.target_modules for name in _matching_targets(policy, target, modules, possible)}
    transposed = next((name for name in sorted(found) if isinstance(modules[name], Conv1D)), None)
    if cfg.kind == "dora" and transposed is not None:
        problem = f"{transposed} is a transposed layer (Conv1D), which DoRA is not made for here"
        raise ModelError("model.adapter.kind", cfg.kind, problem, "set model.adapter.kind=lora")
    return [name for name in possible if name in found]


def find_modules_to_save(policy: PolicyModel, cfg: AdapterConfig) -> list[str]:
    """The full names of the modules that are trained whole, in the model's order, with those that share a tied weight
    with them. Raises ModelError."""
    modules = dict(_base_modules(policy))
    found = {name for target in cfg.modules_to_save for name in _modules_with_weights(target, modules)}
    trained = {id(parameter) for name in found for parameter in modules[name].parameters()}
    for name, module in modules.items():
        mine = [id(parameter) for parameter in module.parameters(recurse=False)]
        if mine and trained.issuperset(mine) and not _is_within(name, found):
            found.add(name)  # tied
    targets = () if cfg.target_modules == "all-linear" else cfg.target_modules
    for name in modules:
        target = next((end for end in targets if _name_matches(name, end)), None)
        if target is not None and _is_within(name, found):
            raise ModelError(
                _MODULES_TO_SAVE_FIELD,
                name,
                f"it is adapted as well ({_TARGETS_FIELD} {target})",
                "name it in one of the two",
            )
    return [name for name in modules if name in found]


def peft_config(policy: PolicyModel, cfg: AdapterConfig) -> LoraConfig:
    """The content of `adapter_config.json`, without the base model's name. Raises ModelError as `find_targets`."""
    modules = dict(_base_modules(policy))
    targets = find_targets(policy, cfg)
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=cfg.r,
        lora_alpha=cfg.lora_alpha,
        lora_dropout=cfg.lora_dropout,
        target_modules=_short_targets(targets, list(modules))
        if cfg.target_modules == "all-linear"
        else [*cfg.target_modules],
        use_rslora=cfg.use_rslora,
        use_dora=cfg.kind == "dora",
        init_lora_weights=cfg.init_lora_weights,
        modules_to_save=_names_for_peft(find_modules_to_save(policy, cfg), list(modules)) or None,
        fan_in_fan_out=any(isinstance(modules[name], Conv1D) for name in targets),
        bias="none",
    )


def named_adapter(policy: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in peft's files, parameter) of each of the adapter's parameters; nothing without an adapter."""
    for name, parameter in policy.named_parameters():
        if is_adapter_parameter(name):
            yield peft_name(hf_name(name)), parameter


def named_saved_weights(policy: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in peft's files, parameter) of each weight of the model that is trained whole beside an adapter, tied ones
    once; nothing without an adapter."""
    if any(isinstance(module, LoraLayer) for module in policy.modules()):
        for name, parameter in named_weights(policy):
            if parameter.requires_grad:
                yield peft_name(name), parameter


def starts_from_other_weights(policy: PolicyModel, cfg: AdapterConfig) -> bool:
    """Whether the policy without its adapter is another than the one that a run begins with."""
    return cfg.path is not None or any(True for _ in named_saved_weights(policy))


def saved_names(policy: PolicyModel) -> dict[str, list[str]]:
    """All names in peft's files of each weight of `named_saved_weights`, by the first: peft's model ties none."""
    aliases = {peft_name(name): [peft_name(other) for other in others] for name, others in tied_names(policy).items()}
    return {name: aliases[name] for name, _ in named_saved_weights(policy)}


def peft_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.lora_A.default.weight` as it is called in `adapter_model.safetensors`."""
    name = name.replace(f".{ADAPTER_NAME}.", ".")
    return "base_model.model." + name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def fill_adapter(policy: PolicyModel, cfg: AdapterConfig, seed: int, device: torch.device | str) -> None:
    """Initialises an adapter whose base is filled: from the configured adapter, or with a random A, the same whatever
    the number of ranks; B with zeros; DoRA's magnitude with the norms of the base's rows (section 4.1 of the paper).

    Raises:
        ModelError: the adapter that it begins from does not fit the model.
    """
    places = ParameterSlots(policy, torch.device(device))
    if cfg.path is not None:
        with _open_stored_adapter(policy, cfg.path) as stored:
            for name, parameter in [*named_adapter(policy), *named_saved_weights(policy)]:
                places.fill(parameter, partial(stored.part, name))
        return
    names = {id(parameter): name for name, parameter in named_adapter(policy)}
    for layer in adapted_layers(policy).values():
        down, up = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        start = _initial_lora_a(down, cfg, seed, names[id(down)])
        places.fill(down, lambda first, last, start=start: start[first:last])  # type: ignore[misc]
        places.fill(up, lambda first, last, like=up: torch.zeros(last - first, *like.shape[1:]))  # type: ignore[misc]
        if ADAPTER_NAME in layer.lora_magnitude_vector:
            norms = torch.linalg.norm(_base_rows(layer.get_base_layer()), dim=1)
            places.fill(layer.lora_magnitude_vector[ADAPTER_NAME].weight, lambda *_, norms=norms: norms)


def check_adapter(policy: PolicyModel, cfg: AdapterConfig) -> None:
    """Raises ModelError where the configured initial adapter does not fit the policy, which has its layers already."""
    if cfg.path is not None:
        with _open_stored_adapter(policy, cfg.path):
            pass


def adapted_layers(policy: PolicyModel) -> dict[str, Any]:
    """The adapted layers, by the checkpoint name of their weight."""
    return {
        hf_name(f"{path}.weight"): module for path, module in policy.named_modules() if isinstance(module, LoraLayer)
    }


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """An adapter's part of one layer, whole, float32."""

    down: Tensor
    """A, `[r, in]`."""
    up: Tensor
    """B, `[out, r]`."""
    scaling: float
    magnitude: Tensor | None = None
    """DoRA's, `[out]`."""
    transposed: bool = False
    """Whether the layer keeps its weight as `[in, out]`."""

    def merged(self, rows: Tensor, first: int) -> Tensor:
        """Rows of the layer's weight, from the `first` on, with the adapter in them: `W + s B A`, for DoRA
        `m (W + s B A) / ||W + s B A||` with the norm of each output (Liu et al. 2024, eq. 5). float32."""
        one, other = (self.down.T, self.up.T) if self.transposed else (self.up, self.down)
        last = first + rows.shape[0]
        total = torch.addmm(rows.float(), one[first:last], other, alpha=self.scaling)
        if self.magnitude is not None:
            total *= (self.magnitude[first:last] / torch.linalg.norm(total, dim=1))[:, None]
        return total


@contextmanager
def without_adapter(policy: PolicyModel) -> Iterator[None]:
    """The model as it was before its adapter. peft's own switch also changes what requires gradients, which FSDP2
    must not see."""
    layers = [module for module in policy.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def with_dropout(policy: PolicyModel) -> Iterator[None]:
    """The adapter's dropout, and no other, is on."""
    layers = [module for module in policy.modules() if isinstance(module, LoraLayer)]
    dropouts = [dropout for layer in layers for dropout in layer.lora_dropout.values()]
    for dropout in dropouts:
        dropout.train()
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.eval()


def derived_seed(*parts: int | str) -> int:
    """A seed of its own for each of what is drawn."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7])


def _open_stored_adapter(policy: PolicyModel, path: str) -> AbstractContextManager[SafetensorsCheckpoint]:
    shapes = {
        name: tuple(parameter.shape) for name, parameter in [*named_adapter(policy), *named_saved_weights(policy)]
    }
    return open_adapter(shapes, saved_names(policy), path)


def _initial_lora_a(down: nn.Parameter, cfg: AdapterConfig, seed: int, name: str) -> Tensor:
    """The whole of A as peft draws it, float32 `[r, in]`."""
    generator = torch.Generator().manual_seed(derived_seed(seed, name))
    whole = torch.empty(tuple(down.shape))
    if cfg.init_lora_weights == "gaussian":
        return nn.init.normal_(whole, std=1 / cfg.r, generator=generator)
    return nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)


def _base_rows(base: Any) -> Tensor:
    """This rank's rows of a layer's weight."""
    data = base.weight.detach()
    return data.to_local() if isinstance(data, DTensor) else dequantized_weight(base)


def _base_modules(policy: PolicyModel) -> Iterator[tuple[str, nn.Module]]:
    """The model's own modules, also those that an adapter has replaced."""
    inside: tuple[str, ...] = ()
    for name, module in policy.lm.named_modules():
        if isinstance(module, LoraLayer):
            inside += (f"{name}.",)
            yield name, module.get_base_layer()
        elif name and not name.startswith(inside):
            yield name, module


def _short_targets(targets: list[str], names: list[str]) -> list[str]:
    """The ends of the targets' names where they name nothing else, as vLLM and others expect them."""
    ends = list(dict.fromkeys(target.rpartition(".")[2] for target in targets))
    named = [name for name in names if name.rpartition(".")[2] in ends]
    return ends if sorted(named) == sorted(targets) else targets


def _name_matches(name: str, end: str) -> bool:
    """Whether a module has this name, or this end of one."""
    return name == end or name.endswith(f".{end}")


def _leaf_names(names: Iterable[str]) -> list[str]:
    """`q_proj` of `model.layers.0.self_attn.q_proj`, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _did_you_mean(name: str, ends: list[str]) -> str:
    """A question with the nearest of `ends`; empty where none is near."""
    nearest = difflib.get_close_matches(name.rpartition(".")[2], ends, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(nearest)}?" if nearest else ""


def _is_within(name: str, modules: set[str]) -> bool:
    """Whether a module is one of `modules`, or inside of one."""
    return f"{name}.".startswith(tuple(f"{other}." for other in modules))


def _modules_with_weights(target: str, modules: dict[str, nn.Module]) -> list[str]:
    """The modules of a name, or with that end, that hold weights. Raises ModelError where there is none."""
    matching = [name for name in modules if _name_matches(name, target)]
    if not any(True for name in matching for _ in modules[name].parameters()):
        ends = _leaf_names(modules)
        remedy = _did_you_mean(target, ends) or f"it has {', '.join(ends[:20])}"
        raise ModelError(_MODULES_TO_SAVE_FIELD, target, "the model has no weights in a module of that name", remedy)
    return matching


def _names_for_peft(saved: list[str], names: list[str]) -> list[str]:
    """The ends of saved modules' names where peft, which looks at ends of any length, finds nothing else by them."""
    ends = _leaf_names(saved)
    return ends if [name for name in names if name.endswith(tuple(ends))] == saved else saved


def _matching_targets(
    policy: PolicyModel, target: str, modules: dict[str, nn.Module], possible: list[str]
) -> list[str]:
    matching = [name for name in modules if _name_matches(name, target)]
    unfit = [name for name in matching if name not in possible]
    if not matching or unfit:
        raise _target_error(policy, target, modules[unfit[0]] if unfit else None, possible)
    return matching


def _target_error(policy: PolicyModel, target: str, unfit: nn.Module | None, possible: list[str]) -> ModelError:
    """The error about a target, with the nearest valid names."""
    ends = _leaf_names(possible)
    meant = "" if target in ends else _did_you_mean(target, ends)
    known = f"the linear layers of {type(policy.lm).__name__} are {', '.join(ends)}"
    remedy = f"{meant} {known}" if meant else known
    if unfit is None:
        return ModelError(_TARGETS_FIELD, target, "the model has no layer of that name", remedy)
    if unfit is policy.head:
        return ModelError(_TARGETS_FIELD, target, "the output layer cannot have an adapter here", known)
    return ModelError(_TARGETS_FIELD, target, f"this is a {type(unfit).__name__}, no linear layer", known)
