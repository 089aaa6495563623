"""The plan of a weight transfer: names, shapes, dtypes and offsets, agreed before bytes move."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lockstep.weights.errors import PlanMismatch

ALIGNMENT = 256
"""Bytes. Enough for every vector unit, and for a copy to a device."""
_FUSED_ORDER = {"q_proj": "qkv_0", "k_proj": "qkv_1", "v_proj": "qkv_2"}


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One tensor and its offset in the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name: `float32`, `bfloat16`."""
    offset: int
    """Bytes."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (index of the first dimension)."""
        return math.prod(self.shape[1:]) * self.torch_dtype.itemsize

    @property
    def rows(self) -> int:
        """1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class WeightPlan:
    """All tensors of a buffer, aligned; tensors that engines fuse are neighbours. Equal plans have equal digests."""

    entries: tuple[PlanEntry, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Sequence[int], torch.dtype | str]]) -> "WeightPlan":
        """Makes a plan from (name, shape, dtype) in any order. Tied weights appear once.

        Raises:
            ValueError: a name given twice, an empty name, an unknown dtype, a negative size.
        """
        entries: list[PlanEntry] = []
        offset = 0
        for name, shape, dtype in sorted(tensors, key=lambda each: _sort_key(each[0])):
            if not name or (entries and entries[-1].name == name):
                raise ValueError(f"tensor {name!r}: expected every tensor once, with a name")
            if any(size < 0 for size in shape):
                raise ValueError(f"tensor {name!r}: shape {tuple(shape)} has a negative size")
            label = str(dtype).removeprefix("torch.")
            torch_dtype(label)
            entry = PlanEntry(name, tuple(int(size) for size in shape), label, offset)
            entries.append(entry)
            offset = -(-(offset + entry.nbytes) // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries))

    @property
    def nbytes(self) -> int:
        """Of one buffer."""
        return self.entries[-1].offset + self.entries[-1].nbytes if self.entries else 0

    @cached_property
    def index(self) -> dict[str, int]:
        """Name to position in `entries`."""
        return {entry.name: position for position, entry in enumerate(self.entries)}

    @cached_property
    def digest(self) -> str:
        """sha256, hexadecimal, of names, shapes, dtypes and offsets."""
        return hashlib.sha256(self._body().encode()).hexdigest()

    def _body(self) -> str:
        rows = [[entry.name, entry.shape, entry.dtype, entry.offset] for entry in self.entries]
        return json.dumps(rows, separators=(",", ":"))

    def to_json(self) -> str:
        return json.dumps({"format": 1, "digest": self.digest, "tensors": json.loads(self._body())})

    @classmethod
    def from_json(cls, text: str) -> "WeightPlan":
        """Raises ValueError for what `to_json` did not write, or that was changed since."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("format") != 1:
            raise ValueError("not a weight plan of format 1")
        try:
            plan = cls(tuple(PlanEntry(name, tuple(shape), dtype, at) for name, shape, dtype, at in found["tensors"]))
            digest = found["digest"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a weight plan: {error}") from error
        if plan.digest != digest:
            raise ValueError(f"the weight plan was altered: digest {plan.digest[:12]}, expected {digest[:12]}")
        return plan

    def check(self, other: "WeightPlan") -> None:
        """Raises PlanMismatch where `other` is not this plan, naming the first tensor that differs."""
        if self.digest != other.digest:
            raise PlanMismatch(_difference(self, other), self.digest, other.digest)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name. Raises ValueError for an unknown one."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r} is unknown, expected one of torch's, such as 'float32'")
    return found


def _sort_key(name: str) -> tuple[str, ...]:
    """Orders tensors so that those that an engine fuses (query, key, value; gate, up) are contiguous wherever their
    sizes are multiples of the alignment: tensors of one kind (weight, bias) in sibling layers come together, sorted by
    name, with queries before keys before values."""
    owner, _, kind = name.rpartition(".")
    above, _, layer = owner.rpartition(".")
    return above, kind, _FUSED_ORDER.get(layer, layer), name


def _difference(expected: WeightPlan, found: WeightPlan) -> str:
    missing = sorted(set(expected.index) - set(found.index))
    extra = sorted(set(found.index) - set(expected.index))
    for names, what in ((missing, "missing"), (extra, "not expected")):
        if names:
            return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {what}"
    for mine, theirs in zip(expected.entries, found.entries, strict=True):
        if mine != theirs:
            return f"{mine.name} is {theirs.dtype}{list(theirs.shape)}, expected {mine.dtype}{list(mine.shape)}"
    return "the tensors are the same, their offsets differ"
