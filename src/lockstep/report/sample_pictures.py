"""The pictures of samples in the report: thumbnails of the images, with the boxes of answer and completion.

Files may have changed or vanished since the run, and names come from the data: a picture that cannot be shown leaves
its name and the reason, as text.
"""

import base64
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.ledger import CompletionSample
from lockstep.ledger.sample_boxes import SampleBoxes, box_reading, sample_boxes

LONGEST_SIDE = 320
"""Pixels of a thumbnail's longer side."""
SMALLEST_SIDE = 160
"""Pixels of the page that the longer side of a smaller image takes."""
LARGEST_FILE = 64 << 20
LARGEST_IMAGE = 64_000_000
"""Pixels of an image that is decoded."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Formats that are opened: others start programs, such as EPS."""
MOST_THUMBNAILS = 60
MOST_IMAGES = 4
"""Images of one prompt that are shown."""
MOST_BOXES = 50
_NAME_CHARS = 80


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small picture, once per image of the page."""

    number: int
    address: str
    """`data:` address of a JPEG, or a PNG for images that are not made smaller."""
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A box in an image, in its pixels."""

    kind: str
    """`expected` or `predicted`."""
    x: str
    y: str
    width: str
    height: str


@dataclass(frozen=True, slots=True)
class SamplePicture:
    """An image of a sample, as the page shows it."""

    name: str
    width: int
    height: int
    thumbnail: Thumbnail | None = None
    boxes: list[DrawnBox] = field(default_factory=list)
    problem: str = ""
    """Why there is no thumbnail."""

    @property
    def scale(self) -> str:
        """How much larger than the thumbnail the image is, in both directions."""
        assert self.thumbnail is not None
        return f"{self.width / self.thumbnail.width:.6g} {self.height / self.thumbnail.height:.6g}"

    @property
    def shown_width(self) -> int:
        """Pixels of the page; small images are enlarged."""
        assert self.thumbnail is not None
        longest = max(self.thumbnail.width, self.thumbnail.height)
        return max(1, self.thumbnail.width * max(longest, SMALLEST_SIDE) // longest)


class PictureBook:
    """The pictures of one page.

    Args:
        config: the run's config, whose reward terms say how boxes are written.
        base: the folder that relative paths of images start from.
    """

    def __init__(self, config: Mapping[str, Any], base: Path = Path()) -> None:
        self.thumbnails: list[Thumbnail] = []
        self.has_boxes = False
        self._reading, self._base = box_reading(config), base
        self._made: dict[str, Thumbnail | str] = {}

    def of(self, sample: CompletionSample) -> list[SamplePicture]:
        """The pictures of a sample's prompt and of its environment's answers."""
        pictures = [self._picture(sample, number) for number in range(min(len(sample.images), MOST_IMAGES))]
        if (hidden := len(sample.images) - len(pictures)) > 0:
            pictures.append(SamplePicture(f"{hidden} more", 0, 0))
        return pictures

    def _picture(self, sample: CompletionSample, number: int) -> SamplePicture:
        image = sample.images[number]
        source, (width, height) = str(image.get("source") or "image"), _size(image)
        name = source if len(source) <= _NAME_CHARS else f"…{source[-_NAME_CHARS:]}"
        made = self._thumbnail(source, str(image.get("digest") or source))
        if isinstance(made, str):
            return SamplePicture(name, width, height, problem=made)
        width, height = (width, height) if width > 0 and height > 0 else (made.width, made.height)
        reading = self._reading if self._reading is not None and self._reading.image == number else None
        boxes = [] if reading is None else _drawn(sample_boxes(sample, reading, MOST_BOXES))
        self.has_boxes = self.has_boxes or bool(boxes)
        return SamplePicture(name, width, height, made, boxes)

    def _thumbnail(self, source: str, key: str) -> Thumbnail | str:
        if key not in self._made:
            if len(self.thumbnails) >= MOST_THUMBNAILS:
                return f"the report shows {MOST_THUMBNAILS} images"
            try:
                address, width, height = make_thumbnail(self._base / source)
            except (OSError, ValueError, SyntaxError, ImportError, Warning) as error:
                self._made[key] = _reason(error)
            else:
                self._made[key] = thumbnail = Thumbnail(len(self.thumbnails), address, width, height)
                self.thumbnails.append(thumbnail)
        return self._made[key]


def make_thumbnail(path: Path) -> tuple[str, int, int]:
    """A `data:` address, width and height of a small copy of an image file. Raises OSError, ValueError and what PIL
    raises (SyntaxError, warnings about bombs) if it cannot be read."""
    import PIL.Image
    import PIL.ImageOps

    if not path.is_file():
        raise ValueError("the file is not there any more" if path.suffix else "the data had it without a file")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"the file is larger than {LARGEST_FILE >> 20} MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with PIL.Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > LARGEST_IMAGE:
                raise ValueError(f"it has {image.width} x {image.height} pixels")
            image.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))
            upright = PIL.ImageOps.exif_transpose(image).convert("RGB")
    small = max(upright.size) <= LONGEST_SIDE
    upright.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    kind, data = "PNG" if small else "JPEG", io.BytesIO()
    upright.save(data, kind, quality=80)
    text = base64.b64encode(data.getvalue()).decode()
    return f"data:image/{kind.lower()};base64,{text}", upright.width, upright.height


def _size(image: Mapping[str, Any]) -> tuple[int, int]:
    size: Sequence[Any] = image.get("size") or (0, 0)
    return int(size[0]), int(size[1])


def _drawn(boxes: SampleBoxes) -> list[DrawnBox]:
    both = [("expected", boxes.expected), ("predicted", boxes.found)]
    return [
        DrawnBox(kind, *(f"{value:.6g}" for value in (x1, y1, x2 - x1, y2 - y1)))
        for kind, found in both
        for x1, y1, x2, y2 in found
    ]


def _reason(error: BaseException) -> str:
    return "it cannot be read" if isinstance(error, OSError | SyntaxError) else str(error)[:120]
