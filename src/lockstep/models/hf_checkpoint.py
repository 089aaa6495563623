"""Checkpoint folders of Hugging Face models, read into a policy by name and by rows: no rank needs to hold the whole
model.
"""

import difflib
import hashlib
import json
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

from lockstep.models.errors import ModelError
from lockstep.models.huggingface import download_model
from lockstep.models.policy_model import PolicyModel, hf_name

log = logging.getLogger(__name__)

_ADAPTER_PARAMETER = re.compile(r"\.lora_(A|B|magnitude_vector)\.")
_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"


class SafetensorsCheckpoint:
    """The tensors of a safetensors folder, read by name and by rows. A context manager.

    Args:
        single: the file's name where there is one only.
        field: of the config that names the folder, for errors.

    Raises:
        ModelError: the folder has no safetensors, one is torn, or its index names a file that is not there.
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
                raise ModelError(field, str(folder), f"{file} is torn ({error})", "fetch it again") from error
            self._files[file] = opened
            self._where.update(dict.fromkeys(opened.keys(), file))

    def _file_names(self) -> list[str]:
        if (self.folder / _INDEX_FILE).is_file():
            index = json.loads((self.folder / _INDEX_FILE).read_text(encoding="utf-8"))
            return sorted(set(index["weight_map"].values()))
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
        """Rows `start` to `stop` of a tensor, and no other byte of it."""
        found: Tensor = self._files[self._where[name]].get_slice(name)[start:stop]
        return found

    def read(self, name: str) -> Tensor:
        found: Tensor = self._files[self._where[name]].get_tensor(name)
        return found

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """`rows`, or the whole tensor in one read where all rows are requested, which scalars need."""
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
    """How a checkpoint's names compare with a policy's (both in the checkpoint's spelling)."""

    missing: list[str]
    """The policy has them, the checkpoint has not."""
    unexpected: list[str]
    """The checkpoint has them, the policy has not."""


def named_weights(policy: PolicyModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(checkpoint name, parameter) of each of the model's own weights, without an adapter's; tied weights once, under
    the name of their first place."""
    for name, parameter in policy.named_parameters():
        if not is_adapter_parameter(name):
            yield hf_name(name), parameter


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter of that name is an adapter's."""
    return _ADAPTER_PARAMETER.search(name) is not None


def named_state(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """`named_weights`, then the persistent buffers: everything that a checkpoint holds."""
    yield from named_weights(policy)
    for path, module in policy.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                yield hf_name(f"{path}.{leaf}"), buffer


def compare_names(policy: PolicyModel, checkpoint: SafetensorsCheckpoint) -> NameReport:
    """The names that only one of the two has; all names of a tied weight count as one."""
    expected = dict(named_state(policy))
    aliases = tied_names(policy)
    missing = [name for name in expected if not any(alias in checkpoint for alias in aliases.get(name, [name]))]
    known = {alias for name in expected for alias in aliases.get(name, [name])}
    return NameReport(sorted(missing), [name for name in checkpoint.names if name not in known])


def check_weights(policy: PolicyModel, folder: Path) -> NameReport:
    """Whether a checkpoint fits a policy, by names and shapes; no weight is read. Raises ModelError where not."""
    with SafetensorsCheckpoint(folder) as checkpoint:
        return _match_names(policy, checkpoint)[0]


def fill_policy(policy: PolicyModel, folder: Path, device: torch.device | str) -> NameReport:
    """Reads a checkpoint into a policy made on the meta device, sharded (FSDP2, by rows) or not.

    Each rank reads only its rows; nothing is communicated. Tied weights stay tied, buffers move to `device`.

    Returns:
        The report; its `missing` is empty.

    Raises:
        ModelError: a weight is missing or of another shape. Nothing is filled then.
    """
    with SafetensorsCheckpoint(folder) as checkpoint:
        report, sources = _match_names(policy, checkpoint)
        places = ParameterSlots(policy, torch.device(device))
        for name, parameter in list(named_weights(policy)):
            places.fill(parameter, partial(checkpoint.part, sources[name]))
        for name, buffer in named_state(policy):
            if not isinstance(buffer, nn.Parameter):
                buffer.copy_(checkpoint.read(sources[name]))
        for module in policy.modules():
            for leaf, kept in module._buffers.items():
                if kept is not None:
                    module._buffers[leaf] = kept.to(device)
    if report.unexpected:
        log.warning("%s: %d weights are not used: %s", folder, len(report.unexpected), ", ".join(report.unexpected[:3]))
    return report


class ParameterSlots:
    """The modules that hold each parameter of a policy, to replace those on the meta device by real ones."""

    def __init__(self, policy: PolicyModel, device: torch.device) -> None:
        self.device = device
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in policy.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((module, leaf))

    def fill(self, parameter: nn.Parameter, rows: Callable[[int, int], Tensor]) -> nn.Parameter:
        """Puts a parameter with this rank's rows in the place of `parameter` (several for a tied one).

        Args:
            rows: gives the rows from the first to the last (exclusive) of the whole tensor.
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
        for module, leaf in self._places[id(parameter)]:
            setattr(module, leaf, filled)
        return filled


def folder_digest(folder: Path) -> str:
    """sha256, hexadecimal, of a checkpoint: sizes, headers and 64 pages of each of its files, which tells another
    model of the same shape and takes no time."""
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
    """(first row, number of rows) of this rank's shard; a rank beyond the last row has none.

    Raises:
        ValueError: sharded along another dimension than rows.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(place.is_partial() or (place.is_shard() and not place.is_shard(0)) for place in tensor.placements):
        raise ValueError(f"expected a tensor sharded by rows, got {tensor.placements}")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not tensor.shape:
        return 0, 1
    return (offset[0], shape[0]) if shape[0] else (0, 0)


def _match_names(policy: PolicyModel, checkpoint: SafetensorsCheckpoint) -> tuple[NameReport, dict[str, str]]:
    """The report, and the checkpoint's name of each weight and buffer. Raises ModelError."""
    folder, report, aliases = str(checkpoint.folder), compare_names(policy, checkpoint), tied_names(policy)
    sources = {name: _first_present(checkpoint, aliases.get(name, [name])) for name, _ in named_state(policy)}
    if report.missing:
        raise ModelError(
            "model.path",
            folder,
            f"{len(report.missing)} weights are missing: {', '.join(report.missing[:3])}"
            + (f" (it has {', '.join(report.unexpected[:3])})" if report.unexpected else ""),
            "save it again with this version of transformers (`from_pretrained`, then `save_pretrained`)",
        )
    for name, tensor in named_state(policy):
        found = checkpoint.shape(sources[name])
        if found != tuple(tensor.shape):
            raise ModelError(
                "model.path", folder, f"{name} has shape {found}, expected {tuple(tensor.shape)}", "use its own config"
            )
    return report, sources


def _first_present(checkpoint: SafetensorsCheckpoint, names: list[str]) -> str:
    return next((name for name in names if name in checkpoint), names[0])


def tied_names(policy: PolicyModel) -> dict[str, list[str]]:
    """All names of each weight, tied ones have several, by its first: an untied checkpoint may hold any of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(hf_name(name))
    return {found[0]: found for found in names.values()}


def resolve_folder(name: str, revision: str | None = None, *, field: str = "model.path", weights: bool = True) -> Path:
    """The folder of a local path or of a hub name, downloaded where needed.

    Args:
        name: a folder, or `owner/name` on the hub.
        field: of the config, for the error.
        weights: whether weights are needed, or config and tokenizer are enough.

    Raises:
        ModelError: neither a folder nor on the hub, or the hub does not answer.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    close = _nearest_folder(path)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        remedy = close or "give an existing one or a hub name `owner/name`"
        raise ModelError(field, name, "there is no such folder", remedy)
    try:
        return download_model(name, revision, field=field, weights=weights)
    except ModelError as error:
        local = close or (path.parent.is_dir() and str(path.parent) != ".")  # then it was meant to be a folder
        refusal = ModelError if local else type(error)
        raise refusal(field, name, error.problem, close or error.remedy) from error


def _nearest_folder(path: Path) -> str:
    """The folder beside it that was probably meant, as a question; empty where there is none."""
    beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    found = difflib.get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.with_name(found[0])}?" if found else ""
