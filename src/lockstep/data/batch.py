"""What goes to a trainer: packed rows, micro-batches per rank, mini-batches."""

from dataclasses import dataclass, field

import numpy as np

from lockstep.data.layout import Layout


@dataclass(slots=True)
class Packed:
    """One micro-batch of one rank: a forest row with the targets that are to be predicted in it.

    A target is a pair: the token at `sources[i]` predicts `targets[i]`. The last token of a prompt is the
    source of the first target of each of its completions.
    """

    tokens: np.ndarray
    """int32 `[tokens]`."""
    lengths: np.ndarray
    """int32 `[segments]`."""
    parents: np.ndarray
    """int32 `[segments]`."""
    sources: np.ndarray
    """int32 `[targets]`: index of a token in this row."""
    targets: np.ndarray
    """int32 `[targets]`: token ids."""
    index: np.ndarray
    """int64 `[targets]`: where the target's value belongs in the flat per-target arrays of the batch; -1 in
    an empty micro-batch."""
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    """Per-target values, float32 `[targets]`. `weight` is always there: the factor of the target's loss, with
    the aggregation and its denominator inside, so that a step's loss is a plain sum over all targets of all
    ranks. GRPO adds `advantage`, `engine_logprob`, and where needed `old_logprob`, `reference_logprob`."""
    sequences: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32 `[targets]`: the batch's number of the sequence that each target belongs to; -1 in an empty
    micro-batch. `pack` always fills it; a row made by hand may leave it empty."""

    @property
    def layout(self) -> Layout:
        return Layout(self.lengths.tolist(), self.parents.tolist())


@dataclass(slots=True)
class Minibatch:
    """One optimizer step: for each rank the same number of micro-batches."""

    ranks: list[list[Packed]]
    targets: int
    """Targets with a loss, over all ranks."""
    sequences: int
    skipped: int = 0
    """Sequences of these that are in no row, because nothing is to be learned from their groups."""

    @property
    def microbatches(self) -> int:
        """Micro-batches of every rank."""
        return len(self.ranks[0])
