"""The plan of a weight transfer: names, shapes, dtypes and offsets, on which both sides agree before any transfer."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lockstep.weights.errors import PlanMismatch

ALIGNMENT = 256
"""Alignment of tensors in bytes, sufficient for all vector instructions and for copies to a device."""
_FUSED_ORDER = {"q_proj": "qkv_0", "k_proj": "qkv_1", "v_proj": "qkv_2"}


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One tensor and its offset in the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in torch, such as `bfloat16`."""
    offset: int
    """Bytes."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one row (index of the first dimension)."""
        return math.prod(self.shape[1:]) * self.torch_dtype.itemsize

    @property
    def rows(self) -> int:
        """Number of rows; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class WeightPlan:
    """All tensors of a buffer, aligned. Tensors that engines fuse are adjacent. Equal plans have equal digests."""

    entries: tuple[PlanEntry, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Sequence[int], torch.dtype | str]]) -> "WeightPlan":
        """Makes a plan from (name, shape, dtype) in any order. Tied weights appear once.

        Raises:
            ValueError: a name is empty or appears twice, a dtype is unknown, or a size is negative.
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
        """Number of bytes of one buffer."""
        return self.entries[-1].offset + self.entries[-1].nbytes if self.entries else 0

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each name in `entries`."""
        return {entry.name: position for position, entry in enumerate(self.entries)}

    @cached_property
    def digest(self) -> str:
        """The sha256 (hexadecimal) of names, shapes, dtypes and offsets."""
        return hashlib.sha256(self._body().encode()).hexdigest()

    def _body(self) -> str:
        rows = [[entry.name, entry.shape, entry.dtype, entry.offset] for entry in self.entries]
        return json.dumps(rows, separators=(",", ":"))

    def to_json(self) -> str:
        return json.dumps({"format": 1, "digest": self.digest, "tensors": json.loads(self._body())})

    @classmethod
    def from_json(cls, text: str) -> "WeightPlan":
        """Reads the result of `to_json`. Raises ValueError if the text is not a plan, or was changed."""
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
        """Raises PlanMismatch, which names the first tensor that differs, if `other` is another plan."""
        if self.digest != other.digest:
            raise PlanMismatch(_difference(self, other), self.digest, other.digest)


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype with that name. Raises ValueError if it is unknown."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r} is unknown, expected one of torch's, such as 'float32'")
    return found


def _sort_key(name: str) -> tuple[str, ...]:
    """Orders tensors such that those that an engine fuses (query, key, value; gate, up) are contiguous if their sizes
    are
    multiples of the alignment: tensors of one kind (weight, bias) in sibling layers are adjacent, sorted by name, with
    query, key and value in this order."""
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
