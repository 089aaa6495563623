"""Makes mini-batches for the ranks from the trees of a step.

    batch = pack(forest_from_rollouts(rollouts, advantages), ranks=2, token_budget=4096)
    for minibatch in batch.minibatches(cfg.epochs, cfg.minibatch_size, cfg.loss, seed=seed):
        ...

A target (a token to predict in one sequence) has a number in the batch, `MicroBatch.index`, which does not depend on
the packing mode. All modes yield the same targets with the same values; they differ in how many tokens are computed.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lockstep.algos.losses import sequence_weights
from lockstep.config.algorithm import Aggregation, ObjectiveConfig
from lockstep.data.arrangement.rank_arrangement import normalised_speeds
from lockstep.data.forest import Forest, concatenated_ranges
from lockstep.data.micro_batch import MiniBatch, build_mini_batch
from lockstep.data.packing import PackingMode, check_token_budget, plan_packing
from lockstep.data.sample_order import permutation


class TrainingBatch:
    """The trees of a step. Makes the mini-batches for its epochs and evaluations.

    Attributes:
        forest: the trees.
        fields: per-target values, float32 `[targets]` each, by name; without `weight`, which depends on the mini-batch.
        sequences: int32 `[targets]`: the sequence of each target.
    """

    def __init__(
        self, forest: Forest, ranks: int, token_budget: int, mode: PackingMode, whole_trees: bool = False,
        speeds: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        if ranks < 1 or token_budget < 1:
            raise ValueError(f"ranks is {ranks} and token_budget {token_budget}, expected at least 1 of both")
        if mode not in ("forest", "block", "single"):
            raise ValueError(f"packing mode is {mode!r}, expected forest, block or single")
        self.forest = forest
        self.ranks, self.token_budget, self.mode, self.whole_trees = ranks, token_budget, mode, whole_trees
        self.speeds = normalised_speeds(speeds, ranks)
        self.forest.check_sequences()
        check_token_budget(self.forest, token_budget)
        self.sequences, self.fields = self.forest.sequences, dict(self.forest.fields)
        self._is_set: dict[str, np.ndarray] = {}

    @property
    def targets(self) -> int:
        """Number of targets."""
        return int(self.sequences.size)

    def minibatches(
        self,
        epochs: int = 1,
        minibatch_size: int | None = None,
        objective: ObjectiveConfig | None = None,
        *,
        seed: int = 0,
        max_tokens: int | None = None,
    ) -> Iterator[MiniBatch]:
        """Yields the data of each optimizer step.

        Mini-batches consist of whole trees, in a random order given by (seed, epoch), unless all trees are in one step.
        Trees without a gradient (all advantages zero, and `zero_advantage_has_no_gradient`) are in no row, but count in
        denominators and steps.

        Args:
            minibatch_size: number of sequences per optimizer step; None: all.
            objective: its `aggregation` and `norm_length` determine the weights; None: token-mean.
            max_tokens: divisor of `seq-mean-token-sum-norm` if the loss has no `norm_length`.

        Raises:
            ValueError: the mini-batch size would split a group.
        """
        aggregation: Aggregation = objective.aggregation if objective else "token-mean"
        norm_length = (objective.norm_length if objective else None) or max_tokens
        skips = objective is not None and objective.zero_advantage_has_no_gradient
        without_gradient = self._zero_advantage_trees() if skips else np.zeros(len(self.forest), np.bool_)
        parts = self._split(np.arange(len(self.forest)), minibatch_size)
        for epoch in range(epochs):
            if len(parts) > 1:
                order = permutation(len(self.forest), seed, epoch)
                parts = self._split(order, minibatch_size)
            for part in parts:
                yield self._make_mini_batch(part, aggregation, norm_length, without_gradient)

    def _zero_advantage_trees(self) -> np.ndarray:
        """Returns whether all advantages of each tree are zero, bool `[trees]`."""
        if "advantage" not in self.fields:
            return np.zeros(len(self.forest), np.bool_)
        some = np.concatenate([[0], np.cumsum(self.fields["advantage"] != 0)])
        bounds = self.forest.tree_bounds
        return np.asarray(some[bounds[1:]] == some[bounds[:-1]])

    def everything(self, mode: PackingMode | None = None) -> MiniBatch:
        """Returns all trees as one mini-batch, for evaluation.

        Args:
            mode: the packing mode, for another model than the one that the batch was packed for.
        """
        no_skips = np.zeros(len(self.forest), np.bool_)
        return self._make_mini_batch(np.arange(len(self.forest)), "token-mean", None, no_skips, mode)

    def set_field(self, name: str, minibatch: MiniBatch, values: Sequence[Sequence[np.ndarray]]) -> None:
        """Stores per-target values that the ranks computed for `minibatch`.

        Later mini-batches include the field. It may be set in several calls; before it is set for all targets, no
        mini-batch can be made.

        Args:
            values: `[ranks][micro-batches]` arrays of float `[targets]`, as `Trainer.evaluate` returns them.

        Raises:
            ValueError: the shapes of the values do not match the mini-batch. Names rank and micro-batch.
        """
        if name == "weight":
            raise ValueError("the weights of targets follow from the aggregation and cannot be set")
        field = self.fields.setdefault(name, np.zeros(self.targets, np.float32))
        is_set = self._is_set.setdefault(name, np.zeros(self.targets, np.bool_))
        if len(values) != minibatch.ranks:
            raise ValueError(f"{name!r} has values of {len(values)} ranks, expected {minibatch.ranks}")
        sizes = iter(np.diff(minibatch.target_bounds).tolist())
        for rank, arrays in enumerate(values):
            if len(arrays) != minibatch.microbatches:
                raise ValueError(
                    f"{name!r} has {len(arrays)} micro-batches of rank {rank}, expected {minibatch.microbatches}"
                )
            for number, (array, size) in enumerate(zip(arrays, sizes, strict=False)):
                if array.shape != (size,):
                    raise ValueError(
                        f"{name!r} of rank {rank}, micro-batch {number} has shape {array.shape}, expected {(size,)}"
                    )
        index = minibatch.columns.index
        real = index >= 0
        field[index[real]] = np.concatenate([array for arrays in values for array in arrays])[real]
        is_set[index[real]] = True

    def set_per_target(self, name: str, values: np.ndarray) -> None:
        """Sets a field for all targets.

        Args:
            values: float `[targets]`, in the order of `sequences`; within a sequence in the order of its tokens.

        Raises:
            ValueError: the shape is wrong, or a value is not finite.
        """
        if name == "weight":
            raise ValueError("the weights of targets follow from the aggregation and cannot be set")
        flat = np.asarray(values, np.float32)
        if flat.shape != (self.targets,):
            raise ValueError(
                f"{name!r} has values of shape {flat.shape}, expected one for each of {self.targets} targets"
            )
        if not np.isfinite(flat).all():
            sequence = int(self.sequences[np.flatnonzero(~np.isfinite(flat))[0]])
            raise ValueError(f"{name!r} is not finite for sequence {sequence}")
        self.fields[name] = flat

    def _split(self, order: np.ndarray, size: int | None) -> list[np.ndarray]:
        if size is None:
            return [order]
        parts: list[list[int]] = [[]]
        sequences_in_part = 0
        sizes = self.forest.samples.tolist()
        if sizes and (max(sizes) > size or (min(sizes) == max(sizes) > 0 and size % max(sizes))):
            raise ValueError(
                f"minibatch_size is {size}, but groups have up to {max(sizes)} completions and are not split: "
                f"use a multiple of {max(sizes)}"
            )
        for tree in order.tolist():
            if sequences_in_part + sizes[tree] > size:
                parts.append([])
                sequences_in_part = 0
            parts[-1].append(tree)
            sequences_in_part += sizes[tree]
        return [np.asarray(part) for part in parts]

    def _make_mini_batch(
        self,
        order: np.ndarray,
        aggregation: Aggregation,
        norm_length: int | None,
        without_gradient: np.ndarray,
        mode: PackingMode | None = None,
    ) -> MiniBatch:
        for name, is_set in self._is_set.items():
            if not is_set.all():
                raise ValueError(f"field {name!r} is set for {int(is_set.sum())} of {self.targets} targets")
        # The order only decides which trees share an optimizer step, not their order within it.
        part = np.sort(order)
        packed = part[~without_gradient[part]]
        how = self.token_budget, mode or self.mode, self.whole_trees, self.speeds
        plan = plan_packing(self.forest, packed, self.ranks, *how)
        weights, targets, sequences = self._weights(part, aggregation, norm_length)
        minibatch = build_mini_batch(plan, self.forest, {**self.fields, "weight": weights})
        minibatch.targets, minibatch.sequences = targets, sequences
        minibatch.skipped = int(self.forest.sequences_of_tree[part[without_gradient[part]]].sum())
        return minibatch

    def _weights(
        self, trees: np.ndarray, aggregation: Aggregation, norm_length: int | None
    ) -> tuple[np.ndarray, int, int]:
        """Returns the weight of each target, float32 `[targets]`, 0 outside of `trees`; then the numbers of targets and
        sequences in `trees`."""
        bounds = self.forest.tree_bounds
        inside = concatenated_ranges(bounds[trees], np.diff(bounds)[trees])
        numbers = self.sequences[inside]
        lengths = np.bincount(numbers)
        weights = np.zeros(self.targets, np.float32)
        weights[inside] = sequence_weights(torch.from_numpy(lengths), aggregation, norm_length).numpy()[numbers]
        return weights, len(inside), int(np.count_nonzero(lengths))


def pack(
    forest: Forest,
    ranks: int,
    token_budget: int,
    mode: PackingMode = "forest",
    whole_trees: bool = False,
    speeds: Sequence[float] | None = None,
) -> TrainingBatch:
    """Makes a batch of trees for `ranks` ranks, in rows of at most `token_budget` tokens.

    Args:
        whole_trees: cut no tree that fits into a row, also where smaller pieces would be divided better among ranks.
        mode: `forest` computes a shared prompt once (a tree over the budget is cut, and its pieces repeat the prompt);
            `block` repeats the prompt for every sequence and has several sequences per row; `single` has one.
        speeds: of the ranks, relative to each other: faster ones get more of the work. None: all are equally fast.

    Raises:
        TokenBudgetExceeded: a sequence is longer than the budget.
        ValueError: a sequence is not a single path, or there is not one positive speed for each rank.
    """
    return TrainingBatch(forest, ranks, token_budget, mode, whole_trees, speeds)
