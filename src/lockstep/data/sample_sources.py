"""Prompts and documents in the order of a run: a pure function of (seed, position)."""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data import DatasetConfig
from lockstep.data.chat_templates import TemplateRenderer
from lockstep.data.dataset_format import DatasetFormat, DatasetSample
from lockstep.data.dataset_rows import BadRow, DataError, DatasetRows
from lockstep.data.samples import Document, Prompt

_SPLITMIX_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SPLITMIX_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): uint64 to uint64, one to one."""
    values = (values ^ (values >> np.uint64(30))) * _SPLITMIX_FACTORS[0]
    values = (values ^ (values >> np.uint64(27))) * _SPLITMIX_FACTORS[1]
    return np.asarray(values ^ (values >> np.uint64(31)), np.uint64)


def permutation(size: int, *key: int) -> np.ndarray:
    """int64 `[size]`: the numbers below `size` in an order that depends on the key alone.

    Not numpy's own, whose stream may change between versions (NEP 19): a resumed run must continue at its position.
    """
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _splitmix64(state + _SPLITMIX_INCREMENT + np.uint64(part % 2**64))
    return np.argsort(_splitmix64(state + _SPLITMIX_INCREMENT * np.arange(1, size + 1, dtype=np.uint64)), kind="stable")


class EpochOrder:
    """The row at each position, over epochs.

    Args:
        rows: int `[rows]`, the rows that are used.
        shuffle: a new order in every epoch; as they stand when False.
    """

    def __init__(self, rows: np.ndarray, seed: int, shuffle: bool) -> None:
        if rows.size == 0:
            raise ValueError("an order needs at least one row")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        # Two: a step may reach from one epoch into the next.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> np.ndarray:
        return self.rows[permutation(self.rows.size, self.seed, epoch)] if self.shuffle else self.rows

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """(epoch, row) of `count` positions from `start` on; crosses epochs.

        Raises:
            ValueError: a negative position or count.
        """
        if start < 0 or count < 0:
            raise ValueError(f"cannot take {count} rows at position {start}")
        found = []
        for position in range(start, start + count):
            epoch, place = divmod(position, self.rows.size)
            found.append((epoch, int(self._epoch(epoch)[place])))
        return found


def make_uid(epoch: int, row: int) -> str:
    return f"{epoch}:{row}"


def parse_uid(text: str) -> tuple[int, int]:
    """(epoch, row) of a uid; ValueError where it is none."""
    epoch, _, row = text.partition(":")
    if not (epoch.isdecimal() and row.isdecimal()):
        raise ValueError(f"{text!r} is not a uid, expected EPOCH:ROW")
    return int(epoch), int(row)


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

logger = logging.getLogger(__name__)

MEASURED_ROWS = 512
"""Rows that are tokenized together while lengths are checked."""


class PromptSource:
    """Prompts of a dataset, rendered and tokenized when they are taken.

    All rows are read and measured once at the beginning, so that bad data is refused before anything starts.

    Args:
        seed: with the epoch, decides the order where `cfg.shuffle`.
        max_prompt_tokens: longest prompt that leaves room for a completion.
        answers: whether every row must have an answer, as a verifier compares with it.
        tools, open_turn: as `TemplateRenderer` takes them.

    Raises:
        DataError: a row that cannot be used, or with `overlong: error` one that is too long.
        TokenizerError: the tokenizer lacks what the data needs.
    """

    def __init__(
        self,
        rows: DatasetRows,
        cfg: DatasetConfig,
        tokenizer: "Tokenizer",
        seed: int,
        max_prompt_tokens: int,
        answers: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        open_turn: bool = True,
    ) -> None:
        self._rows, self._limit, self._answers = rows, max_prompt_tokens, answers
        self._format = DatasetFormat(rows, cfg)
        self._renderer = TemplateRenderer(tokenizer, cfg, tools, open_turn)
        kept = select_fitting_rows(rows, self._lengths, max_prompt_tokens, cfg.overlong, "prompt")
        self.dropped = len(rows) - kept.size
        """Rows left out because they are too long."""
        self._order = EpochOrder(kept, seed, cfg.shuffle)

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return int(self._order.rows.size)

    def _sample(self, row: int) -> DatasetSample:
        sample = self._format.read(row)
        if self._format.name == "text" and isinstance(sample.completion, str):
            sample.prompt = sample.completion
        if self._answers and sample.answer is None:
            remedy = "The reward compares with it: set data.answer_column, or leave the row out."
            raise self._rows.data_error(row, BadRow(None, "there is no answer", remedy))
        return sample

    def _text(self, row: int) -> tuple[DatasetSample, str, bool]:
        sample = self._sample(row)
        try:
            return sample, self._renderer.prompt(sample), self._renderer.is_chat(sample.prompt)
        except BadRow as bad:
            raise self._rows.data_error(row, bad) from bad

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        rendered = [self._text(row)[1:] for row in rows]
        return self._renderer.count([text for text, _ in rendered], [chat for _, chat in rendered])

    def prompt(self, row: int, epoch: int = 0) -> Prompt:
        """The prompt of a row of the data."""
        sample, text, chat = self._text(row)
        tokens = self._renderer.encode(text, chat)
        if not 0 < tokens.size <= self._limit:
            raise self._rows.data_error(row, length_problem("prompt", tokens.size, self._limit))
        messages = None if isinstance(sample.prompt, str) else sample.prompt
        return Prompt(make_uid(epoch, row), row, tokens, text, messages, sample.answer, sample.columns)

    def named(self, name: str) -> Prompt:
        """The prompt of a uid."""
        epoch, row = parse_uid(name)
        return self.prompt(row, epoch)

    def take(self, start: int, count: int) -> list[Prompt]:
        """`count` prompts from position `start` on, which is the number of prompts used before.
        Crosses epochs."""
        return [self.prompt(row, epoch) for epoch, row in self._order.take(start, count)]


def length_problem(what: str, tokens: int, limit: int) -> BadRow:
    if tokens == 0:
        return BadRow(None, f"the {what} has no tokens", "Fill it in, or leave the row out.")
    room = "raise token_budget (or model.max_length)"
    if what == "prompt":
        room += ", or lower rollout.sampling.max_tokens"
    problem = f"the {what} has {tokens} tokens, more than the {limit} that fit"
    return BadRow(None, problem, f"Set data.overlong to drop, {room}.")


def select_fitting_rows(
    rows: DatasetRows, lengths: Callable[[Sequence[int]], list[int]], limit: int, overlong: str, what: str
) -> np.ndarray:
    """int64, the rows that have at least one and at most `limit` tokens.

    Args:
        lengths: tokens of each of the given rows.

    Raises:
        DataError: a row that cannot be used, a longer one with `overlong="error"`, or all are longer.
    """
    kept: list[int] = []
    for begin in range(0, len(rows), MEASURED_ROWS):
        chosen = range(begin, min(begin + MEASURED_ROWS, len(rows)))
        for row, tokens in zip(chosen, lengths(chosen), strict=True):
            if tokens == 0 or (tokens > limit and overlong == "error"):
                raise rows.data_error(row, length_problem(what, tokens, limit))
            if tokens <= limit:
                kept.append(row)
        if begin and begin % (100 * MEASURED_ROWS) == 0:
            logger.info("%s: %d of %d rows measured", rows.path, begin, len(rows))
    long = len(rows) - len(kept)
    if not kept:
        remedy = "Raise model.max_length or choose other data."
        raise DataError(rows.path, f"each of the {long} rows is longer than {limit} tokens", remedy)
    if long:
        logger.warning("%s: %d of %d rows are longer than %d tokens and dropped", rows.path, long, len(rows), limit)
    return np.asarray(kept, np.int64)


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


CHECKED_ROWS = 64
"""Rows whose masks are made at the beginning, to find a template that does not mark the assistant's turns."""

TOKEN_SLACK = 16
"""A text of prompt and answer gets an end-of-sequence token, and a few more tokens where merges across the prompt's
end are undone; counted exactly where it matters."""


class DocumentSource:
    """Documents of a dataset, rendered and tokenized when they are taken.

    Answers and completions that are plain text end with the end-of-sequence token; conversations end as their
    template defines. The targets are answers, completions or assistant turns; with `train_on_prompt` all tokens.

    Args:
        seed: with the epoch, decides the order where `cfg.shuffle`.
        max_length: longest document, in tokens.

    Raises:
        DataError: a row that cannot be used, or with `overlong: error` one that is too long.
        TokenizerError: the tokenizer lacks what the data needs.
    """

    def __init__(
        self,
        rows: DatasetRows,
        cfg: DatasetConfig,
        tokenizer: "Tokenizer",
        seed: int,
        max_length: int,
        train_on_prompt: bool = False,
    ) -> None:
        self._rows, self._limit, self._whole = rows, max_length, train_on_prompt
        self._format = DatasetFormat(rows, cfg)
        self._renderer = TemplateRenderer(tokenizer, cfg)
        if self._format.name == "text" and cfg.chat:
            raise ValueError("data.chat is true, but documents of format text have no turns: remove data.chat")
        for row in range(min(len(rows), CHECKED_ROWS)):
            self._tokens(row)
        kept = select_fitting_rows(rows, self._lengths, max_length, cfg.overlong, "document")
        self.dropped = len(rows) - kept.size
        """Rows left out because they are too long."""
        self._order = EpochOrder(kept, seed, cfg.shuffle)

    def __len__(self) -> int:
        """Documents of one epoch."""
        return int(self._order.rows.size)

    def _sample(self, row: int) -> DatasetSample:
        sample = self._format.read(row)
        turns = sample.prompt if sample.learn_history and isinstance(sample.prompt, list) else []
        if not sample.completion and not any(turn["role"] == "assistant" for turn in turns):
            remedy = "Supervised fine-tuning needs an answer, a completion or assistant turns."
            raise self._rows.data_error(row, BadRow(None, "there is nothing to learn", remedy))
        return sample

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        texts, chat = [], []
        for row in rows:
            sample = self._sample(row)
            try:
                texts.append(self._renderer.document(sample))
                chat.append(self._renderer.is_chat(sample.prompt))
            except BadRow as bad:
                raise self._rows.data_error(row, bad) from bad
        lengths = self._renderer.count(texts, chat)
        for n, row in enumerate(rows):
            if not chat[n] and abs(lengths[n] - self._limit) <= TOKEN_SLACK:
                lengths[n] = self._tokens(row)[0].size
        return lengths

    def _tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self._renderer.tokens_of_document(self._sample(row))
        except BadRow as bad:
            raise self._rows.data_error(row, bad) from bad

    def document(self, row: int, epoch: int = 0) -> Document:
        """The document of a row of the data."""
        tokens, learned = self._tokens(row)
        if not 0 < tokens.size <= self._limit:
            raise self._rows.data_error(row, length_problem("document", tokens.size, self._limit))
        if self._whole:
            learned = np.arange(tokens.size) > 0
        return Document(make_uid(epoch, row), row, tokens, learned)

    def named(self, name: str) -> Document:
        """The document of a uid."""
        epoch, row = parse_uid(name)
        return self.document(row, epoch)

    def take(self, start: int, count: int) -> list[Document]:
        """`count` documents from position `start` on, which is the number used before. Crosses
        epochs."""
        return [self.document(row, epoch) for epoch, row in self._order.take(start, count)]
