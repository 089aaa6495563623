"""Maps the tensors of a checkpoint to the weights of a model by transformers' own conversion mapping, and back.

Some checkpoints name or group weights in another way than transformers' modules do: Mixtral's file has one tensor per
expert, the module one tensor for all. transformers describes that by renamings and converters
(`transformers/conversion_mapping.py`), which are used here for one weight at a time, and for rows of it where the
operations allow that.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from lockstep.models.errors import ModelError

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """A checkpoint whose tensors can be read in part."""

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> Shape: ...

    def read(self, name: str) -> Tensor: ...

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Reads rows, or the whole tensor if all rows are requested, which also works for scalars."""


@dataclass(slots=True)
class StoredWeight:
    """How one weight of the model is read from a checkpoint."""

    name: str
    """Name of the weight in the model."""
    shape: Shape
    """Shape that the weight has after the conversion."""
    tensors: Mapping[str, Sequence[str]]
    """Names in the checkpoint, by the pattern of the converter that they match."""
    conversion: "_Conversion | None" = None
    """None if the tensor is used as it is."""
    first_row: int = 0
    """Number of rows of the weights before it in its group."""

    def rows(self, checkpoint: TensorSource, start: int, stop: int) -> Tensor:
        """Reads rows `start` to `stop` of the weight, and no other rows where the conversion allows that. Else it reads
        the whole weight."""
        if self.conversion is None:
            return checkpoint.part(self.first_tensor, start, stop)
        if start == stop:
            return torch.empty(0, *self.shape[1:])
        return self.conversion.rows(self, checkpoint, start, stop)

    @property
    def first_tensor(self) -> str:
        return next(iter(self.tensors.values()))[0]


class CheckpointMapping:
    """The weights of a model, and how each is read from a checkpoint.

    Args:
        lm: a model of transformers, possibly on the meta device.
        state: its weights and persistent buffers by name, tied weights under each of their names.

    Raises:
        ModelError: a conversion fails, for example because tensors of a group are missing.
    """

    def __init__(self, lm: Any, state: Mapping[str, Tensor], checkpoint: TensorSource, folder: str) -> None:
        self.sources: dict[str, StoredWeight] = {}
        """How to read each weight that the checkpoint has."""
        self.unexpected: list[str] = []
        """Names of the checkpoint that the model does not use."""
        self._mapping = get_model_conversion_mapping(lm)
        model = _ModelView(lm, state)
        groups = self._group(lm.base_model_prefix, state, checkpoint.names)
        for first, (converter, tensors) in groups.items():
            if converter is None:
                (name,) = next(iter(tensors.values()))
                self.sources[first] = StoredWeight(first, checkpoint.shape(name), tensors)
                continue
            conversion = _Conversion(first, converter, model)
            try:
                found = conversion.run({p: [_meta(checkpoint.shape(n)) for n in names] for p, names in tensors.items()})
            except Exception as error:  # the operations are transformers' code
                names = [name for group in tensors.values() for name in group]
                raise ModelError(
                    "model.path",
                    folder,
                    f"{len(names)} tensors such as {names[0]} cannot be converted to {first} ({error})",
                    "give a complete checkpoint of this model",
                ) from error
            rows = 0
            for name, tensor in found.items():
                self.sources[name] = StoredWeight(name, tuple(tensor.shape), tensors, conversion, rows)
                rows += tensor.shape[0] if tensor.ndim else 1

    def _group(
        self, prefix: str, state: Mapping[str, Tensor], names: Sequence[str]
    ) -> dict[str, tuple[WeightConverter | None, dict[str, list[str]]]]:
        """Returns converter and tensors of each group, by the first weight of the group, as transformers' own loading
        does."""
        renamings = [each for each in self._mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in self._mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        groups: dict[str, tuple[WeightConverter | None, dict[str, list[str]]]] = {}
        known = dict(state)
        for name in sorted(names, key=dot_natural_key):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if renamed not in state and name in state:
                renamed, pattern = name, None
            if renamed not in state:
                self.unexpected.append(name)
                continue
            converter = None if pattern is None else by_pattern[pattern]
            _, tensors = groups.setdefault(renamed, (converter, {}))
            tensors.setdefault(name if pattern is None else pattern, []).append(name)
        return groups

    @property
    def used_conversions(self) -> list[Any]:
        """The renamings and converters that matched a tensor. An export reverts them."""
        return [each for each in self._mapping if each.was_used()]


class _Conversion:
    """A converter of transformers for one group of tensors."""

    def __init__(self, first: str, converter: WeightConverter, model: Any) -> None:
        self.first, self.converter, self.model = first, converter, model

    def run(self, tensors: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Returns the converted tensors, by their names in the model."""
        converter = deepcopy(self.converter)
        for pattern, group in tensors.items():
            for tensor in group:
                converter.add_tensor(self.first, pattern, pattern, tensor)
        found = converter.convert(self.first, model=self.model, config=self.model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}

    def rows(self, source: StoredWeight, checkpoint: TensorSource, start: int, stop: int) -> Tensor:
        """Reads rows of a weight of the group."""
        first, *rest = self.converter.operations
        kind, along_rows = type(first).__name__, getattr(first, "dim", None) == 0
        names = [name for pattern in self.converter.source_patterns for name in source.tensors.get(pattern, [])]
        if kind == "Concatenate" and along_rows and not rest:
            return _concatenated_rows(checkpoint, names, start, stop)
        if kind in ("Chunk", "Split") and along_rows and not rest and len(names) == 1:
            return checkpoint.part(names[0], source.first_row + start, source.first_row + stop)
        if kind == "MergeModulelist" and along_rows and all(map(_keeps_rows, rest)):
            chosen = {pattern: group[start:stop] for pattern, group in source.tensors.items()}
            return self._read(chosen, checkpoint.read)[source.name]
        if all(map(_keeps_rows, self.converter.operations)):
            return self._read(source.tensors, lambda name: checkpoint.part(name, start, stop))[source.name]
        whole = self._read(source.tensors, checkpoint.read)[source.name]
        return whole[start:stop] if whole.ndim else whole

    def _read(self, names: Mapping[str, Sequence[str]], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return self.run({pattern: [read(name) for name in group] for pattern, group in names.items()})


class _ModelView:
    """A model whose weights are found by their names in checkpoints, for operations that ask for a weight's shape.
    With an adapter, the modules have other names."""

    def __init__(self, lm: Any, state: Mapping[str, Tensor]) -> None:
        self._lm, self._state = lm, state

    def get_parameter(self, name: str) -> Tensor:
        return self._state[name]

    get_parameter_or_buffer = get_parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)


@dataclass(frozen=True, slots=True)
class CheckpointGroup:
    """Weights of a model that are converted together, and the tensors of the checkpoint that they become."""

    weights: tuple[str, ...]
    tensors: Mapping[str, Shape]


def checkpoint_groups(lm: Any, shapes: Mapping[str, Shape]) -> list[CheckpointGroup]:
    """Returns which tensors a checkpoint has for weights of these shapes. It has the tensors that transformers'
    `save_pretrained` writes.

    Raises:
        ModelError: transformers cannot convert a weight back.
    """
    reverse = _ReverseConversion.of(lm)
    groups: dict[int, list[str]] = {}
    owner: dict[str, int] = {}
    for number, name in enumerate(shapes):
        written = reverse.tensors({name: _meta(shapes[name])})
        joined = sorted({owner[tensor] for tensor in written if tensor in owner})
        groups[number] = [weight for other in joined for weight in groups.pop(other)] + [name]
        owner |= {tensor: number for tensor, other in owner.items() if other in joined}
        owner |= dict.fromkeys(written, number)
    found = []
    for names in groups.values():
        made = reverse.tensors({name: _meta(shapes[name]) for name in names})
        found.append(CheckpointGroup(tuple(names), {name: tuple(tensor.shape) for name, tensor in made.items()}))
    return found


def to_checkpoint(lm: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts the weights of one group to the tensors of a checkpoint."""
    return _ReverseConversion.of(lm).tensors(weights)


class CheckpointNames:
    """Converts the weights of a model to the tensors of a checkpoint, one group after the other, for engines that load
    them by those names. Can be pickled.

    Args:
        lm: a model of transformers, possibly on the meta device.

    Raises:
        ModelError: transformers cannot convert a weight back.
    """

    def __init__(self, lm: Any) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in lm.named_parameters(remove_duplicate=False)}
        reverse = _ReverseConversion.of(lm)
        self._groups = {
            name: group.weights
            for group in checkpoint_groups(lm, shapes)
            for name in group.weights
            if not reverse.keeps(group.weights, shapes)
        }
        """The group of each weight that is renamed or converted."""
        self._reverse = reverse if self._groups else None

    def convert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a checkpoint. A group's are made when all its weights have arrived."""
        waiting: dict[str, Tensor] = {}
        for name, weight in weights:
            group = self._groups.get(name)
            if group is None or self._reverse is None:
                yield name, weight
                continue
            waiting[name] = weight
            if all(each in waiting for each in group):
                yield from self._reverse.tensors({each: waiting.pop(each) for each in group}).items()


@dataclass(frozen=True, slots=True)
class _ReverseConversion:
    """The part of a model that transformers needs to convert its weights back."""

    kind: str
    config: Any
    _weight_conversions: list[Any]

    @classmethod
    def of(cls, lm: Any) -> "_ReverseConversion":
        used = getattr(lm, "_weight_conversions", None)
        if used is None:  # as in transformers: it was not loaded from a checkpoint
            every = get_model_conversion_mapping(lm, add_legacy=False)
            used = [each for each in every if not isinstance(each, PrefixChange)]
        return cls(type(lm).__name__, lm.config, used)

    def tensors(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self._weight_conversions:
            return dict(weights)
        try:
            return dict(revert_weight_conversion(self, dict(weights)))
        except Exception as error:  # the operations are transformers' code
            names = ", ".join(list(weights)[:3])
            problem = f"{self.kind}: transformers cannot convert {names} back to the names of checkpoints ({error})"
            remedy = "use another model or another version of transformers"
            raise ModelError("model.path", getattr(self.config, "_name_or_path", ""), problem, remedy) from error

    def keeps(self, names: Sequence[str], shapes: Mapping[str, Shape]) -> bool:
        """Returns whether weights are the same in a checkpoint, under the same names."""
        weights = {name: _meta(shapes[name]) for name in names}
        made = self.tensors(weights)
        return made.keys() == weights.keys() and all(made[name] is weight for name, weight in weights.items())


def _keeps_rows(operation: Any) -> bool:
    """Returns whether each row of an operation's result depends only on the same row of its inputs."""
    kind = type(operation).__name__
    if kind == "Transpose":
        return min(operation.dim0, operation.dim1) > 0 and not getattr(operation, "check_dims", False)
    if kind == "Interleave":
        return bool(operation.dim > 0)
    return kind in ("Concatenate", "Chunk") and operation.dim > 0


def _concatenated_rows(checkpoint: TensorSource, names: Sequence[str], start: int, stop: int) -> Tensor:
    """Reads rows `start` to `stop` of the concatenation of tensors."""
    parts, first = [], 0
    for name in names:
        count = checkpoint.shape(name)[0]
        low, high = max(start - first, 0), min(stop - first, count)
        if low < high:
            parts.append(checkpoint.part(name, low, high))
        first += count
    return torch.cat(parts)


def _meta(shape: Shape) -> Tensor:
    return torch.empty(shape, device="meta")
