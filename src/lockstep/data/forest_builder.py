"""Builds the trees of a training step from rollouts or documents."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.data.forest import Forest, Segment, concatenated_ranges
from lockstep.data.samples import Completion, Document, Group, LabelledCompletion, Pair, PlacedImage, Rollouts


def forest_from_rollouts(
    rollouts: Rollouts,
    advantages: npt.ArrayLike | None = None,
    mask_truncated: bool = False,
    chosen: np.ndarray | None = None,
) -> Forest:
    """Builds one tree per group: the prompt is the root, and completions are its children. Completions that begin with
    the same turns share segments for these turns, with the following turns as children.

    Sequence `g * G + k` is completion k of group g. A turn that several completions share has one term for each of
    them; tokens that an environment wrote are no targets. A completion without tokens gets no segment.

    Args:
        rollouts: groups of equal size G.
        advantages: float `[groups, G]`, or `[groups, G, longest completion]` for one value per token; None if they are
            set later (`TrainingBatch.set_per_target`).
        mask_truncated: leave out completions that ended at the limit of tokens.
        chosen: bool `[groups, G]`: which completions to build; None: all. A group without any has only its prompt.

    Raises:
        ValueError: shapes do not match, or an advantage is not finite.
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
    learned = [
        (number, completion)
        for number, completion in enumerate(each for group in rollouts.groups for each in group.completions)
        if not (mask_truncated and completion.finish == "length") and (chosen is None or chosen.flat[number])
    ]
    if any(completion.mask is not None for _, completion in learned):
        trees = _multi_turn_trees(rollouts.groups, size, dict(learned), values)
        forest = Forest.of(trees, [group.prompt.uid for group in rollouts.groups], [size] * len(rollouts.groups))
        forest.fields.setdefault("engine_logprob", np.empty(0, np.float32))
        return forest
    return _single_turn_forest(rollouts.groups, size, learned, values)


def forest_of_states(rollouts: Rollouts) -> Forest:
    """Builds the trees of `forest_from_rollouts` with one more target after the last token of each completion that was
    cut off. Its source is that token, so that a score there is one of the text up to the completion's end."""

    def extended(completion: Completion) -> Completion:
        if completion.finish != "length":
            return completion
        return msgspec.structs.replace(
            completion,
            tokens=np.append(completion.tokens, np.int32(0)),
            logprobs=np.append(completion.logprobs, np.float32(0)),
            versions=np.append(completion.versions, np.int32(-1)),
            mask=None if completion.mask is None else np.append(completion.mask, True),
        )

    groups = [replace(each, completions=[extended(one) for one in each.completions]) for each in rollouts.groups]
    return forest_from_rollouts(replace(rollouts, groups=groups))


def _single_turn_forest(
    groups: Sequence[Group], size: int, learned: Sequence[tuple[int, Completion]], advantages: np.ndarray | None
) -> Forest:
    """Builds the forest of groups without environments: each completion is a child of its prompt."""
    for _, completion in learned:
        if len(completion.logprobs) != len(completion.tokens):
            _raise_logprobs_mismatch(completion)
    nonempty = [(number, completion) for number, completion in learned if len(completion.tokens)]
    numbers = np.asarray([number for number, _ in nonempty], np.int64)
    prompts = [group.prompt.tokens for group in groups]
    if not all(map(len, prompts)):
        empty_prompt = next(group.prompt.uid for group in groups if not len(group.prompt.tokens))
        raise ValueError(f"segment 0 of sample {empty_prompt!r} has no tokens")
    owner = numbers // max(size, 1)
    # A prompt comes before its completions, which keep their order.
    tree = np.concatenate([np.arange(len(groups)), owner])
    order = np.argsort(tree, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    parts = [*prompts, *(completion.tokens for _, completion in nonempty)]
    length = np.asarray([len(part) for part in parts], np.int64)
    completion_lengths = length[len(groups) :]
    target_count = np.concatenate([np.zeros(len(groups), np.int64), completion_lengths])[order]
    fields: dict[str, np.ndarray] = {}
    if nonempty and advantages is not None:
        flat = advantages.reshape(len(groups) * size, -1)[numbers]
        fields["advantage"] = (
            np.repeat(flat[:, 0], completion_lengths)
            if advantages.ndim == 2
            else _first_values(flat, completion_lengths)
        )
    logprobs = [np.empty(0, np.float32), *(np.asarray(each.logprobs, np.float32) for _, each in nonempty)]
    fields["engine_logprob"] = np.concatenate(logprobs)  # present also where nothing is learned
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
        images={int(place[g]): each.prompt.images for g, each in enumerate(groups) if each.prompt.images} or None,
    )


def _first_values(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenates the first `sizes` values of each row of `[rows, width]`. Raises ValueError if a row has fewer."""
    if sizes.max(initial=0) > values.shape[1]:
        raise ValueError(f"there are advantages for {values.shape[1]} tokens, but a completion has {sizes.max()}")
    return np.asarray(values[np.arange(values.shape[1]) < sizes[:, None]])


def _raise_logprobs_mismatch(completion: Completion) -> NoReturn:
    raise ValueError(
        f"completion {completion.request!r} has {len(completion.logprobs)} log-probabilities for "
        f"{len(completion.tokens)} tokens"
    )


def _multi_turn_trees(
    groups: Sequence[Group], size: int, learned: Mapping[int, Completion], advantages: np.ndarray | None
) -> list[list[Segment]]:
    """Builds the trees of groups with environments: completions share segments for the turns with which all begin."""
    trees = []
    for g, group in enumerate(groups):
        terms = [
            _SequenceTerm(g * size + k, learned[g * size + k], None if advantages is None else advantages[g, k])
            for k in range(size)
            if g * size + k in learned
        ]
        segments = [Segment(np.asarray(group.prompt.tokens, np.int32), images=group.prompt.images)]
        _add_segments(segments, 0, 0, [term for term in terms if term.tokens.size])
        trees.append(segments)
    return trees


class _SequenceTerm:
    """A completion to add to a tree: its per-token values, its images, and where its turns end."""

    def __init__(self, sequence: int, completion: Completion, advantage: np.ndarray | None) -> None:
        self.sequence = sequence
        self.tokens = np.asarray(completion.tokens, np.int32)
        size = self.tokens.size
        if len(completion.logprobs) != size:
            _raise_logprobs_mismatch(completion)
        if completion.mask is not None and completion.mask.shape != (size,):
            raise ValueError(
                f"completion {completion.request!r} has a mask of shape {completion.mask.shape} for {size} tokens"
            )
        for image in completion.images:
            if completion.mask is None or image.places[-1] >= size or completion.mask[image.places].any():
                raise ValueError(
                    f"completion {completion.request!r} has image {image.digest} at places {image.places[0]} to "
                    f"{image.places[-1]}, which are not all among the tokens of an environment"
                )
        self.images = completion.images
        self.can_share = completion.mask is not None
        self.mask = np.ones(size, np.bool_) if completion.mask is None else completion.mask
        self.fields = {"engine_logprob": np.asarray(completion.logprobs, np.float32)}
        if advantage is not None:
            one = advantage.ndim == 0
            self.fields["advantage"] = np.full(size, advantage, np.float32) if one else advantage[:size]
        self.ends = [*(np.flatnonzero(np.diff(self.mask)) + 1).tolist(), size]

    def turn(self, start: int) -> tuple[object, int]:
        """Returns the tokens, mask and images from `start` to the end of the turn, to compare with other completions,
        and that end."""
        end = next(end for end in self.ends if end > start)
        images = tuple((image.digest, image.places.tobytes()) for image in self.images_between(start, end))
        return (self.tokens[start:end].tobytes(), self.mask[start:end].tobytes(), images), end

    def images_between(self, start: int, end: int) -> list[PlacedImage]:
        """Returns the images in these tokens, with places from `start` on. No turn ends inside an image."""
        return [image.moved(-start) for image in self.images if start <= image.places[0] < end]


def _add_segments(segments: list[Segment], parent: int, start: int, terms: Sequence[_SequenceTerm]) -> None:
    """Adds the tokens from `start` on, of completions that are equal before `start`, as descendants of `parent`.

    Only completions with a mask share segments: completions of a single turn differ after a few tokens, and cutting
    them there would cost more than it saves.
    """
    groups_by_turn: dict[object, list[_SequenceTerm]] = {}
    for term in terms:
        key = term.turn(start)[0] if term.can_share else term.sequence
        groups_by_turn.setdefault(key, []).append(term)
    for members in groups_by_turn.values():
        end = _common_end(members, start)
        first = members[0]
        fields = {name: np.stack([each.fields[name][start:end] for each in members]) for name in first.fields}
        if len(members) == 1:
            fields = {name: values[0] for name, values in fields.items()}
        numbers = tuple(each.sequence for each in members)
        segments.append(
            Segment(
                first.tokens[start:end],
                parent,
                first.mask[start:end],
                fields,
                numbers[0] if len(numbers) == 1 else numbers,
                first.images_between(start, end),
            )
        )
        _add_segments(segments, len(segments) - 1, end, [each for each in members if each.tokens.size > end])


def _common_end(members: Sequence[_SequenceTerm], start: int) -> int:
    """Returns the end of the turns that all members have in common."""
    if len(members) == 1:
        return int(members[0].tokens.size)
    end = start
    while all(each.tokens.size > end for each in members):
        pieces = {each.turn(end) for each in members}
        if len(pieces) > 1:
            break
        end = pieces.pop()[1]
    return end


def forest_from_documents(documents: Sequence[Document]) -> Forest:
    """Builds one tree of a single segment per document; sequence i is document i.

    Raises:
        ValueError: a mask has another length than its tokens, or marks the first token as a target.
    """
    trees = []
    for number, document in enumerate(documents):
        mask = np.asarray(document.loss_mask, np.bool_)
        tokens = np.asarray(document.tokens, np.int32)
        trees.append([Segment(tokens, -1, mask, {}, number, document.images)])
    return Forest.of(trees, [document.uid for document in documents])


def forest_from_pairs(pairs: Sequence[Pair], learn_prompts: bool = False) -> Forest:
    """Builds one tree per pair: the prompt is the root, and both completions are its children. Sequence 2i is the
    better completion of pair i, 2i + 1 the worse one.

    Args:
        learn_prompts: the tokens of prompts, without those of images, are targets too, of the better completions'
            sequences; the field `in_prompt` is 1 for them and 0 for others.
    """
    trees = []
    for number, pair in enumerate(pairs):
        sides = [
            (pair.chosen, pair.chosen_mask, 2 * number, pair.chosen_images),
            (pair.rejected, pair.rejected_mask, 2 * number + 1, pair.rejected_images),
        ]
        if learn_prompts:
            learned = np.arange(pair.prompt.size) > 0
            for image in pair.images:
                learned[image.places] = False
            in_prompt = np.ones(pair.prompt.size, np.float32)
            root = Segment(pair.prompt, -1, learned, {"in_prompt": in_prompt}, 2 * number, pair.images)
        else:
            root = Segment(pair.prompt, images=pair.images)
        trees.append([root])
        for tokens, mask, sequence, images in sides:
            fields = {"in_prompt": np.zeros(tokens.size, np.float32)} if learn_prompts else {}
            own = np.ones(tokens.size, np.bool_) if mask is None else mask
            trees[-1].append(Segment(tokens, 0, own, fields, sequence, images))
    return Forest.of(trees, [pair.uid for pair in pairs])


PLACEHOLDER = 0
"""The token whose place stands for the score of the text before it. It has no effect on that score."""


def forest_of_scored_pairs(pairs: Sequence[Pair]) -> Forest:
    """Builds one tree per pair, as `forest_from_pairs` does, with one target per completion: a placeholder after its
    last token, so that the target's source is that token. The field `margin` is the pair's margin."""
    trees = []
    for number, pair in enumerate(pairs):
        trees.append([Segment(pair.prompt, images=pair.images)])
        for tokens, sequence in ((pair.chosen, 2 * number), (pair.rejected, 2 * number + 1)):
            scored = np.append(tokens, np.int32(PLACEHOLDER))
            last = np.arange(scored.size) == tokens.size
            margin = np.full(scored.size, pair.margin, np.float32)
            trees[-1].append(Segment(scored, 0, last, {"margin": margin}, sequence))
    return Forest.of(trees, [pair.uid for pair in pairs])


def forest_of_scored_texts(texts: Sequence[np.ndarray], groups: Sequence[int], names: Sequence[str]) -> Forest:
    """Builds one tree per group of texts that begin with the same token: what all of them begin with is the root.
    Text i is sequence i, and has one target as in `forest_of_scored_pairs`.

    Args:
        texts: int32 `[tokens]` each, with at least one token.
        groups: the group of each text, ascending.
        names: the name of each text; trees have that of their first one.
    """
    trees: list[list[Segment]] = []
    of_tree: list[str] = []
    start = 0
    while start < len(texts):
        stop = start + 1
        while stop < len(texts) and groups[stop] == groups[start] and texts[stop][0] == texts[start][0]:
            stop += 1
        together = texts[start:stop]
        shared = _common_prefix(together)
        tree = [Segment(together[0][:shared])]
        for number, tokens in enumerate(together, start):
            scored = np.append(tokens[shared:], np.int32(PLACEHOLDER))
            tree.append(Segment(scored, 0, np.arange(scored.size) == scored.size - 1, {}, number))
        trees.append(tree)
        of_tree.append(names[start])
        start = stop
    return Forest.of(trees, of_tree)


def _common_prefix(texts: Sequence[np.ndarray]) -> int:
    """The number of tokens with which all texts begin."""
    shared = min(text.size for text in texts)
    for text in texts[1:]:
        differing = np.flatnonzero(text[:shared] != texts[0][:shared])
        shared = int(differing[0]) if differing.size else shared
    return shared


def forest_from_labelled(samples: Sequence[LabelledCompletion], mismatched: bool = False) -> Forest:
    """Builds one tree per completion with its prompt as the root; sequence i is completion i.

    Args:
        mismatched: each prompt gets the completion of the sample before it as well, the first one that of the last, as
            sequence n + i of n: what KTO's baseline is estimated from. It is cut where it would be longer with this
            prompt than the longest sample is, so that it fits wherever the samples fit.
    """
    trees = []
    longest = max((sample.prompt.size + sample.completion.size for sample in samples), default=0)
    for number, sample in enumerate(samples):
        sides = [(sample.completion, number)]
        if mismatched:
            other = samples[number - 1].completion[: longest - sample.prompt.size]
            sides.append((other, len(samples) + number))
        children = [Segment(tokens, 0, np.ones(tokens.size, np.bool_), {}, sequence) for tokens, sequence in sides]
        trees.append([Segment(sample.prompt, images=sample.images), *children])
    return Forest.of(trees, [sample.uid for sample in samples])
