"""Which rows of a parameter a rank holds, and the piece of it that goes to weight sync."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Shard:
    """A rank's rows of one parameter."""

    name: str
    """The parameter's name in Hugging Face checkpoints; tied weights appear once, under the first name."""
    global_shape: tuple[int, ...]
    offset: int
    """Index of the first row that this rank holds."""
    tensor: Tensor
    """`[rows, ...]` in the master precision, a view of the trainer's memory: copy it before the next step.
    A rank beyond the last row has none and yields no shard."""
    constant: bool = False
    """Whether it is the same in every version, as what an adapter does not reach is."""


def rows_of(rank: int, world: int, rows: int) -> tuple[int, int]:
    """First and last (exclusive) row of `rank` where `rows` are sharded over `world` ranks as FSDP2 does:
    chunks of `ceil(rows / world)`, the last ones shorter or empty."""
    chunk = -(-rows // world)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)
