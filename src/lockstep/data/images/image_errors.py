"""What can be wrong with a model's image processor, or with what it is given."""

from lockstep.base.errors import PicklableError


class ImageProcessorError(PicklableError, ValueError):
    """A model's image processor cannot be used."""

    def __init__(self, model: str, problem: str, remedy: str) -> None:
        super().__init__(f"the image processor of {model} {problem}. {remedy}")
        self.model, self.problem, self.remedy = model, problem, remedy


class ImageRefused(PicklableError, ValueError):
    """The processor refuses an image, such as one that is 200 times as wide as high."""


class PlaceholderMismatch(PicklableError, ValueError):
    """A text has more or fewer placeholders than there are images."""


class AdjacentImages(PicklableError, ValueError):
    """Two images of a text have nothing between them, and the model would take them for one."""
