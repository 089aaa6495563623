"""Opens a dataset as what a recipe trains on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.config.data import DatasetConfig
from lockstep.config.run_config import DataKind
from lockstep.data.dataset_rows import DataError, DatasetRows
from lockstep.data.pair_sources import LabelledSource, PairSource
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_sources import DatasetSource, DocumentSource, PromptSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from lockstep.data.images.image_processor import ImageProcessor
    from lockstep.data.images.image_store import ImageStore


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a recipe needs of its samples; each kind of source uses its own."""

    answers: bool = False
    """For prompts: see `PromptSource`."""
    tools: Sequence[dict[str, Any]] = ()
    open_turn: bool = True
    learns_prompts: bool = False
    """For documents: train on the tokens of prompts as well."""
    margins: bool = False
    """For pairs: read the column `margin`."""
    images: "ImageProcessor | None" = None
    """The model's image processor; None if the model reads no images."""
    image_store: "ImageStore | None" = None
    """Where prepared images are kept; None to compute their digests only."""


def open_source(
    kind: DataKind,
    rows: DatasetRows,
    cfg: DatasetConfig,
    tokenizer: "Tokenizer",
    seed: int,
    limit: LengthLimit,
    options: SourceOptions,
) -> DatasetSource[Any]:
    """Opens a dataset as the kind of samples that a recipe trains on; see `DatasetSource`."""
    if cfg.overlong == "truncate" and kind != "pairs":
        raise DataError(rows.path, f"overlong: truncate cuts pairs, and these are {kind}", "Set it to drop or error.")
    images = None
    if options.images is not None:
        from lockstep.data.images.image_loader import ImageLoader

        images = ImageLoader(options.images, options.image_store, cfg, rows.path)
    match kind:
        case "prompts":
            shown = options.answers, options.tools, options.open_turn
            return PromptSource(rows, cfg, tokenizer, seed, limit, *shown, images)
        case "documents":
            return DocumentSource(rows, cfg, tokenizer, seed, limit, options.learns_prompts, images)
        case "pairs":
            return PairSource(rows, cfg, tokenizer, seed, limit, options.margins, images)
        case "labelled":
            return LabelledSource(rows, cfg, tokenizer, seed, limit, images)
