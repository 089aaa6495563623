"""Prompts in the order of a run: a pure function of (seed, position)."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data import Dataset
from lockstep.data.datasets import BadRow, DataError, Rows
from lockstep.data.formats import Format, Sample
from lockstep.data.order import Order, parse_uid, uid
from lockstep.data.samples import Prompt
from lockstep.data.templates import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

logger = logging.getLogger(__name__)

BATCH = 512
"""Rows that are tokenized together while lengths are checked."""


class PromptSource:
    """Prompts of a data set, rendered and tokenized when they are taken.

    All rows are read and measured once at the beginning, so that bad data is refused before anything starts.

    Args:
        seed: with the epoch, decides the order where `cfg.shuffle`.
        max_prompt_tokens: longest prompt that leaves room for a completion.
        answers: whether every row must have an answer, as a verifier compares with it.
        tools, open_turn: as `Renderer` takes them.

    Raises:
        DataError: a row that cannot be used, or with `overlong: error` one that is too long.
        TokenizerError: the tokenizer lacks what the data needs.
    """

    def __init__(
        self,
        rows: Rows,
        cfg: Dataset,
        tokenizer: "Tokenizer",
        seed: int,
        max_prompt_tokens: int,
        answers: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        open_turn: bool = True,
    ) -> None:
        self._rows, self._limit, self._answers = rows, max_prompt_tokens, answers
        self._format = Format(rows, cfg)
        self._renderer = Renderer(tokenizer, cfg, tools, open_turn)
        kept = fitting(rows, self._lengths, max_prompt_tokens, cfg.overlong, "prompt")
        self.dropped = len(rows) - kept.size
        """Rows left out because they are too long."""
        self._order = Order(kept, seed, cfg.shuffle)

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return int(self._order.rows.size)

    def _sample(self, row: int) -> Sample:
        sample = self._format.read(row)
        if self._format.name == "text" and isinstance(sample.completion, str):
            sample.prompt = sample.completion
        if self._answers and sample.answer is None:
            remedy = "The reward compares with it: set data.answer_column, or leave the row out."
            raise self._rows.refuse(row, BadRow(None, "there is no answer", remedy))
        return sample

    def _text(self, row: int) -> tuple[Sample, str, bool]:
        sample = self._sample(row)
        try:
            return sample, self._renderer.prompt(sample), self._renderer.is_chat(sample.prompt)
        except BadRow as bad:
            raise self._rows.refuse(row, bad) from bad

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        rendered = [self._text(row)[1:] for row in rows]
        return self._renderer.count([text for text, _ in rendered], [chat for _, chat in rendered])

    def prompt(self, row: int, epoch: int = 0) -> Prompt:
        """The prompt of a row of the data."""
        sample, text, chat = self._text(row)
        tokens = self._renderer.encode(text, chat)
        if not 0 < tokens.size <= self._limit:
            raise self._rows.refuse(row, length_problem("prompt", tokens.size, self._limit))
        messages = None if isinstance(sample.prompt, str) else sample.prompt
        return Prompt(uid(epoch, row), row, tokens, text, messages, sample.answer, sample.columns)

    def named(self, name: str) -> Prompt:
        """The prompt of a uid."""
        epoch, row = parse_uid(name)
        return self.prompt(row, epoch)

    def take(self, start: int, count: int) -> list[Prompt]:
        """`count` prompts from position `start` on, which is the number of prompts used before. Crosses epochs."""
        return [self.prompt(row, epoch) for epoch, row in self._order.take(start, count)]


def length_problem(what: str, tokens: int, limit: int) -> BadRow:
    if tokens == 0:
        return BadRow(None, f"the {what} has no tokens", "Fill it in, or leave the row out.")
    room = "raise token_budget (or model.max_length)"
    if what == "prompt":
        room += ", or lower rollout.sampling.max_tokens"
    problem = f"the {what} has {tokens} tokens, more than the {limit} that fit"
    return BadRow(None, problem, f"Set data.overlong to drop, {room}.")


def fitting(
    rows: Rows, lengths: Callable[[Sequence[int]], list[int]], limit: int, overlong: str, what: str
) -> np.ndarray:
    """int64, the rows that have at least one and at most `limit` tokens.

    Args:
        lengths: tokens of each of the given rows.

    Raises:
        DataError: a row that cannot be used, a longer one with `overlong="error"`, or all are longer.
    """
    kept: list[int] = []
    for begin in range(0, len(rows), BATCH):
        chosen = range(begin, min(begin + BATCH, len(rows)))
        for row, tokens in zip(chosen, lengths(chosen), strict=True):
            if tokens == 0 or (tokens > limit and overlong == "error"):
                raise rows.refuse(row, length_problem(what, tokens, limit))
            if tokens <= limit:
                kept.append(row)
        if begin and begin % (100 * BATCH) == 0:
            logger.info("%s: %d of %d rows measured", rows.path, begin, len(rows))
    long = len(rows) - len(kept)
    if not kept:
        remedy = "Raise model.max_length or choose other data."
        raise DataError(rows.path, f"each of the {long} rows is longer than {limit} tokens", remedy)
    if long:
        logger.warning("%s: %d of %d rows are longer than %d tokens and dropped", rows.path, long, len(rows), limit)
    return np.asarray(kept, np.int64)
