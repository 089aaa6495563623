"""Documents of supervised fine-tuning in the order of a run: a pure function of (seed, position)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lockstep.config.data import Dataset
from lockstep.data.datasets import BadRow, Rows
from lockstep.data.formats import Format, Sample
from lockstep.data.order import Order, parse_uid, uid
from lockstep.data.prompts import fitting, length_problem
from lockstep.data.samples import Document
from lockstep.data.templates import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


CHECKED = 64
"""Rows whose masks are made at the beginning, to find a template that does not tell the assistant's turns."""

SLACK = 16
"""A text of prompt and answer gets an end-of-sequence token, and a few more tokens where merges across the prompt's
end are undone; how many is looked at where it matters."""


class DocumentSource:
    """Documents of a data set, rendered and tokenized when they are taken.

    Answers and completions that are plain text end with the end-of-sequence token; conversations end as their
    template says. Learned are answers, completions or assistant turns; with `train_on_prompt` everything.

    Args:
        seed: with the epoch, decides the order where `cfg.shuffle`.
        max_length: longest document, in tokens.

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
        max_length: int,
        train_on_prompt: bool = False,
    ) -> None:
        self._rows, self._limit, self._whole = rows, max_length, train_on_prompt
        self._format = Format(rows, cfg)
        self._renderer = Renderer(tokenizer, cfg)
        if self._format.name == "text" and cfg.chat:
            raise ValueError("data.chat is true, but documents of format text have no turns: remove data.chat")
        for row in range(min(len(rows), CHECKED)):
            self._tokens(row)
        kept = fitting(rows, self._lengths, max_length, cfg.overlong, "document")
        self.dropped = len(rows) - kept.size
        """Rows left out because they are too long."""
        self._order = Order(kept, seed, cfg.shuffle)

    def __len__(self) -> int:
        """Documents of one epoch."""
        return int(self._order.rows.size)

    def _sample(self, row: int) -> Sample:
        sample = self._format.read(row)
        turns = sample.prompt if sample.learn_history and isinstance(sample.prompt, list) else []
        if not sample.completion and not any(turn["role"] == "assistant" for turn in turns):
            remedy = "Supervised fine-tuning needs an answer, a completion or assistant turns."
            raise self._rows.refuse(row, BadRow(None, "there is nothing to learn", remedy))
        return sample

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        texts, chat = [], []
        for row in rows:
            sample = self._sample(row)
            try:
                texts.append(self._renderer.document(sample))
                chat.append(self._renderer.is_chat(sample.prompt))
            except BadRow as bad:
                raise self._rows.refuse(row, bad) from bad
        lengths = self._renderer.count(texts, chat)
        for n, row in enumerate(rows):
            if not chat[n] and abs(lengths[n] - self._limit) <= SLACK:
                lengths[n] = self._tokens(row)[0].size
        return lengths

    def _tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self._renderer.tokens_of_document(self._sample(row))
        except BadRow as bad:
            raise self._rows.refuse(row, bad) from bad

    def document(self, row: int, epoch: int = 0) -> Document:
        """The document of a row of the data."""
        tokens, learned = self._tokens(row)
        if not 0 < tokens.size <= self._limit:
            raise self._rows.refuse(row, length_problem("document", tokens.size, self._limit))
        if self._whole:
            learned = np.arange(tokens.size) > 0
        return Document(uid(epoch, row), row, tokens, learned)

    def named(self, name: str) -> Document:
        """The document of a uid."""
        epoch, row = parse_uid(name)
        return self.document(row, epoch)

    def take(self, start: int, count: int) -> list[Document]:
        """`count` documents from position `start` on, which is the number used before. Crosses epochs."""
        return [self.document(row, epoch) for epoch, row in self._order.take(start, count)]
