"""Low-rank adapters through peft: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024).

peft's layers replace the linear layers that they adapt. The model's weights keep their checkpoint names (`hf_name`
removes `base_layer`); the adapter's weights have the names of peft's files.
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
from lockstep.models.score_model import ScoreModel
from lockstep.models.vision.model_parts import module_parts

ADAPTER_NAME = "default"
"""The name that peft gives the only adapter of a model."""
_TARGETS_FIELD = "model.adapter.target_modules"
_MODULES_TO_SAVE_FIELD = "model.adapter.modules_to_save"


def add_adapter(policy: PolicyModel, cfg: AdapterConfig) -> None:
    """Puts peft's layers into a policy, on the meta device, and freezes all other weights except `modules_to_save`.
    Trained weights are float32.

    Raises:
        ModelError: the model has no layer for a target, or that layer cannot have an adapter; or it has no module for
            `modules_to_save`, or that module contains an adapter.
    """
    modules = dict(_base_modules(policy))
    saved = {id(parameter) for name in find_modules_to_save(policy, cfg) for parameter in modules[name].parameters()}
    settings = peft_config(policy, cfg)
    settings.modules_to_save = None  # peft would train copies; here the modules themselves are trained
    with warnings.catch_warnings():
        # peft warns about settings that the user did not choose.
        warnings.simplefilter("ignore")
        inject_adapter_in_model(settings, policy.lm, ADAPTER_NAME, low_cpu_mem_usage=True)
    for name, parameter in policy.named_parameters():
        trained = is_adapter_parameter(name) or id(parameter) in saved
        parameter.requires_grad_(trained)
        if trained:
            parameter.data = parameter.data.float()
    policy.eval()


def find_targets(policy: PolicyModel, cfg: AdapterConfig) -> list[str]:
    """Returns the full names of the layers to adapt, in the model's order: none of a frozen part, and of the tower and
    the projector only those whose names are given. Raises ModelError."""
    modules, parts = _unfrozen_modules(policy), module_parts(policy.lm)
    possible = [
        name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and module is not policy.head
    ]
    if cfg.target_modules == "all-linear":
        saved = set(find_modules_to_save(policy, cfg))
        language = (name for name in possible if id(modules[name]) not in parts)
        found = {name for name in language if not _is_within(name, saved)}
        if not found:
            raise ModelError(_TARGETS_FIELD, "all-linear", "model.vision freezes the language model", "name the layers")
    else:
        found = {name for target in cfg.target_modules for name in _matching_targets(policy, target, modules, possible)}
    transposed = next((name for name in sorted(found) if isinstance(modules[name], Conv1D)), None)
    if cfg.kind == "dora" and transposed is not None:
        problem = f"{transposed} is a transposed layer (Conv1D), for which DoRA is not supported"
        raise ModelError("model.adapter.kind", cfg.kind, problem, "set model.adapter.kind=lora")
    return [name for name in possible if name in found]


def find_modules_to_save(policy: PolicyModel, cfg: AdapterConfig) -> list[str]:
    """Returns the full names of the modules that are trained in full, in the model's order, including modules that are
    tied to them. Raises ModelError."""
    modules = _unfrozen_modules(policy)
    wanted = [*cfg.modules_to_save, *policy.trained_beside_adapter]
    found = {name for target in wanted for name in _modules_with_weights(target, modules)}
    trained = {id(parameter) for name in found for parameter in modules[name].parameters()}
    for name, module in modules.items():
        own_parameters = [id(parameter) for parameter in module.parameters(recurse=False)]
        if own_parameters and trained.issuperset(own_parameters) and not _is_within(name, found):
            found.add(name)  # tied
    targets = () if cfg.target_modules == "all-linear" else cfg.target_modules
    for name in modules:
        target = next((each for each in targets if _name_matches(name, each)), None)
        if target is not None and _is_within(name, found):
            raise ModelError(
                _MODULES_TO_SAVE_FIELD,
                name,
                f"it has an adapter as well ({_TARGETS_FIELD} {target})",
                "name it in only one of the two",
            )
    return [name for name in modules if name in found]


def peft_config(policy: PolicyModel, cfg: AdapterConfig) -> LoraConfig:
    """Returns the content of `adapter_config.json`, without the base model's name. Raises ModelError."""
    modules = dict(_base_modules(policy))
    targets = find_targets(policy, cfg)
    return LoraConfig(
        task_type=TaskType.SEQ_CLS if isinstance(policy, ScoreModel) else TaskType.CAUSAL_LM,
        r=cfg.r,
        lora_alpha=cfg.lora_alpha,
        lora_dropout=cfg.lora_dropout,
        target_modules=_short_targets(targets, list(modules))
        if cfg.target_modules == "all-linear" or policy.frozen_parts
        else [*cfg.target_modules],
        use_rslora=cfg.use_rslora,
        use_dora=cfg.kind == "dora",
        init_lora_weights=cfg.init_lora_weights,
        modules_to_save=_names_for_peft(find_modules_to_save(policy, cfg), list(modules)) or None,
        fan_in_fan_out=any(isinstance(modules[name], Conv1D) for name in targets),
        bias="none",
    )


def named_adapter(policy: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name in peft's files, parameter) of each parameter of the adapter; nothing without an adapter."""
    for name, parameter in policy.named_parameters():
        if is_adapter_parameter(name):
            yield peft_name(hf_name(name)), parameter


def named_saved_weights(policy: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name in peft's files, parameter) of each weight of the model that is trained in full along with an
    adapter; tied weights once, and nothing without an adapter."""
    if any(isinstance(module, LoraLayer) for module in policy.modules()):
        for name, parameter in named_weights(policy):
            if parameter.requires_grad:
                yield peft_name(name), parameter


def starts_from_other_weights(policy: PolicyModel, cfg: AdapterConfig) -> bool:
    """Returns whether a run's initial policy differs from the base model without an adapter."""
    return cfg.path is not None or any(True for _ in named_saved_weights(policy))


def saved_names(policy: PolicyModel) -> dict[str, list[str]]:
    """Returns all names in peft's files of each weight of `named_saved_weights`, by the first. peft stores tied weights
    under each of their names."""
    aliases = {peft_name(name): [peft_name(other) for other in others] for name, others in tied_names(policy).items()}
    return {name: aliases[name] for name, _ in named_saved_weights(policy)}


def peft_name(name: str) -> str:
    """Converts a name such as `model.layers.0.self_attn.q_proj.lora_A.default.weight` to that in peft's files."""
    name = name.replace(f".{ADAPTER_NAME}.", ".")
    return "base_model.model." + name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def fill_adapter(policy: PolicyModel, cfg: AdapterConfig, seed: int, device: torch.device | str) -> None:
    """Initialises an adapter, after the base model was filled: from `cfg.path`, or with a random A (independent of the
    number of ranks), B zero, and DoRA's magnitude the norms of the base's rows (section 4.1 of the paper).

    Raises:
        ModelError: the adapter in `cfg.path` does not match the model.
    """
    slots = ParameterSlots(policy, torch.device(device))
    if cfg.path is not None:
        with _open_stored_adapter(policy, cfg.path) as stored:
            for name, parameter in [*named_adapter(policy), *named_saved_weights(policy)]:
                slots.fill(parameter, partial(stored.part, name))
        return
    names = {id(parameter): name for name, parameter in named_adapter(policy)}
    for layer in adapted_layers(policy).values():
        down, up = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        start = _initial_lora_a(down, cfg, seed, names[id(down)])
        slots.fill(down, lambda first, last, start=start: start[first:last])  # type: ignore[misc]
        slots.fill(up, lambda first, last, like=up: torch.zeros(last - first, *like.shape[1:]))  # type: ignore[misc]
        if ADAPTER_NAME in layer.lora_magnitude_vector:
            norms = torch.linalg.norm(_base_rows(layer.get_base_layer()), dim=1)
            slots.fill(layer.lora_magnitude_vector[ADAPTER_NAME].weight, lambda *_, norms=norms: norms)


def check_adapter(policy: PolicyModel, cfg: AdapterConfig) -> None:
    """Raises ModelError if the adapter in `cfg.path` does not match the policy, to which the adapter was added
    before."""
    if cfg.path is not None:
        with _open_stored_adapter(policy, cfg.path):
            pass


def adapted_layers(policy: PolicyModel) -> dict[str, Any]:
    """Returns the adapted layers, by the checkpoint name of their weight."""
    return {
        hf_name(f"{path}.weight"): module for path, module in policy.named_modules() if isinstance(module, LoraLayer)
    }


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """The complete adapter of one layer, float32."""

    down: Tensor
    """A, `[r, in]`."""
    up: Tensor
    """B, `[out, r]`."""
    scaling: float
    magnitude: Tensor | None = None
    """DoRA's magnitude, `[out]`."""
    transposed: bool = False
    """Whether the layer's weight is `[in, out]`."""

    def merged(self, rows: Tensor, first: int) -> Tensor:
        """Merges the adapter into rows of the layer's weight, from row `first` on, in float32: `W + s B A`, for DoRA
        `m (W + s B A) / ||W + s B A||` with the norm of each output (Liu et al. 2024, eq. 5)."""
        left, right = (self.down.T, self.up.T) if self.transposed else (self.up, self.down)
        last = first + rows.shape[0]
        total = torch.addmm(rows.float(), left[first:last], right, alpha=self.scaling)
        if self.magnitude is not None:
            total *= (self.magnitude[first:last] / torch.linalg.norm(total, dim=1))[:, None]
        return total


@contextmanager
def without_adapter(policy: PolicyModel) -> Iterator[None]:
    """Disables the adapter. peft's own method also changes `requires_grad`, which must not change under FSDP2."""
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
    """Enables the adapter's dropout, but no other dropout."""
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
    """Derives a seed from the parts, so that different random draws have different seeds."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7])


def _open_stored_adapter(policy: PolicyModel, path: str) -> AbstractContextManager[SafetensorsCheckpoint]:
    shapes = {
        name: tuple(parameter.shape) for name, parameter in [*named_adapter(policy), *named_saved_weights(policy)]
    }
    return open_adapter(shapes, saved_names(policy), path)


def _initial_lora_a(down: nn.Parameter, cfg: AdapterConfig, seed: int, name: str) -> Tensor:
    """Draws the whole of A like peft, float32 `[r, in]`."""
    generator = torch.Generator().manual_seed(derived_seed(seed, name))
    whole = torch.empty(tuple(down.shape))
    if cfg.init_lora_weights == "gaussian":
        return nn.init.normal_(whole, std=1 / cfg.r, generator=generator)
    return nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)


def _base_rows(base: Any) -> Tensor:
    """Returns this rank's rows of a layer's weight."""
    data = base.weight.detach()
    return data.to_local() if isinstance(data, DTensor) else dequantized_weight(base)


def _base_modules(policy: PolicyModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of the model, for adapted layers the original ones."""
    inside: tuple[str, ...] = ()
    for name, module in policy.lm.named_modules():
        if isinstance(module, LoraLayer):
            inside += (f"{name}.",)
            yield name, module.get_base_layer()
        elif name and not name.startswith(inside):
            yield name, module


def _unfrozen_modules(policy: PolicyModel) -> dict[str, nn.Module]:
    """Returns the modules of `_base_modules`, by name, except those of frozen parts."""
    parts = module_parts(policy.lm)
    found = ((name, module, parts.get(id(module), "language")) for name, module in _base_modules(policy))
    return {name: module for name, module, part in found if part not in policy.frozen_parts}


def _short_targets(targets: list[str], names: list[str]) -> list[str]:
    """Returns the last parts of the targets' names, as vLLM and others expect them, if they match no other module. Else
    returns the full names."""
    ends = list(dict.fromkeys(target.rpartition(".")[2] for target in targets))
    named = [name for name in names if name.rpartition(".")[2] in ends]
    return ends if sorted(named) == sorted(targets) else targets


def _name_matches(name: str, end: str) -> bool:
    """Returns whether a module has this name, or a name that ends with it."""
    return name == end or name.endswith(f".{end}")


def _leaf_names(names: Iterable[str]) -> list[str]:
    """Returns the last parts of names, such as `q_proj`, without duplicates."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _did_you_mean(name: str, ends: list[str]) -> str:
    """Returns a hint with the nearest of `ends`; empty if none is near."""
    nearest = difflib.get_close_matches(name.rpartition(".")[2], ends, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(nearest)}?" if nearest else ""


def _is_within(name: str, modules: set[str]) -> bool:
    """Returns whether a module is one of `modules`, or within one."""
    return f"{name}.".startswith(tuple(f"{other}." for other in modules))


def _modules_with_weights(target: str, modules: dict[str, nn.Module]) -> list[str]:
    """Returns the modules whose name is or ends with `target`. Raises ModelError if there is none with weights."""
    matching = [name for name in modules if _name_matches(name, target)]
    if not any(True for name in matching for _ in modules[name].parameters()):
        ends = _leaf_names(modules)
        remedy = _did_you_mean(target, ends) or f"it has {', '.join(ends[:20])}"
        raise ModelError(_MODULES_TO_SAVE_FIELD, target, "the model has no weights in a module of that name", remedy)
    return matching


def _names_for_peft(saved: list[str], names: list[str]) -> list[str]:
    """Returns the last parts of saved modules' names if no other name ends with them, because peft compares ends. Else
    returns the full names."""
    ends = _leaf_names(saved)
    return ends if [name for name in names if name.endswith(tuple(ends))] == saved else saved


def _matching_targets(
    policy: PolicyModel, target: str, modules: dict[str, nn.Module], possible: list[str]
) -> list[str]:
    matching = [name for name in modules if _name_matches(name, target)]
    unsuitable = [name for name in matching if name not in possible]
    if not matching or unsuitable:
        raise _target_error(policy, target, modules[unsuitable[0]] if unsuitable else None, possible)
    return matching


def _target_error(policy: PolicyModel, target: str, unsuitable: nn.Module | None, possible: list[str]) -> ModelError:
    """Returns the error about a target, with the nearest valid names."""
    ends = _leaf_names(possible)
    hint = "" if target in ends else _did_you_mean(target, ends)
    known = f"the linear layers of {type(policy.lm).__name__} are {', '.join(ends)}"
    remedy = f"{hint} {known}" if hint else known
    if unsuitable is None:
        where = " in the parts that model.vision trains" if policy.frozen_parts else ""
        return ModelError(_TARGETS_FIELD, target, f"the model has no layer of that name{where}", remedy)
    if unsuitable is policy.head:
        return ModelError(_TARGETS_FIELD, target, "adapters of the output layer are not supported", known)
    return ModelError(_TARGETS_FIELD, target, f"this is a {type(unsuitable).__name__} and not a linear layer", known)
