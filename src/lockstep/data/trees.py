"""What is packed: trees of segments, made from rollouts or documents.

A sequence is a path from a root to a segment. Sequences that begin alike share the segments they have in
common, so that these are computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lockstep.data.samples import Completion, Document, Rollouts


@dataclass(slots=True)
class Segment:
    """A run of tokens that stays together; its context is its ancestors."""

    tokens: np.ndarray
    """int32 `[tokens]`."""
    parent: int = -1
    """Index of the parent in the tree, smaller than the own one; -1 for the root."""
    loss_mask: np.ndarray | None = None
    """bool `[tokens]`: which tokens are to be predicted; None means none of them."""
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    """Per-token values, float32 `[tokens]`, or `[terms, tokens]` where the segment belongs to several sequences."""
    sequence: int | tuple[int, ...] = ()
    """The batch's numbers of the sequences that these tokens' losses belong to. A turn shared by three branches
    carries three loss terms, one for each of them."""

    @property
    def sequences(self) -> tuple[int, ...]:
        return (self.sequence,) if isinstance(self.sequence, int) else self.sequence

    @property
    def wanted(self) -> np.ndarray:
        """int64 `[targets of one term]`: which of the tokens are to be predicted."""
        if self.loss_mask is None or not self.sequences:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.loss_mask)


@dataclass(slots=True)
class Tree:
    """One prompt with its completions, a document, or a conversation with branches."""

    segments: list[Segment]
    name: str = ""
    """What errors call it: the sample's uid."""
    size: int | None = None
    """How many samples of a mini-batch it counts for; the number of its sequences when None."""

    @property
    def samples(self) -> int:
        return len(self.sequences) if self.size is None else self.size

    @property
    def sequences(self) -> list[int]:
        """The numbers of its sequences, in order of appearance."""
        return list(dict.fromkeys(number for segment in self.segments for number in segment.sequences))

    def path(self, segment: int) -> list[int]:
        """The segments from the root to the given one."""
        found = [segment]
        while (parent := self.segments[found[-1]].parent) >= 0:
            found.append(parent)
        return found[::-1]

    def check(self) -> None:
        """Raises ValueError where the tree is not one, or a target has no token that could predict it."""
        for index, segment in enumerate(self.segments):
            where = f"segment {index} of sample {self.name!r}"
            if segment.tokens.size == 0:
                raise ValueError(f"{where} has no tokens")
            if not -1 <= segment.parent < index:
                raise ValueError(f"{where} has parent {segment.parent}, expected -1 or an earlier segment")
            if segment.loss_mask is not None and segment.loss_mask.shape != segment.tokens.shape:
                raise ValueError(
                    f"{where} has a loss mask of shape {segment.loss_mask.shape} for {segment.tokens.size} tokens"
                )
            if segment.parent < 0 and segment.wanted.size and segment.wanted[0] == 0:
                raise ValueError(f"{where} wants its first token predicted, but nothing precedes it")
            shapes: list[tuple[int, ...]] = [(len(segment.sequences), segment.tokens.size)]
            if len(segment.sequences) == 1:
                shapes.append((segment.tokens.size,))
            for name, values in segment.fields.items():
                if values.shape not in shapes:
                    raise ValueError(f"{where} has field {name!r} of shape {values.shape}, expected {shapes[-1]}")


def trees_of_rollouts(
    rollouts: Rollouts, advantages: npt.ArrayLike | None = None, mask_truncated: bool = False
) -> list[Tree]:
    """One tree per group: the prompt, and each completion as its child, or, where completions of several turns begin
    with the same ones, those once and what follows as their children.

    Sequence `g * G + k` is completion k of group g. A turn that several completions share carries one loss term for
    each of them; tokens that an environment wrote carry none. A completion without tokens has nothing to learn from
    and gets no segment.

    Args:
        rollouts: groups of equal size G.
        advantages: float `[groups, G]`, or `[groups, G, longest completion]` for one value per token; None where they
            are only known later (`Batch.set_per_target`).
        mask_truncated: leave out completions that a limit of tokens cut.

    Raises:
        ValueError: shapes that do not match, or an advantage that is not finite.
    """
    values = None if advantages is None else np.asarray(advantages, dtype=np.float32)
    size = len(rollouts.groups[0].completions) if rollouts.groups else 0
    if values is not None and (values.shape[:2] != (len(rollouts.groups), size) or values.ndim not in (2, 3)):
        raise ValueError(
            f"advantages have shape {values.shape}, expected [{len(rollouts.groups)} groups, {size} completions]"
        )
    trees = []
    for g, group in enumerate(rollouts.groups):
        uid = group.prompt.uid
        if len(group.completions) != size:
            raise ValueError(
                f"group {uid!r} has {len(group.completions)} completions, expected {size} as in the others"
            )
        if values is not None and not np.isfinite(values[g]).all():
            raise ValueError(f"the advantages of group {uid!r} are not finite: {values[g].tolist()}")
        terms = [
            _Term(g * size + k, completion, None if values is None else values[g, k])
            for k, completion in enumerate(group.completions)
            if not (mask_truncated and completion.finish == "length")
        ]
        segments = [Segment(np.asarray(group.prompt.tokens, np.int32))]
        _grow(segments, 0, 0, [term for term in terms if term.tokens.size])
        trees.append(Tree(segments, uid, size))
    return trees


class _Term:
    """A completion on its way into a tree: its numbers, and where its turns end."""

    def __init__(self, sequence: int, completion: Completion, advantage: np.ndarray | None) -> None:
        self.sequence = sequence
        self.tokens = np.asarray(completion.tokens, np.int32)
        size = self.tokens.size
        if len(completion.logprobs) != size:
            raise ValueError(
                f"completion {completion.request!r} has {len(completion.logprobs)} log-probabilities for {size} tokens"
            )
        if completion.mask is not None and completion.mask.shape != (size,):
            raise ValueError(
                f"completion {completion.request!r} has a mask of shape {completion.mask.shape} for {size} tokens"
            )
        self.shares = completion.mask is not None
        self.mask = np.ones(size, np.bool_) if completion.mask is None else completion.mask
        self.fields = {"engine_logprob": np.asarray(completion.logprobs, np.float32)}
        if advantage is not None:
            one = advantage.ndim == 0
            self.fields["advantage"] = np.full(size, advantage, np.float32) if one else advantage[:size]
        self.ends = [*(np.flatnonzero(np.diff(self.mask)) + 1).tolist(), size]

    def piece(self, start: int) -> tuple[bytes, bytes, int]:
        """The tokens from `start` to the next change of who writes, to be compared with others'."""
        end = next(end for end in self.ends if end > start)
        return self.tokens[start:end].tobytes(), self.mask[start:end].tobytes(), end


def _grow(segments: list[Segment], parent: int, start: int, terms: Sequence[_Term]) -> None:
    """Adds what follows `start` in the given completions, which are alike before it, below `parent`.

    Only completions with a mask are compared: those of one turn differ within a few tokens, and cutting them there
    would cost more than it saves.
    """
    alike: dict[object, list[_Term]] = {}
    for term in terms:
        key = term.piece(start)[:2] if term.shares else term.sequence
        alike.setdefault(key, []).append(term)
    for members in alike.values():
        end = _common_end(members, start)
        one = members[0]
        fields = {name: np.stack([each.fields[name][start:end] for each in members]) for name in one.fields}
        if len(members) == 1:
            fields = {name: values[0] for name, values in fields.items()}
        numbers = tuple(each.sequence for each in members)
        segments.append(
            Segment(
                one.tokens[start:end],
                parent,
                one.mask[start:end],
                fields,
                numbers[0] if len(numbers) == 1 else numbers,
            )
        )
        _grow(segments, len(segments) - 1, end, [each for each in members if each.tokens.size > end])


def _common_end(members: Sequence[_Term], start: int) -> int:
    """Where the members stop being alike: at the end of a piece, or of all of them."""
    if len(members) == 1:
        return int(members[0].tokens.size)
    end = start
    while all(each.tokens.size > end for each in members):
        pieces = {each.piece(end) for each in members}
        if len(pieces) > 1:
            break
        end = pieces.pop()[2]
    return end


def trees_of_documents(documents: Sequence[Document]) -> list[Tree]:
    """One tree of one segment per document; sequence i is document i.

    Raises:
        ValueError: a mask that does not fit, or one that wants the first token predicted.
    """
    trees = []
    for number, document in enumerate(documents):
        mask = np.asarray(document.loss_mask, np.bool_)
        trees.append(Tree([Segment(np.asarray(document.tokens, np.int32), -1, mask, {}, number)], document.uid))
    return trees
