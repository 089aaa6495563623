"""What goes into a store of weights and what comes out of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lockstep.weights.buckets import Check, Mark


class Shard(Protocol):
    """A rank's rows of one tensor, as the trainer gives it."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def tensor(self) -> Tensor: ...
    @property
    def constant(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Held:
    """A version's bytes on the way to another node."""

    memory: memoryview
    marks: tuple[Mark, ...]


class Filling:
    """A buffer that is being filled with what ranks of another node wrote."""

    def __init__(self, memory: memoryview, keep: Callable[[Sequence[Mark], Check], None]) -> None:
        self.memory, self.keep = memory, keep
        """`keep(marks, check)` holds the bytes against the checksums of their writers, and marks the ranks done."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A version that is being read; the tensors are views of shared memory, valid while the lease is held."""

    version: int
    generation: int
    tensors: Mapping[str, Tensor]
