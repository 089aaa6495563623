"""Packing: from trees to the micro-batches of every rank, with all denominators known beforehand.

    batch = pack(trees_of_rollouts(rollouts, advantages), ranks=2, token_budget=4096)
    for minibatch in batch.minibatches(cfg.epochs, cfg.minibatch_size, cfg.loss, seed=seed):
        ...

A target (one token of one sequence that is to be predicted) has a number in the batch, `Packed.index`, which
does not depend on how the batch was packed. In all modes the same targets with the same values come out; what
differs is how many tokens are computed for them.
"""

from collections.abc import Iterator, Sequence, Set

import numpy as np
import torch

from lockstep.algos.aggregation import sequence_weights
from lockstep.config.algorithm import Aggregation, CrossEntropy, PolicyLoss
from lockstep.data.balance import OverBudget, Packing, Piece, check_budget, schedule
from lockstep.data.batch import Minibatch, Packed
from lockstep.data.order import permutation
from lockstep.data.trees import Segment, Tree, trees_of_documents, trees_of_rollouts

__all__ = [
    "Batch",
    "OverBudget",
    "Packing",
    "Segment",
    "Tree",
    "pack",
    "trees_of_documents",
    "trees_of_rollouts",
]


class Batch:
    """The trees of a step, ready to be dealt to ranks as often as epochs, mini-batches and evaluations need.

    Attributes:
        trees: in the order given.
        fields: float32 `[targets]` each, by name; without `weight`, which belongs to a mini-batch.
        sequences: int32 `[targets]`: the sequence of each target.
    """

    def __init__(self, trees: Sequence[Tree], ranks: int, token_budget: int, mode: Packing) -> None:
        if ranks < 1 or token_budget < 1:
            raise ValueError(f"ranks is {ranks} and token_budget {token_budget}, expected at least 1 of both")
        if mode not in ("forest", "block", "single"):
            raise ValueError(f"packing mode is {mode!r}, expected forest, block or single")
        self.trees = list(trees)
        self.ranks, self.token_budget, self.mode = ranks, token_budget, mode
        self._first: list[list[int]] = []
        _check_trees(self.trees)
        check_budget(self.trees, token_budget)
        self._number()
        self._set: dict[str, np.ndarray] = {}

    def _number(self) -> None:
        """Numbers the targets: by tree, segment, term, token."""
        count, sequences = 0, []
        names = sorted({name for tree in self.trees for segment in tree.segments for name in segment.fields})
        values: dict[str, list[np.ndarray]] = {name: [] for name in names}
        bounds = [0]
        for tree in self.trees:
            self._first.append([])
            for segment in tree.segments:
                wanted, own = segment.wanted, segment.sequences
                self._first[-1].append(count)
                count += wanted.size * len(own)
                if wanted.size:
                    sequences.append(np.repeat(np.asarray(own, np.int32), wanted.size))
                    for name in names:
                        if name not in segment.fields:
                            raise ValueError(f"sample {tree.name!r} has no field {name!r}, which others have")
                        values[name].append(np.atleast_2d(segment.fields[name])[:, wanted].ravel())
            bounds.append(count)
        self._bounds = np.asarray(bounds)
        self.sequences = np.concatenate(sequences) if sequences else np.empty(0, np.int32)
        self.fields = {
            name: np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
            for name, parts in values.items()
        }

    @property
    def targets(self) -> int:
        """Number of targets."""
        return int(self.sequences.size)

    def minibatches(
        self,
        epochs: int = 1,
        minibatch_size: int | None = None,
        loss: PolicyLoss | CrossEntropy | None = None,
        *,
        seed: int = 0,
        max_tokens: int | None = None,
    ) -> Iterator[Minibatch]:
        """The optimizer steps of the batch.

        Mini-batches are made of whole trees. Their order is drawn from (seed, epoch), except where all trees go
        into one step anyway. Trees that cannot change a weight (`learns_from_advantages_alone`, and all advantages
        zero) are in no row; the denominators, and the steps, are what they are with them.

        Args:
            minibatch_size: sequences per optimizer step; all of them when None.
            loss: whose `aggregation` and `norm_length` become the weights; token-mean when None.
            max_tokens: divisor of `seq-mean-token-sum-norm` where the loss names none.

        Raises:
            ValueError: a mini-batch size that would cut a group.
        """
        aggregation: Aggregation = loss.aggregation if loss else "token-mean"
        norm_length = (loss.norm_length if loss else None) or max_tokens
        idle = self._idle() if loss is not None and learns_from_advantages_alone(loss) else frozenset()
        parts = self._split(np.arange(len(self.trees)), minibatch_size)
        for epoch in range(epochs):
            if len(parts) > 1:
                order = permutation(len(self.trees), seed, epoch)
                parts = self._split(order, minibatch_size)
            for part in parts:
                yield self._deal(part, aggregation, norm_length, idle)

    def _idle(self) -> frozenset[int]:
        """Trees in which every advantage is zero."""
        if "advantage" not in self.fields:
            return frozenset()
        some = np.concatenate([[0], np.cumsum(self.fields["advantage"] != 0)])
        return frozenset(np.flatnonzero(some[self._bounds[1:]] == some[self._bounds[:-1]]).tolist())

    def everything(self) -> Minibatch:
        """All trees as one mini-batch, for `evaluate`."""
        return self._deal(np.arange(len(self.trees)), "token-mean", None, frozenset())

    def set_field(self, name: str, minibatch: Minibatch, values: Sequence[Sequence[np.ndarray]]) -> None:
        """Puts per-target values that the ranks computed for `minibatch` back onto the targets.

        The field goes with every mini-batch that is made from now on. It may be set in parts; until it is there
        for all targets, no mini-batch can be made.

        Args:
            values: `[ranks][micro-batches]` arrays of float `[targets]`, as `Trainer.evaluate` returned them.

        Raises:
            ValueError: values that do not fit the mini-batch, naming rank and micro-batch.
        """
        if name == "weight":
            raise ValueError("the weights of targets follow from the aggregation and cannot be set")
        field = self.fields.setdefault(name, np.zeros(self.targets, np.float32))
        have = self._set.setdefault(name, np.zeros(self.targets, np.bool_))
        if len(values) != len(minibatch.ranks):
            raise ValueError(f"{name!r} has values of {len(values)} ranks, expected {len(minibatch.ranks)}")
        for rank, (rows, arrays) in enumerate(zip(minibatch.ranks, values, strict=True)):
            if len(rows) != len(arrays):
                raise ValueError(f"{name!r} has {len(arrays)} micro-batches of rank {rank}, expected {len(rows)}")
            for number, (row, array) in enumerate(zip(rows, arrays, strict=True)):
                if array.shape != row.index.shape:
                    raise ValueError(
                        f"{name!r} of rank {rank}, micro-batch {number} has shape {array.shape}, "
                        f"expected {row.index.shape}"
                    )
                real = row.index >= 0
                field[row.index[real]] = array[real]
                have[row.index[real]] = True

    def set_per_target(self, name: str, values: np.ndarray) -> None:
        """Gives every target its own value.

        Args:
            values: float `[targets]`, in the order of `sequences`: of one sequence, as it was written.

        Raises:
            ValueError: a wrong shape, or a value that is not finite.
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
        held = 0
        sizes = [tree.samples for tree in self.trees]
        if sizes and (max(sizes) > size or (min(sizes) == max(sizes) > 0 and size % max(sizes))):
            raise ValueError(
                f"minibatch_size is {size}, but groups have up to {max(sizes)} completions and are not cut: "
                f"use a multiple of {max(sizes)}"
            )
        for tree in order.tolist():
            if held + sizes[tree] > size:
                parts.append([])
                held = 0
            parts[-1].append(tree)
            held += sizes[tree]
        return [np.asarray(part) for part in parts]

    def _deal(self, order: np.ndarray, aggregation: Aggregation, norm_length: int | None, idle: Set[int]) -> Minibatch:
        for name, have in self._set.items():
            if not have.all():
                raise ValueError(f"field {name!r} is set for {int(have.sum())} of {self.targets} targets")
        # The order decides what shares an optimizer step, not where it lies in it.
        part = np.sort(order).tolist()
        busy = [(tree, self.trees[tree]) for tree in part if tree not in idle]
        hands = schedule(busy, self.ranks, self.token_budget, self.mode)
        ranks = [[self._row(pieces) for pieces in hand] for hand in hands]
        weights, targets, sequences = self._weights(part, aggregation, norm_length)
        for row in (row for hand in ranks for row in hand):
            if row.index[0] >= 0:
                row.fields["weight"] = weights[row.index]
        skipped = sum(len(self.trees[tree].sequences) for tree in part if tree in idle)
        return Minibatch(ranks, targets, sequences, skipped)

    def _weights(
        self, trees: Sequence[int], aggregation: Aggregation, norm_length: int | None
    ) -> tuple[np.ndarray, int, int]:
        """Weight of each target, float32 `[targets]`, 0 outside of `trees`; number of targets and sequences."""
        inside = np.zeros(self.targets, np.bool_)
        for tree in trees:
            inside[self._bounds[tree] : self._bounds[tree + 1]] = True
        numbers = self.sequences[inside]
        lengths = np.bincount(numbers)
        weights = np.zeros(self.targets, np.float32)
        weights[inside] = sequence_weights(torch.from_numpy(lengths), aggregation, norm_length).numpy()[numbers]
        return weights, int(inside.sum()), int(np.count_nonzero(lengths))

    def _row(self, pieces: Sequence[Piece]) -> Packed:
        if not pieces:
            return _empty_row([*self.fields, "weight"])
        tokens: list[np.ndarray] = []
        lengths: list[int] = []
        parents: list[int] = []
        sources, targets, index = [], [], []
        end = 0
        for piece in pieces:
            segments = self.trees[piece.tree].segments
            start: dict[int, int] = {}
            place: dict[int, int] = {-1: -1}
            if piece.path:
                lengths.append(piece.tokens)
                parents.append(-1)
            for position in piece.segments:
                segment = segments[position]
                start[position] = end
                end += segment.tokens.size
                tokens.append(segment.tokens)
                if not piece.path:
                    place[position] = len(lengths)
                    lengths.append(segment.tokens.size)
                    parents.append(place[segment.parent])
            for position, term in piece.terms:
                segment = segments[position]
                wanted = segment.wanted
                before = -1  # never taken: the first token of a root is no target
                if segment.parent >= 0:
                    before = start[segment.parent] + segments[segment.parent].tokens.size - 1
                sources.append(np.where(wanted == 0, before, start[position] + wanted - 1))
                targets.append(segment.tokens[wanted])
                first = self._first[piece.tree][position] + term * wanted.size
                index.append(np.arange(first, first + wanted.size, dtype=np.int64))
        where = np.concatenate(index)
        return Packed(
            tokens=np.concatenate(tokens).astype(np.int32),
            lengths=np.asarray(lengths, np.int32),
            parents=np.asarray(parents, np.int32),
            sources=np.concatenate(sources).astype(np.int32),
            targets=np.concatenate(targets).astype(np.int32),
            index=where,
            fields={name: values[where] for name, values in self.fields.items()},
            sequences=self.sequences[where],
        )


def _empty_row(names: Sequence[str]) -> Packed:
    """One token of weight zero: a rank without work enters the same collectives as the others."""
    zero = np.zeros(1, np.int32)
    return Packed(
        tokens=zero,
        lengths=np.ones(1, np.int32),
        parents=np.full(1, -1, np.int32),
        sources=zero.copy(),
        targets=zero.copy(),
        index=np.full(1, -1, np.int64),
        fields={name: np.zeros(1, np.float32) for name in names},
        sequences=np.full(1, -1, np.int32),
    )


def learns_from_advantages_alone(loss: PolicyLoss | CrossEntropy) -> bool:
    """Whether a target whose advantage is zero has no gradient: policy losses are multiples of the advantage, a KL or
    an entropy in the loss is not."""
    kl = isinstance(loss, PolicyLoss) and loss.kl.coefficient > 0 and loss.kl.where == "loss"
    return isinstance(loss, PolicyLoss) and not kl and not loss.entropy_coefficient


def _check_trees(trees: Sequence[Tree]) -> None:
    owner: dict[int, str] = {}
    for tree in trees:
        tree.check()
        for sequence in tree.sequences:
            if sequence in owner:
                raise ValueError(f"samples {owner[sequence]!r} and {tree.name!r} both have sequence {sequence}")
            owner[sequence] = tree.name
        last: dict[int, int] = {}
        for position, segment in enumerate(tree.segments):
            for sequence in segment.sequences:
                if sequence in last and last[sequence] not in tree.path(position):
                    raise ValueError(f"sequence {sequence} of sample {tree.name!r} is not one path of its tree")
                last[sequence] = position


def pack(trees: Sequence[Tree], ranks: int, token_budget: int, mode: Packing = "forest") -> Batch:
    """A batch of trees for `ranks` ranks, in rows of at most `token_budget` tokens.

    Args:
        mode: `forest` computes a shared prompt once (a tree over the budget is cut, its ancestors repeated);
            `block` gives every sequence its own prompt, many sequences to a row; `single` one sequence per row.

    Raises:
        OverBudget: a sequence longer than the budget.
        ValueError: trees that are none.
    """
    return Batch(trees, ranks, token_budget, mode)
