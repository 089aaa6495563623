"""Pairs of completions to compare, and completions with a label, in the order of a run."""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lockstep.base.text import count_noun
from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_format import Content, DatasetSample
from lockstep.data.dataset_rows import BadRow, DataError, DatasetRows, name_hint
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_order import make_uid
from lockstep.data.sample_sources import DatasetSource
from lockstep.data.samples import LabelledCompletion, Pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from lockstep.data.images.image_loader import ImageLoader

logger = logging.getLogger(__name__)


class PairSource(DatasetSource[Pair]):
    """The pairs of a dataset; see `DatasetSource`. Pairs with an empty completion, or with two equal ones, are left
    out. With `overlong: truncate`, completions that do not fit are cut, and still end with the end-of-sequence token if
    they did before, as OpenRLHF does it; pairs are left out whose prompt leaves no room for a completion, or that are
    equal up to the cut.

    Args:
        margins: read the column `margin`.
    """

    kind = "pair"

    def __init__(
        self,
        rows: DatasetRows,
        cfg: DatasetConfig,
        tokenizer: "Tokenizer",
        seed: int,
        limit: LengthLimit,
        margins: bool = False,
        images: "ImageLoader | None" = None,
    ) -> None:
        if margins and MARGIN_COLUMN not in rows.columns:
            remedy = f"{name_hint(MARGIN_COLUMN, rows.columns)} Or set loss.use_margin to false."
            raise DataError(rows.path, "there is no such column", remedy, column=MARGIN_COLUMN)
        self._margins, self._truncates = margins, cfg.overlong == "truncate"
        self._eos = tokenizer.eos_token_id
        cfg = cfg if cfg.format != "auto" else cfg.model_copy(update={"format": "preference"})
        if cfg.format != "preference":
            raise ValueError(f"data.format {cfg.format} has no pairs: leave it out, or set it to preference")
        self.longest_pair = 0
        """Number of tokens of the longest pair: prompt and both completions."""
        self.truncated = 0
        """Number of pairs with a completion that is cut."""
        super().__init__(rows, cfg, tokenizer, seed, limit, images=images)
        if self.truncated:
            size = count_noun(limit.tokens, "token")
            logger.warning("%s: %d of %d pairs are cut to %s", self.path, self.truncated, len(rows), size)

    def sample(self, row: int, epoch: int = 0) -> Pair:
        sample, prompt, (chosen, rejected), places = self._tokens(row)
        if self._truncates:
            chosen, rejected = (self._cut(prompt, side) for side in (chosen, rejected))
        self._check_length(row, prompt.size + max(chosen.size, rejected.size))
        images = self._placed(row, sample, places)
        return Pair(make_uid(epoch, row), row, prompt, chosen, rejected, self._margin(row), images=images)

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        lengths = []
        for row in rows:
            if _has_empty_side(self._format.read(row)):
                lengths.append(1)  # it is left out for another reason than its length
                continue
            _, prompt, (chosen, rejected), _ = self._tokens(row)
            lengths.append(prompt.size + max(chosen.size, rejected.size))
            self._margin(row)
            if lengths[-1] > self._limit.tokens and self._truncates:
                lengths[-1] = self._cut_length(prompt, chosen, rejected)
            if lengths[-1] <= self._limit.tokens:
                sides = (min(side.size, self._limit.tokens - prompt.size) for side in (chosen, rejected))
                self.longest_pair = max(self.longest_pair, int(prompt.size + sum(sides)))
        return lengths

    def _cut_length(self, prompt: np.ndarray, chosen: np.ndarray, rejected: np.ndarray) -> int:
        """The length of a pair that is cut; more than fits if nothing useful is left of it."""
        if prompt.size < self._limit.tokens - 1:
            better, worse = self._cut(prompt, chosen), self._cut(prompt, rejected)
            if not np.array_equal(better, worse):
                self.truncated += 1
                return int(prompt.size + max(better.size, worse.size))
        return self._limit.tokens + 1

    def _cut(self, prompt: np.ndarray, completion: np.ndarray) -> np.ndarray:
        """The completion as far as it fits, with the end-of-sequence token at its end if it had one."""
        room = self._limit.tokens - prompt.size
        if completion.size <= room:
            return completion
        if completion[-1] != self._eos:  # the chat template writes none
            return completion[:room]
        return np.append(completion[: room - 1], np.int32(self._eos))

    def _margin(self, row: int) -> float:
        """The pair's margin; 0 if margins are not used."""
        if not self._margins:
            return 0.0
        value = self._format.read(row).columns.get(MARGIN_COLUMN)
        try:
            margin = float(str(value))
        except ValueError:
            margin = math.nan
        if not math.isfinite(margin):
            bad = BadRow(MARGIN_COLUMN, f"expected a number, found {value!r}", "Write a number, or leave the row out.")
            raise self._rows.data_error(row, bad)
        return margin

    def _select_useful(self, rows: np.ndarray) -> np.ndarray:
        samples = [self._format.read(int(row)) for row in rows]
        empty = np.array([_has_empty_side(each) for each in samples], np.bool_)
        equal = np.array([each.completion == each.rejected for each in samples], np.bool_) & ~empty
        for found, what in ((empty, "an empty completion"), (equal, "two equal completions")):
            if found.any():
                logger.warning("%s: %d of %d pairs have %s and are dropped", self.path, found.sum(), len(rows), what)
        if (empty | equal).all():
            raise DataError(self.path, "no pair has two different completions", "Choose other data.")
        return np.asarray(rows[~(empty | equal)])

    def _tokens(self, row: int) -> tuple[DatasetSample, np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """Returns the sample, its prompt's tokens and those of both completions, and the places of its images."""
        sample = self._read(row)
        try:
            return sample, *self._renderer.tokens_of_completions(sample, (sample.completion, sample.rejected))
        except BadRow as bad:
            raise self._rows.data_error(row, bad) from bad


class LabelledSource(DatasetSource[LabelledCompletion]):
    """Completions with a label, `true` where they are desirable; see `DatasetSource`. An empty one is an error."""

    kind = "completion"

    def __init__(
        self,
        rows: DatasetRows,
        cfg: DatasetConfig,
        tokenizer: "Tokenizer",
        seed: int,
        limit: LengthLimit,
        images: "ImageLoader | None" = None,
    ) -> None:
        if LABEL_COLUMN not in rows.columns:
            remedy = f"{name_hint(LABEL_COLUMN, rows.columns)} Pairs (chosen, rejected) have losses of their own."
            raise DataError(rows.path, "there is no such column", remedy, column=LABEL_COLUMN)
        as_completions = cfg.model_copy(update={"format": "prompt_completion"})
        super().__init__(rows, as_completions, tokenizer, seed, limit, images=images)

    def sample(self, row: int, epoch: int = 0) -> LabelledCompletion:
        sample, prompt, completion, places = self._tokens(row)
        self._check_length(row, prompt.size + completion.size)
        images = self._placed(row, sample, places)
        return LabelledCompletion(make_uid(epoch, row), row, prompt, completion, self._label(row, sample), images)

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        lengths = []
        for row in rows:
            sample, prompt, completion, _ = self._tokens(row)
            self._label(row, sample)
            lengths.append(int(prompt.size + completion.size))
        return lengths

    def _label(self, row: int, sample: DatasetSample) -> bool:
        label = _LABELS.get(str(sample.columns.get(LABEL_COLUMN)).lower())
        if label is None:
            found = sample.columns.get(LABEL_COLUMN)
            bad = BadRow(LABEL_COLUMN, f"expected true or false, found {found!r}", "Write true or false.")
            raise self._rows.data_error(row, bad)
        return label

    def _tokens(self, row: int) -> tuple[DatasetSample, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Returns the sample, its prompt's tokens and its completion's, and the places of its images."""
        sample = self._read(row)
        try:
            prompt, (completion,), places = self._renderer.tokens_of_completions(sample, [sample.completion])
        except BadRow as bad:
            raise self._rows.data_error(row, bad) from bad
        return sample, prompt, completion, places


LABEL_COLUMN, MARGIN_COLUMN = "label", "margin"
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Also those of CSV files, whose values are text, and of columns with gaps, whose numbers are floats."""


def _has_empty_side(pair: DatasetSample) -> bool:
    return not (_text_in(pair.completion) and _text_in(pair.rejected))


def _text_in(completion: Content | None) -> bool:
    """Whether a completion has anything to say."""
    if isinstance(completion, str):
        return bool(completion)
    return any(turn.get("content") or turn.get("tool_calls") for turn in completion or [])
