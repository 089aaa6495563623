"""Prompts, documents and pairs in the order of a run."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from lockstep.config.data import DatasetConfig
from lockstep.data import row_lengths
from lockstep.data.chat_templates import TemplateRenderer
from lockstep.data.dataset_format import DatasetFormat, DatasetSample
from lockstep.data.dataset_rows import BadRow, DataError, DatasetRows
from lockstep.data.images.image_content import UnusableImage
from lockstep.data.images.image_usage import ImageTally, ImageUsage
from lockstep.data.images.video_text import write_videos
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_order import EpochOrder, SampleOrder, make_uid, parse_uid, permutation
from lockstep.data.samples import Document, LabelledCompletion, Pair, PlacedImage, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from lockstep.data.images.image_loader import ImageLoader

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample", Prompt, Document, Pair, LabelledCompletion)

HOLD_OUT_KEY = 0x686F6C64
"""Makes the choice of held-out rows independent of the order of an epoch."""


class SampleSource(ABC, Generic[Sample]):
    """Samples in the order of a run."""

    dropped: int
    """Number of rows that are left out: too long, or pairs that teach nothing."""
    _order: SampleOrder

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples in an epoch."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of the data that samples keep."""

    @property
    @abstractmethod
    def parts(self) -> tuple["DatasetSource[Sample]", ...]:
        """The datasets."""

    @abstractmethod
    def hold_out(self, fraction: float) -> list[Sample]:
        """Takes a share of the samples out of the order, and returns them; the same ones for the same data and seed.

        Raises:
            DataError: nothing would be left to train on.
        """

    @abstractmethod
    def sample(self, row: int, epoch: int = 0) -> Sample:
        """Returns the sample of a row of the data."""

    def counts(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Metrics of a step: how many of its samples each dataset of a mixture gave."""
        return {}

    def usable_by_uid(self, uid: str) -> Sample | None:
        """Returns the sample with this uid, as `usable_sample`."""
        epoch, row = parse_uid(uid)
        return self.usable_sample(row, epoch)

    def take(self, start: int, count: int) -> list[Sample]:
        """Returns `count` samples from position `start` on, the number of samples used before. Crosses epochs.

        If the config says so, rows with unusable images and overlong rows that were not measured are left out.
        """
        if not self.has_images:
            places = self._order.take(start, count)
            return [each for epoch, row in places if (each := self.usable_sample(row, epoch)) is not None]
        taken = self._order.take(start, 2 * count)
        now = [row for _, row in taken[:count]]
        self.prefetch(now)
        samples = [each for epoch, row in taken[:count] if (each := self.usable_sample(row, epoch)) is not None]
        following = dict.fromkeys(row for _, row in taken[count:])
        self.prefetch([row for row in following if row not in now])
        return samples

    def first(self) -> Sample:
        """Returns the first sample. Raises DataError if none can be used."""
        found = (found[0] for position in range(len(self)) if (found := self.take(position, 1)))
        return next(found, None) or self.sample(self._order.take(0, 1)[0][1])

    @abstractmethod
    def usable_sample(self, row: int, epoch: int = 0) -> Sample | None:
        """Returns the sample of a row; None if it is to be left out: it is overlong, or has an unusable image."""

    @abstractmethod
    def record_images(self) -> None:
        """Records the content of all image files. Raises DataError."""

    @property
    def has_images(self) -> bool:
        """Whether some samples have images, or had some when the run began."""
        return self.image_usage.images > 0 or any(part._changed for part in self.parts)

    @property
    @abstractmethod
    def image_usage(self) -> ImageUsage:
        """The images of the samples."""

    @abstractmethod
    def prefetch(self, rows: Sequence[int]) -> None:
        """Begins to prepare the images of rows that will be taken soon."""


class DatasetSource(SampleSource[Sample]):
    """Samples of one dataset, rendered and tokenized when they are taken.

    Rows are read and measured when the source is created, so that bad data is reported before the run starts: all of
    them, or of many prompts some, as `cfg.measure` says. The others stay on the disk until they are used.

    Args:
        seed: determines the order, together with the epoch, if `cfg.shuffle`.
        limit: longest sample, in tokens.
        tools, open_turn: passed to `TemplateRenderer`.
        images: prepares the images of samples; None for a model that reads none.

    Raises:
        DataError: a row cannot be used, or is too long and `cfg.overlong` is `error`, or has an image that the model
            does not read or that cannot be used, unless the config says to skip it.
        TokenizerError: the tokenizer lacks a feature that the data needs.
    """

    kind: ClassVar[str]
    """Name of a sample in messages."""

    def __init__(
        self,
        rows: DatasetRows,
        cfg: DatasetConfig,
        tokenizer: "Tokenizer",
        seed: int,
        limit: LengthLimit,
        tools: Sequence[dict[str, Any]] = (),
        open_turn: bool = True,
        images: "ImageLoader | None" = None,
    ) -> None:
        self._rows, self._limit, self._images, self._drops_overlong = rows, limit, images, cfg.overlong == "drop"
        self._tally = ImageTally(len(rows))
        self._format = DatasetFormat(rows, cfg)
        self._renderer = TemplateRenderer(tokenizer, cfg, tools, open_turn, images.processor if images else None)
        self._changed = frozenset() if images is None else images.changed_rows(rows)
        unusable = self._changed if images is None else self._changed | images.dropped_rows(rows, self._image_values)
        self._check_rows(cfg, unusable)
        usable = np.setdiff1d(np.arange(len(rows)), np.array(sorted(unusable), np.int64), assume_unique=True)
        measured = row_lengths.rows_to_measure(rows, usable, cfg.measure, self.kind if images is None else "image")
        fitting = row_lengths.select_fitting_rows(rows, measured, self._lengths, limit, cfg.overlong, self.kind)
        kept = self._select_useful(fitting) if measured.size == usable.size else usable
        kept = np.union1d(kept, np.array(sorted(self._changed), np.int64))  # the order stays what it was
        self.dropped, self._kept = len(rows) - kept.size, kept
        self.digest = rows.digest
        self._order: EpochOrder = EpochOrder(kept, seed, cfg.shuffle)
        self._usage = self._tally.usage(kept)

    def __len__(self) -> int:
        return int(self._order.rows.size)

    @property
    def path(self) -> str:
        return self._rows.path

    @property
    def order(self) -> EpochOrder:
        """The order of the dataset on its own."""
        return self._order

    @property
    def size(self) -> int:
        """Number of rows, with those that are left out."""
        return len(self._rows)

    @property
    def columns(self) -> tuple[str, ...]:
        return self._format.columns

    @property
    def parts(self) -> tuple["DatasetSource[Sample]", ...]:
        return (self,)

    def hold_out(self, fraction: float) -> list[Sample]:
        rows = self._order.rows
        count = max(1, round(fraction * rows.size))
        if count >= rows.size:
            remedy = "Lower the fraction, or give held-out data of its own."
            raise DataError(self._rows.path, f"holding out {count} of {rows.size} rows leaves none to train on", remedy)
        drawn = permutation(rows.size, HOLD_OUT_KEY, self._order.seed)
        self._order = EpochOrder(np.sort(rows[drawn[count:]]), self._order.seed, self._order.shuffle)
        self._usage = self._tally.usage(self._order.rows)
        held_out = np.sort(rows[drawn[:count]]).tolist()
        self.prefetch(held_out)
        return [each for row in held_out if (each := self.usable_sample(row)) is not None]

    @property
    def image_usage(self) -> ImageUsage:
        return self._usage

    def usable_sample(self, row: int, epoch: int = 0) -> Sample | None:
        try:
            return self.sample(row, epoch)
        except DataError as error:
            skips_image = self._images is not None and self._images.skips and isinstance(error.__cause__, UnusableImage)
            if not skips_image and not (self._drops_overlong and isinstance(error.__cause__, row_lengths.OverlongRow)):
                raise
            logger.warning("left out: %s", error)
            return None

    def record_images(self) -> None:
        if self._images is not None:
            self._images.record(self._rows, self._kept, self._image_values)

    def prefetch(self, rows: Sequence[int]) -> None:
        if self._images is None:
            return
        for row in rows:
            if self._images.is_ahead(row):
                continue
            try:
                sample = self._read(row)
            except DataError:
                continue  # `sample` raises it
            if sample.images:
                self._images.prefetch(row, sample.images)

    def _image_values(self, row: int) -> list[Any]:
        return self._format.read(row).image_values

    def _read(self, row: int) -> DatasetSample:
        """Reads a row and the sizes of its images, and puts frames in place of its videos. Raises DataError."""
        sample = self._format.read(row)
        if not sample.image_values:
            return sample
        if self._images is None:
            remedy = "Choose a vision-language model, or leave the images out of the data."
            raise self._rows.data_error(row, BadRow(None, "the row has an image, and the model reads none", remedy))
        try:
            sample.images, videos = self._images.find(sample.image_values)
        except UnusableImage as bad:
            raise self._rows.data_error(row, bad) from bad
        if videos:
            sample.prompt = write_videos(sample.prompt, videos, self._images.processor.name)
        expansion, count = self._images.processor.expansion, len(sample.images)
        self._tally.note(row, [(each.size, expansion(each.size, count).features) for each in sample.images])
        return sample

    def _placed(self, row: int, sample: DatasetSample, places: Sequence[np.ndarray]) -> list[PlacedImage]:
        """Prepares the images of a sample, whose features have these places. Raises DataError."""
        if not sample.images:
            return []
        assert self._images is not None
        try:
            return self._images.place(sample.images, row, places)
        except BadRow as bad:
            raise self._rows.data_error(row, bad) from bad

    def _measured(self, text: str, sample: DatasetSample) -> str:
        """The rendered text with as many tokens as the sample will have."""
        return self._renderer.expanded(text, sample).text if sample.images else text

    @abstractmethod
    def _lengths(self, rows: Sequence[int]) -> list[int]: ...

    def _check_rows(self, cfg: DatasetConfig, unusable: Collection[int]) -> None:
        """Checks that do not need the lengths of rows."""

    def _select_useful(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows that can teach something, and says which others there are."""
        return rows

    def _check_length(self, row: int, tokens: int) -> None:
        if not 0 < tokens <= self._limit.tokens:
            bad = row_lengths.length_problem(self.kind, tokens, self._limit)
            raise self._rows.data_error(row, bad) from bad


class PromptSource(DatasetSource[Prompt]):
    """The prompts of a dataset; see `DatasetSource`.

    Args:
        limit: of a prompt, with room for its completion.
        answers: whether every row must have an answer, because a verifier compares completions with it.
    """

    kind = "prompt"

    def __init__(
        self,
        rows: DatasetRows,
        cfg: DatasetConfig,
        tokenizer: "Tokenizer",
        seed: int,
        limit: LengthLimit,
        answers: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        open_turn: bool = True,
        images: "ImageLoader | None" = None,
    ) -> None:
        self._answers = answers
        super().__init__(rows, cfg, tokenizer, seed, limit, tools, open_turn, images)

    def sample(self, row: int, epoch: int = 0) -> Prompt:
        sample, text, chat = self._text(row)
        tokens, places = self._renderer.encode_prompt(text, sample, chat)
        self._check_length(row, tokens.size)
        messages = None if isinstance(sample.prompt, str) else sample.prompt
        shown = self._renderer.conversation(sample) if chat else None
        shown = None if shown == messages else shown
        images = self._placed(row, sample, places)
        return Prompt(make_uid(epoch, row), row, tokens, text, messages, sample.answer, sample.columns, shown, images)

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        texts, chats = [], []
        for row in rows:
            sample, text, chat = self._text(row)
            texts.append(self._measured(text, sample))
            chats.append(chat)
        return self._renderer.count(texts, chats)

    def _text(self, row: int) -> tuple[DatasetSample, str, bool]:
        """Returns the sample, its rendered prompt, and whether the chat template was applied."""
        sample = self._sample(row)
        try:
            text = self._renderer.prompt(sample)
            if sample.images:
                self._renderer.expanded(text, sample)  # or it has another number of placeholders
            return sample, text, self._renderer.is_chat(sample.prompt)
        except BadRow as bad:
            raise self._rows.data_error(row, bad) from bad

    def _sample(self, row: int) -> DatasetSample:
        sample = self._read(row)
        if self._format.name == "text" and isinstance(sample.completion, str):
            sample.prompt = sample.completion
        if self._answers and sample.answer is None:
            remedy = "The reward compares with it: set data.answer_column, or leave the row out."
            raise self._rows.data_error(row, BadRow(None, "there is no answer", remedy))
        return sample


class DocumentSource(DatasetSource[Document]):
    """The documents of a dataset; see `DatasetSource`.

    Answers and completions that are plain text end with the end-of-sequence token; conversations end as their
    template defines. The targets are answers, completions or assistant turns; with `train_on_prompt` all tokens.
    """

    kind = "document"

    def __init__(
        self,
        rows: DatasetRows,
        cfg: DatasetConfig,
        tokenizer: "Tokenizer",
        seed: int,
        limit: LengthLimit,
        train_on_prompt: bool = False,
        images: "ImageLoader | None" = None,
    ) -> None:
        self._train_on_prompt = train_on_prompt
        super().__init__(rows, cfg, tokenizer, seed, limit, images=images)

    def sample(self, row: int, epoch: int = 0) -> Document:
        sample, tokens, learned, places = self._tokens(row)
        self._check_length(row, tokens.size)
        if self._train_on_prompt:
            learned = np.arange(tokens.size) > 0
            for own in places:
                learned[own] = False
        return Document(make_uid(epoch, row), row, tokens, learned, self._placed(row, sample, places))

    def _check_rows(self, cfg: DatasetConfig, unusable: Collection[int]) -> None:
        if self._format.name == "text" and cfg.chat:
            raise ValueError("data.chat is true, but documents of format text have no turns: remove data.chat")
        for row in sorted({*range(min(len(self._rows), row_lengths.CHECKED_ROWS))} - {*unusable}):
            self._tokens(row)

    def _lengths(self, rows: Sequence[int]) -> list[int]:
        texts, chat = [], []
        for row in rows:
            sample = self._sample(row)
            try:
                texts.append(self._measured(self._renderer.document(sample), sample))
                chat.append(self._renderer.is_chat(sample.prompt))
            except BadRow as bad:
                raise self._rows.data_error(row, bad) from bad
        lengths = self._renderer.count(texts, chat)
        for n, row in enumerate(rows):
            if not chat[n] and abs(lengths[n] - self._limit.tokens) <= row_lengths.TOKEN_SLACK:
                lengths[n] = self._tokens(row)[1].size
        return lengths

    def _tokens(self, row: int) -> tuple[DatasetSample, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Returns the sample, its tokens and which are learned, and the places of its images."""
        sample = self._sample(row)
        try:
            return sample, *self._renderer.tokens_of_document(sample)
        except BadRow as bad:
            raise self._rows.data_error(row, bad) from bad

    def _sample(self, row: int) -> DatasetSample:
        sample = self._read(row)
        turns = sample.prompt if sample.learn_history and isinstance(sample.prompt, list) else []
        if not sample.completion and not any(turn["role"] == "assistant" for turn in turns):
            remedy = "Supervised fine-tuning needs an answer, a completion or assistant turns."
            raise self._rows.data_error(row, BadRow(None, "there is nothing to learn", remedy))
        return sample
