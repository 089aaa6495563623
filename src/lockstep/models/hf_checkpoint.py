"""Reads checkpoint folders of Hugging Face models into a policy, by rows, so that no rank needs to hold the
whole model.
"""

import difflib
import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.base.json_text import read_json
from lockstep.base.text import count_noun, first_line
from lockstep.models.errors import ModelError
from lockstep.models.folder_digests import check_digests
from lockstep.models.huggingface import download_model
from lockstep.models.policy_model import PolicyModel, hf_name
from lockstep.models.score_model import HEAD_WEIGHT, HeadWeight, ScoreModel, locate_head
from lockstep.models.weight_conversion import CheckpointMapping, StoredWeight

log = logging.getLogger(__name__)

WeightSource = StoredWeight | HeadWeight
"""How a weight is read."""

_ADAPTER_PARAMETER = re.compile(r"\.lora_(A|B|magnitude_vector)\.")
_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"


class SafetensorsCheckpoint:
    """The tensors of a safetensors folder, read by name and by rows. A context manager.

    Args:
        single: name of the file if there is only one.
        field: field of the config that names the folder, for errors.

    Raises:
        ModelError: the folder has no safetensors file, a file is truncated, or a file of the index is missing.
    """

    def __init__(self, folder: Path, single: str = _SINGLE_FILE, field: str = "model.path") -> None:
        self.folder, self.field, self.single = folder, field, single
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in self._file_names():
            path = folder / file
            if not path.is_file():
                raise ModelError(field, str(folder), f"{file} is missing", "complete the download")
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise ModelError(field, str(folder), f"{file} cannot be read ({error})", "download it again") from error
            self._files[file] = opened
            self._where.update(dict.fromkeys(opened.keys(), file))

    def _file_names(self) -> list[str]:
        if (self.folder / _INDEX_FILE).is_file():
            try:
                return sorted({str(file) for file in read_json(self.folder / _INDEX_FILE)["weight_map"].values()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                problem = f"{_INDEX_FILE} cannot be read ({first_line(error)})"
                raise ModelError(self.field, str(self.folder), problem, "download it again") from error
        if (self.folder / self.single).is_file():
            return [self.single]
        raise ModelError(self.field, str(self.folder), f"holds no {self.single}", "convert the weights to safetensors")

    @property
    def names(self) -> list[str]:
        return sorted(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Reads only rows `start` to `stop` of a tensor."""
        tensor: Tensor = self._files[self._where[name]].get_slice(name)[start:stop]
        return tensor

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Reads rows, or the whole tensor if all rows are requested, which also works for scalars."""
        whole = start == 0 and self.shape(name)[:1] in ((), (stop,))
        return self.read(name) if whole else self.rows(name, start, stop)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            yield name, self.read(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


@dataclass(frozen=True, slots=True)
class NameReport:
    """The differences between the names in a checkpoint and those of a policy (as checkpoint names)."""

    missing: list[str]
    """Names that only the policy has."""
    unexpected: list[str]
    """Names that only the checkpoint has."""


def named_weights(policy: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (checkpoint name, parameter) of each weight of the model, without an adapter's. Tied weights appear once,
    under their first name."""
    for name, parameter in policy.named_parameters():
        if not is_adapter_parameter(name):
            yield hf_name(name), parameter


def is_adapter_parameter(name: str) -> bool:
    """Returns whether a parameter with this name belongs to an adapter."""
    return _ADAPTER_PARAMETER.search(name) is not None


def named_state(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yields everything that a checkpoint holds: `named_weights`, then the persistent buffers."""
    yield from named_weights(policy)
    for path, module in policy.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                yield hf_name(f"{path}.{leaf}"), buffer


def compare_names(policy: PolicyModel, checkpoint: SafetensorsCheckpoint) -> NameReport:
    """Returns the names that only the policy or only the checkpoint has. Any name of a tied weight is sufficient."""
    return _report(*_find_sources(policy, checkpoint))


def check_weights(policy: PolicyModel, folder: Path) -> NameReport:
    """Raises ModelError if a checkpoint's names and shapes do not match a policy. Reads no weights; only a score head
    may be missing."""
    with SafetensorsCheckpoint(folder) as checkpoint:
        return _match_names(policy, checkpoint, head_seed=0)[0]


def fill_policy(
    policy: PolicyModel,
    folder: Path,
    device: torch.device | str,
    share: tuple[int, int] = (0, 1),
    head_seed: int | None = None,
    on_filled: Callable[[nn.Parameter], None] | None = None,
) -> NameReport:
    """Reads a checkpoint into a policy on the meta device, which may be sharded by rows (FSDP2).

    Each rank reads only its rows, without communication. Tied weights stay tied; buffers are moved to `device`.

    Args:
        share: which part of the tensors this rank compares with the digests of an export, and of how many.
        head_seed: the seed of a new score head if the checkpoint is one of a language model; None to refuse it.
        on_filled: called with each parameter as soon as it has its values, before the next is read.

    Returns:
        The report; its `missing` is empty.

    Raises:
        ModelError: a weight is missing, has another shape or was damaged; the policy is unchanged.
    """
    check_digests(folder, share=share)
    with SafetensorsCheckpoint(folder) as checkpoint:
        report, sources, mapping = _match_names(policy, checkpoint, head_seed)
        policy.lm._weight_conversions = mapping.used_conversions  # transformers reverts them in an export
        slots = ParameterSlots(policy, torch.device(device))
        for name, parameter in list(named_weights(policy)):
            source = sources[name]
            filled = slots.fill(parameter, partial(source.rows, checkpoint))
            if on_filled is not None:
                on_filled(filled)
            if isinstance(policy, ScoreModel) and name == HEAD_WEIGHT:
                policy.has_new_head = isinstance(source, HeadWeight) and source.stored is None
        for name, buffer in named_state(policy):
            if not isinstance(buffer, nn.Parameter):
                buffer.copy_(sources[name].rows(checkpoint, 0, buffer.shape[0] if buffer.ndim else 1))
        for module in policy.modules():
            for leaf, module_buffer in module._buffers.items():
                if module_buffer is not None:
                    module._buffers[leaf] = module_buffer.to(device)
    if report.unexpected:
        count = count_noun(len(report.unexpected), "weight")
        log.warning("%s: %s not used: %s", folder, count, ", ".join(report.unexpected[:3]))
    return report


def fill_head(policy: ScoreModel, folder: Path, seed: int | None) -> None:
    """Reads the score head of a model whose other weights are loaded, such as a quantized one. Raises ModelError.

    Args:
        seed: as `head_seed` of `fill_policy`.
    """
    with SafetensorsCheckpoint(folder) as checkpoint, torch.no_grad():
        source = locate_head(policy, checkpoint, str(folder), seed)
        policy.head.weight.copy_(source.rows(checkpoint, 0, 1))
        policy.has_new_head = source.stored is None


class ParameterSlots:
    """Finds the modules that hold each parameter of a policy, to replace parameters on the meta device."""

    def __init__(self, policy: PolicyModel, device: torch.device) -> None:
        self.device = device
        self._modules: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in policy.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    self._modules.setdefault(id(parameter), []).append((module, leaf))

    def fill(self, parameter: nn.Parameter, rows: Callable[[int, int], Tensor]) -> nn.Parameter:
        """Replaces `parameter` by one with this rank's rows, in all modules that hold it.

        Args:
            rows: reads the rows from the first to the last (exclusive) of the whole tensor.
        """
        data = parameter.data
        if isinstance(data, DTensor):
            start, count = local_row_range(data)
            local = rows(start, start + count).to(device=self.device, dtype=data.dtype).contiguous()
            value: Tensor = DTensor.from_local(
                local, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
            )
        else:
            whole = rows(0, data.shape[0] if data.ndim else 1)
            value = whole.to(device=self.device, dtype=data.dtype).contiguous()
        filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for module, leaf in self._modules[id(parameter)]:
            setattr(module, leaf, filled)
        return filled


def folder_digest(folder: Path) -> str:
    """Returns a sha256 (hexadecimal) of sizes, headers and 64 pages of each file of a checkpoint. It differs for
    another model of the same shape, and is fast."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(b"%d:%b" % (size, header))
            for place in range(64):
                file.seek(place * size // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()


def local_row_range(tensor: DTensor) -> tuple[int, int]:
    """Returns (first row, number of rows) of this rank's shard; (0, 0) if it has no rows.

    Raises:
        ValueError: the tensor is sharded along another dimension than rows.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(place.is_partial() or (place.is_shard() and not place.is_shard(0)) for place in tensor.placements):
        raise ValueError(f"expected a tensor sharded by rows, got {tensor.placements}")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not tensor.shape:
        return 0, 1
    return (offset[0], shape[0]) if shape[0] else (0, 0)


def _match_names(
    policy: PolicyModel, checkpoint: SafetensorsCheckpoint, head_seed: int | None
) -> tuple[NameReport, dict[str, WeightSource], CheckpointMapping]:
    """Returns the report, and how to read each weight and buffer. Raises ModelError."""
    if quantization := getattr(policy.config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ModelError(
            "model.path",
            str(checkpoint.folder),
            f"its weights are quantized ({method}), and a trainer needs them in a floating-point type",
            "give the unquantized checkpoint (to train an adapter on quantized weights, set model.quantization)",
        )
    found, mapping = _find_sources(policy, checkpoint)
    if isinstance(policy, ScoreModel):
        head = found[HEAD_WEIGHT] = locate_head(policy, checkpoint, str(checkpoint.folder), head_seed)
        mapping.unexpected = [name for name in mapping.unexpected if name != head.stored]
    report, folder = _report(found, mapping), str(checkpoint.folder)
    if report.missing:
        raise ModelError(
            "model.path",
            folder,
            f"{count_noun(len(report.missing), 'weight')} missing: {', '.join(report.missing[:3])}"
            + (f" (it has {', '.join(report.unexpected[:3])})" if report.unexpected else ""),
            "give a complete, unquantized checkpoint of the model that its config.json describes",
        )
    sources = {name: source for name, source in found.items() if source is not None}
    for name, tensor in named_state(policy):
        shape = sources[name].shape
        if shape != tuple(tensor.shape):
            raise ModelError(
                "model.path",
                folder,
                f"{name} has shape {shape}, expected {tuple(tensor.shape)}",
                "use the config of this checkpoint",
            )
    return report, sources, mapping


def _find_sources(
    policy: PolicyModel, checkpoint: SafetensorsCheckpoint
) -> tuple[dict[str, WeightSource | None], CheckpointMapping]:
    """Returns how to read each weight and buffer; None if the checkpoint lacks it."""
    aliases = tied_names(policy)
    names = {name: aliases.get(name, [name]) for name, _ in named_state(policy)}
    state = {alias: tensor for name, tensor in named_state(policy) for alias in names[name]}
    mapping = CheckpointMapping(policy.lm, state, checkpoint, str(checkpoint.folder))
    found: dict[str, WeightSource | None] = {
        name: next((mapping.sources[alias] for alias in others if alias in mapping.sources), None)
        for name, others in names.items()
    }
    return found, mapping


def _report(sources: dict[str, WeightSource | None], mapping: CheckpointMapping) -> NameReport:
    return NameReport(sorted(name for name, source in sources.items() if source is None), mapping.unexpected)


def tied_names(policy: PolicyModel) -> dict[str, list[str]]:
    """Returns all names of each weight, by the first. Tied weights have several, and a checkpoint may use any of
    them."""
    names: dict[int, list[str]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(hf_name(name))
    return {found[0]: found for found in names.values()}


def resolve_folder(name: str, revision: str | None = None, *, field: str = "model.path", weights: bool = True) -> Path:
    """Returns the folder of a local path or of a hub name. Downloads it if needed.

    Args:
        name: a folder, or `owner/name` on the hub.
        field: field of the config, for the error.
        weights: whether weights are needed, or config and tokenizer are enough.

    Raises:
        ModelError: there is no such folder or hub repository, or the hub does not answer.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    close = _nearest_folder(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        remedy = close or "give an existing folder or a hub name `owner/name`"
        raise ModelError(field, name, "there is no such folder", remedy)
    try:
        return download_model(name, revision, field=field, weights=weights)
    except ModelError as error:
        local = close or (path.parent.is_dir() and str(path.parent) != ".")  # then the user probably meant a folder
        error_class = ModelError if local else type(error)
        raise error_class(field, name, error.problem, close or error.remedy) from error


def _nearest_folder(path: Path) -> str:
    """Returns a hint with the name of a similar folder; empty if there is none."""
    siblings = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    found = difflib.get_close_matches(path.name, siblings, n=1)
    return f"did you mean {path.with_name(found[0])}?" if found else ""
