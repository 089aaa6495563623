"""Prepares images for a model by transformers' own processor, and expands their placeholders in prompts.

The processor is made without torchvision, and the same on every host: images are resized by Pillow. Trainers and
engines get the arrays that are prepared here, so that they compute with the same pixels.
"""

import copy
import hashlib
import json
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.model import ModelConfig
from lockstep.config.vision import VisionConfig
from lockstep.data.images.image_errors import AdjacentImages, ImageProcessorError, ImageRefused, PlaceholderMismatch
from lockstep.data.images.image_store import PreparedImage
from lockstep.data.samples import PlacedImage

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase as Tokenizer

_TEXT_INPUTS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
)
_NOT_SETTINGS = frozenset({"chat_template", "tokenizer", "processor_class", "transformers_version", "_name_or_path"})
_DIGEST_VERSION = 1
"""Changes with what `prepare` does to an image before the processor gets it."""
_KEPT_SIZES = 65536


@dataclass(frozen=True, slots=True)
class ImageExpansion:
    """What stands for an image in a prompt."""

    text: str
    """What the placeholder becomes, with one token for each feature."""
    features: int
    """Number of embeddings of the image."""
    resized: tuple[int, int]
    """Width and height of the image after its first resizing."""


@dataclass(frozen=True, slots=True)
class ExpandedText:
    """A text with expanded placeholders."""

    text: str
    spans: list[tuple[int, int]]
    """Where each image is in the text: characters from and to."""
    shifts: list[tuple[int, int]]
    """For each placeholder of the original text, where it ended there, and where it ends here."""

    def moved(self, position: int) -> int:
        """Returns where a position of the original text, outside of placeholders, is in this one."""
        before = [there - here for here, there in self.shifts if here <= position]
        return position + (before[-1] if before else 0)


class ImageProcessor:
    """A model's image processor.

    Args:
        processor: transformers' processor with image processor and tokenizer.
        feature_token: id of the token whose embeddings the features replace, as in the model's config.
        model: name of the model for error messages.
        separated: whether the images of a prompt must have text between them, because the model takes adjacent
            placeholders for one image. That is so if its positions have three axes.

    Attributes:
        tokenizer: the model's tokenizer.
        placeholder: what the chat template writes for an image.
        image_processor: that of transformers.
        name: of the class of the processor.
    """

    def __init__(self, processor: Any, feature_token: int, model: str, separated: bool = False) -> None:
        from lockstep.data.images.size_processor import blank_image, without_pixels

        self._blank = blank_image
        self.tokenizer: Tokenizer = processor.tokenizer
        self.placeholder: str = processor.image_token
        self.name = type(processor).__name__
        self.image_processor = processor.image_processor
        self._own, self._feature_token, self.model, self._separated = processor, feature_token, model, separated
        # Images are prepared in threads, while the tokenizer is used elsewhere: it fails if it is used twice at once.
        self._processor = _copy_of(processor, processor.image_processor)
        self._processor.tokenizer = _LockedTokenizer(copy.deepcopy(processor.tokenizer))
        # Some processors prepare an image differently if its prompt has others: LLaVA-OneVision does not cut it.
        self._differs_among_others = "batch_num_images" in processor.image_processor.model_input_names
        self._sizes = _copy_of(self._processor, without_pixels(processor.image_processor))
        self._lock = threading.Lock()
        self._expansion = lru_cache(maxsize=_KEPT_SIZES)(self._compute_expansion)
        self._settings = _settings_of(processor, feature_token)

    @property
    def size(self) -> dict[str, int]:
        """The setting `size` of transformers' image processor, whose meaning depends on the model."""
        return {name: value for name, value in dict(self.image_processor.size).items() if value is not None}

    @cached_property
    def reads_several(self) -> bool:
        """Whether a prompt may have several images, as one with a video has."""
        with suppress(ImageRefused), self._lock:
            return self._inputs(self._sizes, self._blank(64, 64), True)[1] > 0
        return False

    def with_image_processor(self, image_processor: Any) -> "ImageProcessor":
        """Returns the same with another image processor of transformers."""
        return ImageProcessor(_copy_of(self._own, image_processor), self._feature_token, self.model, self._separated)

    def digest(self, content: bytes, among: int = 1) -> str:
        """Returns the digest of a prepared image: of the bytes of its file, and of the settings of its preparation.

        Args:
            among: number of images in the prompt.
        """
        settings = self._settings + (b"among others" if self._is_different(among) else b"")
        return hashlib.sha256(hashlib.sha256(content).digest() + settings).hexdigest()[:32]

    def expansion(self, size: tuple[int, int], among: int = 1) -> ImageExpansion:
        """Returns what stands for an image in a prompt, by the image's size.

        Args:
            size: width and height of the upright image, in pixels.
            among: number of images in the prompt.

        Raises:
            ImageRefused: the processor refuses an image of this size.
        """
        return self._expansion(size, self._is_different(among))

    def prepare(self, image: "Image", digest: str, among: int = 1) -> PreparedImage:
        """Prepares an image.

        Args:
            image: upright, in mode RGB.
            among: number of images in the prompt.

        Raises:
            ImageRefused: the processor refuses the image.
        """
        expansion = self.expansion(image.size, among)
        different = self._is_different(among)
        inputs, features = self._inputs(self._processor, image, different)
        if features != expansion.features:
            made = f"makes {features} features of an image of {image.width} x {image.height} pixels"
            remedy = "This is an error of Lockstep: please report it with the version of transformers."
            raise ImageProcessorError(self.model, f"{made}, but {expansion.features} of its size", remedy)
        arrays = {name: np.asarray(values) for name, values in inputs.items() if name not in _TEXT_INPUTS}
        if different:
            # It was prepared twice, as two images of one prompt.
            arrays = {name: values[:1] for name, values in arrays.items()}
            arrays["batch_num_images"] = np.asarray([among], arrays["batch_num_images"].dtype)
        return PreparedImage(digest, arrays, features, image.size, expansion.resized)

    def smallest(self) -> PreparedImage:
        """Returns a grey image with as few features as possible: what the vision tower gets where a row has no image,
        so that all ranks enter the same collectives."""
        import PIL.Image

        sizes = [(8 * width, 8 * height) for width in (1, 2, 4, 8) for height in (1, 2, 4, 8)]
        size = min(sizes, key=lambda each: self.expansion(each).features)
        return self.prepare(PIL.Image.new("RGB", size, (127, 127, 127)), self.digest(b"the smallest image"))

    def expand_text(self, text: str, sizes: Sequence[tuple[int, int]]) -> ExpandedText:
        """Expands the placeholders of a rendered text.

        Args:
            sizes: width and height of each image, in the order of the placeholders.

        Raises:
            ImageRefused: the processor refuses an image of this size.
            PlaceholderMismatch: the text has another number of placeholders.
            AdjacentImages: the model needs text between images.
        """
        found = text.count(self.placeholder)
        if found != len(sizes):
            raise PlaceholderMismatch(
                f"the rendered text has the placeholder {self.placeholder!r} {found} times, and there are "
                f"{len(sizes)} images"
            )
        replacements = [self.expansion(size, len(sizes)).text for size in sizes]
        if not replacements:
            return ExpandedText(text, [], [])
        (expanded,), (offsets,) = self._own.get_text_with_replacements([text], replacements)
        spans = [tuple(each["new_span"]) for each in offsets]
        if self._separated:
            self._check_separated(spans)
        shifts = [(each["span"][1], each["new_span"][1]) for each in offsets]
        return ExpandedText(expanded, spans, shifts)

    def _check_separated(self, spans: Sequence[tuple[int, int]]) -> None:
        for number, (before, after) in enumerate(pairwise(spans)):
            if before[1] == after[0]:
                raise AdjacentImages(
                    f"images {number} and {number + 1} of a prompt have no text between them, and the positions of "
                    f"{self.model} would be those of one image"
                )

    def expand(
        self, text: str, images: Sequence[PreparedImage], special_tokens: bool = False
    ) -> tuple[np.ndarray, list[PlacedImage]]:
        """Expands the placeholders of a rendered prompt, and tokenizes it.

        Args:
            special_tokens: let the tokenizer add its special tokens, as it does for text without a chat template.

        Returns:
            The tokens, int32 `[tokens]`, and the images with the places of their features.

        Raises:
            ImageRefused, PlaceholderMismatch, AdjacentImages: as `expand_text`.
        """
        tokens, places = self.encode(self.expand_text(text, [image.size for image in images]), special_tokens)
        placed = [
            PlacedImage(image.digest, where, size=image.size, resized=image.resized)
            for image, where in zip(images, places, strict=True)
        ]
        return tokens, placed

    def encode(self, expanded: ExpandedText, special_tokens: bool) -> tuple[np.ndarray, list[np.ndarray]]:
        """Tokenizes an expanded text: the tokens, int32 `[tokens]`, and the places of each image's features, int32
        `[features]`."""
        tokens, offsets = encode_with_offsets(self.tokenizer, expanded.text, special_tokens)
        return tokens, self.places(tokens, offsets[:, 0], expanded.spans)

    def places(self, tokens: np.ndarray, begins: np.ndarray, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Returns the places of the features of each image: int32 `[features]` each.

        Args:
            tokens: int32 `[tokens]`, of the expanded text.
            begins: int64 `[tokens]`: the character with which each token begins.
            spans: where each image is in the text.
        """
        candidates = np.flatnonzero(tokens == self._feature_token)
        at = begins[candidates]
        return [candidates[(at >= first) & (at < last)].astype(np.int32) for first, last in spans]

    def _is_different(self, among: int) -> bool:
        return self._differs_among_others and among > 1

    def _compute_expansion(self, size: tuple[int, int], different: bool) -> ImageExpansion:
        with self._lock:
            self._sizes.image_processor.resized = None
            inputs, features = self._inputs(self._sizes, self._blank(*size), different)
            resized = self._sizes.image_processor.resized or size
        return ImageExpansion(inputs["text_replacement_offsets"][0][0]["replacement"], features, resized)

    def _inputs(self, processor: Any, image: Any, different: bool) -> tuple[dict[str, Any], int]:
        """Returns what the processor makes of an image, and the number of the image's features."""
        count = 2 if different else 1
        try:
            made = processor(
                images=[[image] * count],
                text=[self.placeholder * count],
                return_text_replacement_offsets=True,
                add_special_tokens=False,
                return_tensors="np",
            )
        except ValueError as error:
            raise ImageRefused(f"the model's image processor refuses it: {error}") from error
        inputs = dict(made)
        return inputs, int(np.count_nonzero(np.asarray(inputs["input_ids"]) == self._feature_token)) // count


class _LockedTokenizer:
    """A tokenizer that threads may use at the same time."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._tokenizer(*args, **kwargs)


def encode_with_offsets(tokenizer: "Tokenizer", text: str, special_tokens: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes a text: the tokens, int32 `[tokens]`, and the characters where each begins and ends, int64
    `[tokens, 2]`."""
    encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True, verbose=False)
    return np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)


def load_image_processor(
    cfg: ModelConfig, tokenizer: "Tokenizer", folder: Path | str | None = None
) -> ImageProcessor | None:
    """Loads the image processor of a model; None for a model that reads no images.

    The tokenizer gets the processor's chat template, unless the config names another.

    Args:
        tokenizer: the model's tokenizer.
        folder: the model's folder, if it is known; otherwise transformers finds it by the model's name.

    Raises:
        ImageProcessorError: the processor cannot be loaded, or its settings do not fit.
    """
    from transformers import AutoConfig, AutoImageProcessor

    source = {"pretrained_model_name_or_path": str(folder or cfg.path), "trust_remote_code": cfg.trust_remote_code}
    if folder is None:
        source["revision"] = cfg.revision
    try:
        config = AutoConfig.from_pretrained(**source)
        if getattr(config, "vision_config", None) is None:
            return None
        image_processor = AutoImageProcessor.from_pretrained(**source, backend="pil")
        processor = _make_processor(config.model_type, source, image_processor, tokenizer)
    except (OSError, ValueError, ImportError, TypeError, KeyError, AttributeError) as error:
        first = str(error).strip().partition("\n")[0]
        remedy = "Check preprocessor_config.json and processor_config.json in the model's folder."
        raise ImageProcessorError(cfg.path, f"cannot be loaded ({first})", remedy) from error
    if cfg.chat_template is None and processor.chat_template:
        tokenizer.chat_template = processor.chat_template
    feature_token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    if not isinstance(feature_token, int):
        remedy = "Its config.json needs image_token_id."
        raise ImageProcessorError(cfg.path, "marks no token as the place of a feature", remedy)
    found = ImageProcessor(processor, feature_token, cfg.path, _has_three_axes(config.get_text_config()))
    return with_pixel_limits(found, cfg.vision)


def with_pixel_limits(processor: ImageProcessor, vision: VisionConfig) -> ImageProcessor:
    """Returns a processor that resizes images to at least `min_pixels` and at most `max_pixels`.

    Raises:
        ImageProcessorError: the processor resizes all images to sizes of its own.
    """
    from lockstep.data.images.size_processor import candidate_sizes, keeps_limits

    least, most = vision.min_pixels, vision.max_pixels
    if least is None and most is None:
        return processor
    before = processor.image_processor
    for size in candidate_sizes(before.size, least, most):
        candidate = processor.with_image_processor(type(before)(**{**before.to_dict(), "size": size}))
        if keeps_limits(candidate.expansion, least, most):
            return candidate
    name = " and ".join(field for field, value in (("min_pixels", least), ("max_pixels", most)) if value is not None)
    raise ImageProcessorError(
        processor.model,
        f"resizes images to sizes of its own ({dict(before.size)}), so that {name} cannot be set",
        f"Remove model.vision.{name.replace(' and ', ' and model.vision.')}.",
    )


def _has_three_axes(text_config: Any) -> bool:
    """Whether a language model's config has rotary positions for time, height and width (M-RoPE)."""
    known = ("rope_parameters", "ignore_keys_at_rope_validation")
    return any("mrope_section" in (getattr(text_config, name, None) or ()) for name in known)


def _make_processor(model_type: str, source: dict[str, Any], image_processor: Any, tokenizer: "Tokenizer") -> Any:
    """Makes the model's processor without a video processor, which needs torchvision."""
    from transformers import ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    where = {name: value for name, value in source.items() if name != "trust_remote_code"}
    settings, _ = ProcessorMixin.get_processor_dict(**where)
    named = settings.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(model_type)
    names = [named] if isinstance(named, str) else list(named or [])
    kinds = [kind for kind in map(processor_class_from_name, names) if kind is not None]
    if not kinds:
        raise ValueError(f"transformers has no processor for {model_type}")
    kind = _without_video(kinds[0])
    video = {"video_processor": None} if "video_processor" in kinds[0].get_attributes() else {}
    return kind.from_args_and_dict([image_processor, tokenizer], settings, **video)


def _without_video(kind: Any) -> Any:
    own = [name for name in kind.get_attributes() if name != "video_processor"]
    module = sys.modules[kind.__module__]
    if getattr(module, "num2words", module) is None:
        module.num2words = str  # type: ignore[attr-defined]  # only texts about videos need it
    return type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: list(own))})


def _copy_of(processor: Any, image_processor: Any) -> Any:
    """The processor with another image processor."""
    copied = copy.copy(processor)
    copied.image_processor = image_processor
    return copied


def _settings_of(processor: Any, feature_token: int) -> bytes:
    """All settings that change how images are prepared, in a form that does not depend on their order."""
    found = {
        "version": _DIGEST_VERSION,
        "feature token": feature_token,
        "image processor": processor.image_processor.to_dict(),
        "processor": {name: value for name, value in processor.to_dict().items() if name not in _NOT_SETTINGS},
    }
    return json.dumps(found, sort_keys=True, default=str).encode()
