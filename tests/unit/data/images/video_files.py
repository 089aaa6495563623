"""Videos for these tests: frames of one colour each, in the forms in which data has videos."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def frames(count: int, size: tuple[int, int] = (40, 30)) -> list[Image.Image]:
    """Frame n is red with the strength 10 n, on a square that moves."""
    made = []
    for number in range(count):
        picture = np.zeros((size[1], size[0], 3), np.uint8)
        picture[..., 0] = 10 * number % 256
        picture[2:8, number % 20 : number % 20 + 6, 2] = 200
        made.append(Image.fromarray(picture))
    return made


def animation(count: int, kind: str = "GIF", milliseconds: int = 250, size: tuple[int, int] = (40, 30)) -> bytes:
    first, *others = frames(count, size)
    file = io.BytesIO()
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    first.save(file, kind, save_all=True, append_images=others, duration=milliseconds, **options)
    return file.getvalue()


def png_frames(folder: Path, count: int) -> list[str]:
    """Writes frames as files of a folder: their names in order."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"frame-{number}.png" for number in range(count)]
    for name, picture in zip(names, frames(count), strict=True):
        picture.save(folder / name)
    return names


def encoded(
    path: Path, count: int, rate: int = 10, codec: str = "mpeg4", size: tuple[int, int] = (64, 48), **options: Any
) -> bytes:
    """Writes a video file with PyAV: frame n is grey with the strength 4 n."""
    import av

    with av.open(str(path), "w", options=options.pop("container", {})) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.bit_rate, stream.gop_size = 4_000_000, options.get("key_frames", 12)
        if options.get("turned"):
            stream.set_display_rotation(options["turned"])
        noise = np.random.default_rng(0)
        for number in range(count):
            picture = np.full((size[1], size[0], 3), 4 * number % 256, np.uint8)
            if options.get("noise"):
                picture[: size[1] // 2] = noise.integers(0, 255, picture[: size[1] // 2].shape, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path.read_bytes()
