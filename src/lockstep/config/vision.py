"""Images: how the model gets them, which of its parts learn from them, and where the data has them."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.section import Section

BoxCoordinates = Annotated[str, Field(pattern=r"^(original|resized|0-[1-9]\d{0,5})$")]
"""What the coordinates of a box count: pixels of the image in the data, as annotations do (`original`; VLM-R1 compares
InternVL's boxes so); pixels of the image as the model gets it (`resized`; VLM-R1's convention for Qwen2.5-VL, whose
boxes it scales back to the original size); or equal parts of width and height: thousandths (`0-1000`: Qwen2-VL,
Qwen3-VL, InternVL's own convention), 1024 of them (`0-1024`: PaliGemma), or the whole (`0-1`: fractions)."""


VLLM_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "idefics3": (),
    "smolvlm": ("torchvision", "num2words"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "llava_onevision"), ("torchvision",)),
}
"""The packages, besides those that vLLM requires, which it imports to serve images, by the `model_type` of a model: its
modules import transformers' processors of videos, which need torchvision."""


VLLM_GPU_FAMILIES = frozenset({"gemma3"})
"""The families whose image tokens attend to each other, which vLLM's attention on CPUs does not compute."""


def packages_for_vllm(family: str) -> tuple[str, ...]:
    """The packages that vLLM imports to serve images with models of a family; those of most, if it is not known."""
    return VLLM_PACKAGES.get(family, ("torchvision",))


class VisionPartConfig(Section):
    """One part of a vision-language model."""

    train: bool = True
    """Whether the part is trained. A frozen part has no optimizer state, and is not sent to engines again."""
    lr: float | None = Field(None, gt=0)
    """Learning rate of the part; `trainer.optimizer.lr` when absent."""

    @model_validator(mode="after")
    def _check_rate(self) -> Self:
        if self.lr is not None and not self.train:
            raise ValueError("a part that is not trained has no learning rate: remove lr, or set train to true")
        return self


_PARTS = ("tower", "projector", "language")


class VisionConfig(Section):
    """Images of a vision-language model. All parts are trained by default, as VLM-R1 does it."""

    min_pixels: int | None = Field(None, gt=0)
    """An image with fewer pixels (width times height) is enlarged; the processor's own setting when absent."""
    max_pixels: int | None = Field(None, gt=0)
    """An image with more pixels is made smaller: it bounds the tokens that an image takes. The processor's own setting
    when absent."""
    store_gb: float = Field(16.0, ge=0)
    """Room for prepared images in the run's folder, in GB (10^9 bytes): about 24 MB for a million pixels. Images that
    were used longest ago are deleted, and prepared again when they are needed; those of steps in progress are kept,
    however large they are. Only the policy's counts."""
    tower: VisionPartConfig = VisionPartConfig()
    """The encoder of images."""
    projector: VisionPartConfig = VisionPartConfig()
    """What turns the encoder's outputs into embeddings of the language model."""
    language: VisionPartConfig = VisionPartConfig()
    """The language model."""

    @model_validator(mode="after")
    def _check_vision(self) -> Self:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is more than max_pixels {self.max_pixels}")
        if not self.trained:
            raise ValueError("tower, projector and language are all frozen: set train to true for one of them")
        return self

    @property
    def trained(self) -> tuple[str, ...]:
        """The parts that are trained."""
        return tuple(part for part in _PARTS if getattr(self, part).train)

    @property
    def trains_all(self) -> bool:
        """Whether all parts are trained."""
        return self.trained == _PARTS


class ImageDataConfig(Section):
    """Images of a dataset."""

    column: str | None = None
    """Column with the image, or the list of images, of each row: paths, `data:` URLs, bytes, or the `{bytes, path}` of
    a `datasets` Image feature. `images` or `image` when absent. Images in the parts of messages need no column."""
    folder: str | tuple[str, ...] = ()
    """Folders that relative paths start from, as a list or separated by `:`; the first that has the file counts. A path
    out of them is refused. When absent, relative paths start from the folder of the data file, and absolute ones are
    allowed."""
    on_error: Literal["refuse", "skip"] = "refuse"
    """For an image that is missing, damaged or too large: refuse the run, or leave its row out and count it. `skip`
    decodes all images when the run starts. `refuse` reads only their sizes then: an image whose pixels are damaged ends
    the run in the step that takes it."""
    max_pixels_in_file: int = Field(64_000_000, gt=0, le=178_956_970)
    """The most pixels (width times height) of a file that is decoded: a small file may claim to hold a picture that
    fills the memory."""
    workers: int = Field(2, gt=0)
    """Threads that read and prepare images of the samples to come."""

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that relative paths start from; empty for that of the data file."""
        return tuple(filter(None, self.folder.split(":"))) if isinstance(self.folder, str) else self.folder


class VideoDataConfig(Section):
    """Videos of a dataset. A model gets a video as images: frames at equal distances, as qwen-vl-utils chooses them.
    Folders, errors, pixels in a file and workers are those of `images`; `model.vision.max_pixels` holds for each
    frame."""

    column: str | None = None
    """Column with the video, or the list of videos, of each row; `videos` or `video` when absent. A video is a path, a
    `data:` URL, bytes, a list of frames, or a mapping with one of these and `fps`, `nframes`, `min_frames`,
    `max_frames`, `video_start` or `video_end` of its own. Videos in the parts of messages need no column."""
    fps: float = Field(2.0, gt=0, allow_inf_nan=False)
    """Frames per second of the video to take. A list or folder of frames is read as taken at this rate, and all are
    used."""
    min_frames: int = Field(4, gt=0)
    """The fewest frames to take of a video that has as many, unless `max_frames` is less."""
    max_frames: int = Field(32, gt=0)
    """The most frames to take of a video, also where a row asks for more. Each takes as many tokens as an image."""
    max_frames_in_file: int = Field(500_000, gt=0)
    """A video that says that it has more frames is refused before it is decoded."""
