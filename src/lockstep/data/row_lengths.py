"""The longest sample that fits, which setting limits it, and the rows that fit."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.base.text import count_noun
from lockstep.data.dataset_rows import BadRow, DataError, DatasetRows

logger = logging.getLogger(__name__)

MEASURED_ROWS = 512
"""Number of rows that are tokenized together to measure their lengths."""
CHECKED_ROWS = 64
"""Number of rows that are tokenized with their masks first, to find a template that does not mark assistant turns."""
TOKEN_SLACK = 16
"""The tokens of plain text are counted approximately at first, because a document has an end-of-sequence token, and
more tokens where prompt and answer are tokenized apart. Lengths this close to the limit are counted exactly."""
MEASURED_FIRST = 1000
"""Rows that are measured before the run starts when the others are measured only once they are used."""
MOST_MEASURED = 200_000
"""Most prompts that `data.measure: auto` measures before the run starts."""


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The most tokens that a sample may have."""

    tokens: int
    reason: str = ""
    """Which settings limit it, such as `token_budget 64 less rollout.sampling.max_tokens 32`."""
    remedy: str = ""
    """Which settings to change, as the beginning of a sentence: `Raise token_budget`."""
    field: str = "data"
    """The section of the dataset."""


class OverlongRow(BadRow):
    """A row with too many tokens."""


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """One of the limits of prompt and completion together."""

    tokens: int
    reason: str
    remedy: str


def limit_length(contexts: Sequence[ContextLimit], completion: tuple[str, int] | None, field: str) -> LengthLimit:
    """The limit of a sample under several limits, of which the smallest count.

    Args:
        completion: the setting with the tokens of a completion, which need room beside a prompt, and its value.
        field: the section of the dataset.
    """
    tokens = min(each.tokens for each in contexts)
    binding = [each for each in contexts if each.tokens == tokens]
    reason = " and ".join(each.reason for each in binding)
    remedy = " and ".join(dict.fromkeys(each.remedy for each in binding))
    if completion is None:
        return LengthLimit(tokens, reason, remedy, field)
    name, room = completion
    return LengthLimit(tokens - room, f"{reason}, less {name} {room}", f"{remedy}, or lower {name}", field)


def length_problem(what: str, tokens: int, limit: LengthLimit) -> BadRow:
    """The error about a row without tokens, or with too many."""
    if tokens == 0:
        return BadRow(None, f"the {what} has no tokens", "Fill it in, or leave the row out.")
    why = f" ({limit.reason})" if limit.reason else ""
    problem = f"the {what} has {tokens} tokens, more than the {limit.tokens} that fit{why}"
    others = f"{_sentence(limit.remedy)}, or set" if limit.remedy else "Set"
    return OverlongRow(None, problem, f"{others} {limit.field}.overlong to drop.")


def rows_to_measure(rows: DatasetRows, usable: np.ndarray, measure: str, kind: str) -> np.ndarray:
    """Returns those of the usable rows that are read and measured before the run starts: all, or of many prompts
    `MEASURED_FIRST`, evenly spread. Raises DataError if `data.measure` is `used` for samples of another kind."""
    if kind != "prompt" and measure == "used":
        raise DataError(rows.path, f"measure: used is for prompts of text, not for {kind}s", "Set it to all or auto.")
    if kind != "prompt" or measure == "all" or (measure == "auto" and usable.size <= MOST_MEASURED):
        return usable
    return usable[:: -(-usable.size // MEASURED_FIRST)]


def select_fitting_rows(
    rows: DatasetRows,
    candidates: np.ndarray,
    lengths: Callable[[Sequence[int]], list[int]],
    limit: LengthLimit,
    overlong: str,
    what: str,
) -> np.ndarray:
    """Returns the numbers of the rows that fit, int64.

    Args:
        candidates: the rows to measure, int64.
        lengths: returns the number of tokens of each of the given rows.

    Raises:
        DataError: a row cannot be used or is empty, a row is longer and `overlong` is `error`, or all rows are longer.
    """
    kept: list[int] = []
    for begin in range(0, candidates.size, MEASURED_ROWS):
        chosen = candidates[begin : begin + MEASURED_ROWS].tolist()
        for row, tokens in zip(chosen, lengths(chosen), strict=True):
            if tokens == 0 or (tokens > limit.tokens and overlong == "error"):
                raise rows.data_error(row, length_problem(what, tokens, limit))
            if tokens <= limit.tokens:
                kept.append(row)
        if begin and begin % (100 * MEASURED_ROWS) == 0:
            logger.info("%s: %d of %d rows measured", rows.path, begin, candidates.size)
    long, fit = candidates.size - len(kept), count_noun(limit.tokens, "token")
    if not kept:
        why = f" ({limit.reason})" if limit.reason else ""
        subject = "the only row is" if long == 1 else f"each of the {count_noun(long, 'row')} is"
        remedy = f"{_sentence(limit.remedy)}, or choose other data." if limit.remedy else "Choose other data."
        raise DataError(rows.path, f"{subject} longer than {fit}{why}", remedy)
    if long:
        which = "rows" if candidates.size == len(rows) else "measured rows"
        logger.warning("%s: %d of %d %s are longer than %s and dropped", rows.path, long, candidates.size, which, fit)
    return np.asarray(kept, np.int64)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
