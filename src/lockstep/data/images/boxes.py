"""Boxes and points in images, and the coordinates that models and annotations write them in."""

import numpy as np
import numpy.typing as npt

from lockstep.config.vision import BoxCoordinates


def rescale_boxes(
    boxes: npt.ArrayLike,
    source: BoxCoordinates,
    target: BoxCoordinates,
    size: tuple[int, int],
    resized: tuple[int, int] | None = None,
) -> np.ndarray:
    """Converts boxes from one kind of coordinates to another.

    A resized image shows the whole original: x grows with width / width and y with height / height. Nothing is rounded
    or clipped.

    Args:
        boxes: `[..., 2n]`, x and y in turn: `x1, y1, x2, y2` for boxes, `x, y` for points.
        source: the coordinates of `boxes`.
        size: width and height of the original image, in pixels.
        resized: width and height of the image as the model gets it; needed for `resized`.

    Returns:
        float64, of the same shape.

    Raises:
        ValueError: a box has an odd number of coordinates, or a size is missing or not positive.
    """
    values = np.asarray(boxes, np.float64)
    if values.ndim == 0 or values.shape[-1] % 2:
        raise ValueError(f"boxes have shape {list(values.shape)}, expected x and y in turn, such as [boxes, 4]")
    pairs = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
    scale = _extent(target, size, resized) / _extent(source, size, resized)
    return np.asarray((pairs * scale).reshape(values.shape))


def _extent(coordinates: BoxCoordinates, size: tuple[int, int], resized: tuple[int, int] | None) -> np.ndarray:
    """The x of the right edge and the y of the lower edge: float64 `[2]`."""
    extents: dict[BoxCoordinates, tuple[float, float] | None] = {
        "original": size,
        "resized": resized,
        "0-1000": (1000.0, 1000.0),
        "0-1": (1.0, 1.0),
    }
    if coordinates not in extents:
        raise ValueError(f"coordinates of boxes are {coordinates!r}, expected one of {', '.join(extents)}")
    extent = extents[coordinates]
    if extent is None or min(extent) <= 0:
        raise ValueError(f"boxes have {coordinates} coordinates, but the {coordinates} size is {extent}")
    return np.asarray(extent, np.float64)
