"""Builds the trees that a step learns from: of rollouts and of documents."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from lockstep.data.forest import Forest, Segment, concatenated_ranges
from lockstep.data.samples import Completion, Document, Group, Rollouts


def forest_from_rollouts(
    rollouts: Rollouts, advantages: npt.ArrayLike | None = None, mask_truncated: bool = False
) -> Forest:
    """One tree per group: the prompt, and each completion as its child, or, where completions of several turns begin
    with the same ones, those once and what follows as their children.

    Sequence `g * G + k` is completion k of group g. A turn that several completions share carries one loss term for
    each of them; tokens that an environment wrote carry none. A completion without tokens has nothing to learn from
    and gets no segment.

    Args:
        rollouts: groups of equal size G.
        advantages: float `[groups, G]`, or `[groups, G, longest completion]` for one value per token; None where they
            are only known later (`TrainingBatch.set_per_target`).
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
    for group in rollouts.groups:
        if len(group.completions) != size:
            raise ValueError(
                f"group {group.prompt.uid!r} has {len(group.completions)} completions, expected {size} as in the others"
            )
    if values is not None and not np.isfinite(values).all():
        g = next(g for g in range(len(values)) if not np.isfinite(values[g]).all())
        raise ValueError(
            f"the advantages of group {rollouts.groups[g].prompt.uid!r} are not finite: {values[g].tolist()}"
        )
    given = [
        (number, completion)
        for number, completion in enumerate(each for group in rollouts.groups for each in group.completions)
        if not (mask_truncated and completion.finish == "length")
    ]
    if any(completion.mask is not None for _, completion in given):
        trees = _multi_turn_trees(rollouts.groups, size, dict(given), values)
        return Forest.of(trees, [group.prompt.uid for group in rollouts.groups], [size] * len(rollouts.groups))
    return _single_turn_forest(rollouts.groups, size, given, values)


def _single_turn_forest(
    groups: Sequence[Group], size: int, given: Sequence[tuple[int, Completion]], advantages: np.ndarray | None
) -> Forest:
    """Groups whose completions are entirely the model's: each completion is a child of its prompt."""
    for _, completion in given:
        if len(completion.logprobs) != len(completion.tokens):
            _refuse_logprobs(completion)
    some = [(number, completion) for number, completion in given if len(completion.tokens)]
    numbers = np.asarray([number for number, _ in some], np.int64)
    prompts = [group.prompt.tokens for group in groups]
    if not all(map(len, prompts)):
        lost = next(group.prompt.uid for group in groups if not len(group.prompt.tokens))
        raise ValueError(f"segment 0 of sample {lost!r} has no tokens")
    owner = numbers // max(size, 1)
    # A prompt comes before its completions, which keep their order.
    tree = np.concatenate([np.arange(len(groups)), owner])
    order = np.argsort(tree, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    parts = [*prompts, *(completion.tokens for _, completion in some)]
    length = np.asarray([len(part) for part in parts], np.int64)
    own = length[len(groups) :]
    target_count = np.concatenate([np.zeros(len(groups), np.int64), own])[order]
    fields: dict[str, np.ndarray] = {}
    if some and advantages is not None:
        flat = advantages.reshape(len(groups) * size, -1)[numbers]
        fields["advantage"] = np.repeat(flat[:, 0], own) if advantages.ndim == 2 else _first_values(flat, own)
    if some:
        fields["engine_logprob"] = np.concatenate([completion.logprobs for _, completion in some]).astype(np.float32)
    return Forest(
        names=[group.prompt.uid for group in groups],
        samples=np.full(len(groups), size, np.int64),
        tree=tree[order],
        parent=np.concatenate([np.full(len(groups), -1), place[owner]])[order],
        length=length[order],
        tokens=np.concatenate([np.empty(0, np.int32), *(parts[each] for each in order.tolist())]).astype(np.int32),
        target_count=target_count,
        target_offset=concatenated_ranges(np.zeros(len(order), np.int64), target_count),
        term_segment=place[len(groups) :],
        term_sequence=numbers.astype(np.int32),
        fields=fields,
    )


def _first_values(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The first `sizes` values of each row of `[rows, width]`, concatenated. ValueError where a row has fewer."""
    if sizes.max(initial=0) > values.shape[1]:
        raise ValueError(f"there are advantages for {values.shape[1]} tokens, and a completion of {sizes.max()}")
    return np.asarray(values[np.arange(values.shape[1]) < sizes[:, None]])


def _refuse_logprobs(completion: Completion) -> NoReturn:
    raise ValueError(
        f"completion {completion.request!r} has {len(completion.logprobs)} log-probabilities for "
        f"{len(completion.tokens)} tokens"
    )


def _multi_turn_trees(
    groups: Sequence[Group], size: int, given: Mapping[int, Completion], advantages: np.ndarray | None
) -> list[list[Segment]]:
    """Groups with turns: common beginnings of completions become one segment."""
    trees = []
    for g, group in enumerate(groups):
        terms = [
            _SequenceTerm(g * size + k, given[g * size + k], None if advantages is None else advantages[g, k])
            for k in range(size)
            if g * size + k in given
        ]
        segments = [Segment(np.asarray(group.prompt.tokens, np.int32))]
        _add_segments(segments, 0, 0, [term for term in terms if term.tokens.size])
        trees.append(segments)
    return trees


class _SequenceTerm:
    """A completion to add to a tree: its values and where its turns end."""

    def __init__(self, sequence: int, completion: Completion, advantage: np.ndarray | None) -> None:
        self.sequence = sequence
        self.tokens = np.asarray(completion.tokens, np.int32)
        size = self.tokens.size
        if len(completion.logprobs) != size:
            _refuse_logprobs(completion)
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
        """The tokens from `start` to the next change of writer, to compare with other completions."""
        end = next(end for end in self.ends if end > start)
        return self.tokens[start:end].tobytes(), self.mask[start:end].tobytes(), end


def _add_segments(segments: list[Segment], parent: int, start: int, terms: Sequence[_SequenceTerm]) -> None:
    """Adds what follows `start` in the given completions, which are equal before it, below `parent`.

    Only completions with a mask are compared: those of one turn differ within a few tokens, and cutting them there
    would cost more than it saves.
    """
    alike: dict[object, list[_SequenceTerm]] = {}
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
        _add_segments(segments, len(segments) - 1, end, [each for each in members if each.tokens.size > end])


def _common_end(members: Sequence[_SequenceTerm], start: int) -> int:
    """Where the members begin to differ: at the end of a piece, or of all of them."""
    if len(members) == 1:
        return int(members[0].tokens.size)
    end = start
    while all(each.tokens.size > end for each in members):
        pieces = {each.piece(end) for each in members}
        if len(pieces) > 1:
            break
        end = pieces.pop()[2]
    return end


def forest_from_documents(documents: Sequence[Document]) -> Forest:
    """One tree of one segment per document; sequence i is document i.

    Raises:
        ValueError: a mask that does not fit, or has the first token as a target.
    """
    trees = []
    for number, document in enumerate(documents):
        mask = np.asarray(document.loss_mask, np.bool_)
        trees.append([Segment(np.asarray(document.tokens, np.int32), -1, mask, {}, number)])
    return Forest.of(trees, [document.uid for document in documents])
