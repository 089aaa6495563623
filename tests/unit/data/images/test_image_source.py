"""Images of rows: every form in which data has them, and every way in which they are unusable."""

import base64
import io
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.config.vision import ImageDataConfig
from lockstep.data.images.image_content import UnusableImage, row_values
from lockstep.data.images.image_source import ImageFinder, RowImage, StillImage

RED = (200, 30, 10)


def picture(size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def finder(tmp_path: Path, **options: Any) -> ImageFinder:
    return ImageFinder(ImageDataConfig.model_validate(options), str(tmp_path / "data.jsonl"))


def row_image(content: bytes, max_pixels: int = 10_000) -> RowImage:
    return StillImage("image 0", content, max_pixels)


def test_every_form_gives_the_same_pixels(tmp_path: Path) -> None:
    image, content = picture(), encoded(picture())
    (tmp_path / "a.png").write_bytes(content)
    forms = [
        "a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", content, bytearray(content), image,
        {"bytes": content, "path": None}, {"bytes": None, "path": "a.png"}, {"bytes": content, "path": "gone.png"},
        {"url": "data:image/png;base64," + base64.b64encode(content).decode()},
        "data:image/png;base64," + base64.b64encode(content).decode(),
    ]  # fmt: skip
    for form in forms:
        found = finder(tmp_path).find(form, "image 0")
        assert found.size == (6, 4)
        np.testing.assert_array_equal(np.asarray(found.pixels()), np.asarray(image))
        found.check()
        assert found.content() == content or form is image


@pytest.mark.parametrize("path", ["A" * 5000, "~nobody-has-this-name/a.png"])
def test_a_path_that_the_system_refuses_is_an_unusable_image(tmp_path: Path, path: str) -> None:
    with pytest.raises(UnusableImage, match="cannot be read") as caught:
        finder(tmp_path).find(path, "image 0")
    assert len(caught.value.source) <= 80


def test_the_first_folder_that_has_the_file_counts(tmp_path: Path) -> None:
    for name, width in (("one", 3), ("two", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "both.png").write_bytes(encoded(picture((width, 2))))
    (tmp_path / "two" / "second.png").write_bytes(encoded(picture((5, 2))))
    for folder in (f"{tmp_path}/one:{tmp_path}/two", [str(tmp_path / "one"), str(tmp_path / "two")]):
        files = finder(tmp_path, folder=folder)
        assert files.find("both.png", "image 0").size == (3, 2)
        assert files.find("second.png", "image 0").size == (5, 2)
        assert files.find(str(tmp_path / "two" / "both.png"), "image 0").size == (5, 2)


@pytest.mark.parametrize("path", ["../data.png", "../../etc/passwd", "/etc/passwd", "sub/../../data.png", "~/x.png"])
def test_paths_out_of_the_folders_are_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "data.png").write_bytes(encoded(picture()))
    files = finder(tmp_path, folder=str(tmp_path / "images"))
    with pytest.raises(UnusableImage, match=r"outside of the folders of images|does not exist"):
        assert files.find(path, "image 0").size
    if path.startswith(".."):
        assert "data.png" not in path or finder(tmp_path / "images").find(path, "image 0").size == (6, 4)


def test_links_within_the_folders_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "a.png").write_bytes(encoded(picture()))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "linked").symlink_to(tmp_path / "disk")
    assert finder(tmp_path, folder=str(tmp_path / "images")).find("linked/a.png", "image 0").size == (6, 4)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_upright(orientation: int, kind: str) -> None:
    """Pillow's own `exif_transpose` is the reference. The size is that of the upright image, before it is decoded."""
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(picture(), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    found = row_image(content)
    assert found.size == expected.size == ((6, 4) if orientation < 5 else (4, 6))
    np.testing.assert_array_equal(np.asarray(found.pixels()), np.asarray(expected))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
def test_modes_become_rgb(mode: str) -> None:
    image = picture(mode=mode)
    found = StillImage("image 0", image, 100).pixels()
    assert found.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


def test_transparent_parts_are_white() -> None:
    image = Image.new("RGBA", (2, 1), (*RED, 0))
    image.putpixel((1, 0), (*RED, 255))
    palette = Image.new("P", (2, 1))
    palette.putpalette([*RED, *RED])
    palette.putpixel((1, 0), 1)
    grey = Image.new("LA", (2, 1), (9, 0))
    grey.putpixel((1, 0), (9, 255))
    for content, seen in (
        (encoded(image), RED), (encoded(palette, transparency=0), RED), (encoded(grey), (9, 9, 9)),
        (encoded(image, "WEBP", lossless=True), RED),
    ):  # fmt: skip
        assert np.asarray(row_image(content).pixels()).tolist() == [[[255, 255, 255], list(seen)]]


def test_sixteen_bits_become_eight() -> None:
    values = np.array([[0, 257, 128 * 257, 65535]], np.uint16)
    pixels = np.asarray(row_image(encoded(Image.fromarray(values))).pixels())
    assert pixels[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated_files_are_named(kind: str) -> None:
    content = encoded(picture((64, 64)), kind)
    for cut in (len(content) // 2, len(content) * 4 // 5):
        image = row_image(content[:cut])
        for read in (image.pixels, image.check):
            with pytest.raises(UnusableImage, match=r"image 'image 0' (is truncated or damaged|is no image|cannot be)"):
                read()


@pytest.mark.parametrize("cut", [0, 3, 11])
def test_what_is_no_image_is_named(cut: int) -> None:
    for content in (encoded(picture())[:cut], b"<svg></svg>", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        with pytest.raises(UnusableImage, match="is no image in a known format"):
            assert row_image(content).size


def test_a_damaged_stream_is_named() -> None:
    content = bytearray(encoded(picture((64, 64))))
    content[100:140] = bytes(40)
    with pytest.raises(UnusableImage, match="is truncated or damaged"):
        row_image(bytes(content)).pixels()


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animated_images_are_refused(kind: str) -> None:
    frames = [picture(), picture().transpose(Image.Transpose.ROTATE_180)]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(UnusableImage, match="has 2 frames"):
        assert row_image(content).size
    assert row_image(encoded(picture(), kind, save_all=True)).size == (6, 4), "one frame is a picture"


def test_bombs_are_refused_before_they_are_decoded() -> None:
    """A PNG of 100 MB of pixels takes 100 KB in its file."""
    bomb = encoded(Image.new("L", (10_000, 10_000)))
    assert len(bomb) < 200_000
    with pytest.raises(UnusableImage, match=r"10000 x 10000 pixels, more than data.images.max_pixels_in_file 64000000"):
        assert row_image(bomb, 64_000_000).size
    header = bytearray(encoded(picture()))
    header[16:24] = (60_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    with pytest.raises(UnusableImage, match=r"60000 x 60000 pixels, more|has very many pixels, more"):
        row_image(bytes(header)).pixels()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    files = finder(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (
        ("gone.png", "does not exist"), ("folder", "is not a file"), ("pipe", "is not a file"), ("a\0b", "is no path"),
    ):  # fmt: skip
        with pytest.raises(UnusableImage, match=problem):
            assert files.find(name, "image 0").size
    with pytest.raises(UnusableImage, match="is on the web") as caught:
        files.find("https://example.org/a.png", "image 0")
    assert "downloads no images" in caught.value.remedy
    with pytest.raises(UnusableImage, match="not in base64"):
        files.find("data:image/png;base64,???", "image 0")
    with pytest.raises(UnusableImage, match="expected data:"):
        files.find("data:image/png,abc", "image 0")
    with pytest.raises(UnusableImage, match="image 'image 3' is int, expected a path"):
        files.find(7, "image 3")
    with pytest.raises(UnusableImage, match="has neither bytes nor path, but height"):
        files.find({"height": 3}, "image 0")


def test_damaged_metadata_does_no_harm() -> None:
    content = encoded(picture(), "JPEG", exif=b"Exif\0\0" + b"\xff" * 30)
    assert row_image(content).size == row_image(content).pixels().size == (6, 4)


def test_the_values_of_a_column() -> None:
    assert row_values(None) == row_values("") == row_values([]) == row_values([None]) == []
    assert row_values("a.png") == ["a.png"]
    assert row_values(["a.png", None, b"x"]) == ["a.png", b"x"]
    assert row_values({"bytes": b"x"}) == [{"bytes": b"x"}]
