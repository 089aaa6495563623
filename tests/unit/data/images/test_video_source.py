"""The forms in which data has videos, which of their frames are taken, and hostile or broken videos."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from video_files import animation, frames, png_frames

from lockstep.config.vision import ImageDataConfig, VideoDataConfig
from lockstep.data.images.image_content import RowVideo, UnusableImage, UnusableVideo
from lockstep.data.images.image_source import ImageFinder
from lockstep.data.images.video_source import FoundVideo, VideoFinder, chosen_frames


def find(tmp_path: Path, value: Any, images: dict[str, Any] | None = None, **videos: Any) -> FoundVideo:
    cfg = ImageDataConfig.model_validate(images or {})
    finder = ImageFinder(cfg, str(tmp_path / "data.jsonl"))
    return VideoFinder(finder, cfg, VideoDataConfig.model_validate(videos)).find(RowVideo(value), 0)


def reds(found: FoundVideo) -> list[int]:
    """Which frames were taken, by their colour."""
    return [round(int(np.asarray(frame.pixels())[20, 20, 0]) / 10) for frame in found.frames]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations(tmp_path: Path, kind: str) -> None:
    content = animation(12, kind)
    path = tmp_path / "clip.bin"
    path.write_bytes(content)
    url = "data:image/gif;base64," + base64.b64encode(content).decode()
    for value in (str(path), "clip.bin", f"file://{path}", content, url, {"video": "clip.bin"}, {"bytes": content},
                  {"path": None, "bytes": content}, {"video_url": {"url": url}}):  # fmt: skip
        found = find(tmp_path, value)
        assert reds(found) == [0, 2, 4, 7, 9, 11], "three seconds, at two frames each"
        assert found.seconds == [0, 0.5, 1.0, 1.75, 2.25, 2.75] and found.duration == 3
        assert [frame.size for frame in found.frames] == [(40, 30)] * 6
    found = find(tmp_path, "clip.bin")
    assert (found.frames[1].origin, found.frames[1].source) == (f"{path}#2", f"{path}, frame 2")
    np.testing.assert_array_equal(np.asarray(found.frames[5].pixels()), np.asarray(frames(12)[11].convert("RGB")))
    assert len({frame.content() for frame in found.frames}) == 6
    again = find(tmp_path, content)
    assert [frame.content() for frame in again.frames] == [frame.content() for frame in found.frames]
    assert reds(again) == reds(again), "frames may be asked for again"
    path.write_bytes(animation(11, kind))
    assert find(tmp_path, "clip.bin").frames[0].content() != found.frames[0].content()


def test_lists_and_folders_of_frames(tmp_path: Path) -> None:
    names = png_frames(tmp_path / "clip", 12)
    (tmp_path / "clip" / "notes.txt").write_text("no frame")
    (tmp_path / "clip" / ".DS_Store").write_text("")
    paths = [f"clip/{name}" for name in names]
    whole = list(range(12))
    assert reds(find(tmp_path, "clip")) == whole, "frame-10 comes after frame-9"
    assert reds(find(tmp_path, paths)) == whole
    assert reds(find(tmp_path, {"video": [f"file://{tmp_path}/{path}" for path in paths]})) == whole
    assert reds(find(tmp_path, {"frames": frames(12), "sample_fps": 4})) == whole
    assert reds(find(tmp_path, [(tmp_path / path).read_bytes() for path in paths])) == whole
    found = find(tmp_path, {"video": paths, "fps": 4})
    assert found.seconds == [n / 4 for n in whole] and found.duration == 3
    assert find(tmp_path, paths).seconds == [n / 2 for n in whole], "data.videos.fps"
    assert (found.frames[3].source, found.frames[3].is_file) == (str(tmp_path / paths[3]), True)
    assert reds(find(tmp_path, paths, max_frames=4)) == [0, 4, 7, 11]
    assert reds(find(tmp_path, {"video": paths, "nframes": 3})) == [0, 6, 11]
    assert find(tmp_path, frames(2)).frames[1].source == "video 0, frame 1"
    folder = {"folder": str(tmp_path / "clip")}
    assert reds(find(tmp_path, ".", folder)) == whole


@pytest.mark.parametrize(
    ("frame_count", "rate", "cfg", "options", "expected"),
    [
        (100, 10, {}, {}, 20),
        (100, 10, {"fps": 1}, {}, 10),
        (100, 10, {"fps": 1, "max_frames": 8}, {}, 8),
        (100, 10, {}, {"fps": 1}, 10),
        (100, 10, {}, {"nframes": 7}, 7),
        (100, 10, {}, {"num_frames": 5.0}, 5),
        (100, 10, {"max_frames": 8}, {"nframes": 50, "max_frames": 60}, 8),
        (100, 10, {}, {"max_frames": 3}, 3),
        (100, 10, {}, {"min_frames": 25}, 25),
        (5, 10, {}, {}, 4),
        (3, 10, {}, {}, 3),
        (1, 10, {}, {}, 1),
        (9, 10, {"max_frames": 2}, {}, 2),
        (30, 1000.0, {"max_frames": 1}, {}, 1),
    ],
)
def test_the_number_of_frames(
    frame_count: int, rate: float, cfg: dict[str, Any], options: dict[str, Any], expected: int
) -> None:
    chosen = chosen_frames(frame_count, rate, VideoDataConfig.model_validate(cfg), options)
    assert len(chosen) == len(set(chosen)) == expected and chosen == sorted(chosen)
    assert chosen[0] == 0 and (expected == 1 or chosen[-1] == frame_count - 1)


def test_a_part_of_a_video() -> None:
    cfg = VideoDataConfig()
    chosen = chosen_frames(100, 10, cfg, {"video_start": 2, "video_end": 4.05})
    assert (chosen[0], chosen[-1], len(chosen)) == (20, 40, 4)
    assert chosen_frames(100, 10, cfg, {"video_start": 9.5})[-1] == 99
    with pytest.raises(UnusableVideo, match=r"no frame between video_start 11.0 and video_end None"):
        chosen_frames(100, 10, cfg, {"video_start": 11})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("gone.gif", "'.*gone.gif' does not exist"),
        ("cut.gif", "cut.gif' is truncated or damaged"),
        ("text.gif", "is truncated or damaged"),
        ("../secret.gif", "does not exist"),
        ("https://example.org/a.mp4", "is on the web"),
        ("data:video/mp4,abc", "is a URL that begins with"),
        ("empty", "is a folder without images"),
        ([], "video 0' has no frame"),
        ({}, "has neither bytes nor path, but nothing"),
        ({"fps": 2}, "but fps"),
        (7, "is int, expected a path"),
        ({"video": "clip.gif", "fps": "many"}, "has fps 'many', expected a number"),
        ({"video": "clip.gif", "fps": 0}, "has fps 0, expected more than 0"),
        ({"video": "clip.gif", "nframes": float("nan")}, "has nframes nan"),
        ({"video": "clip.gif", "max_frames": -1}, "has max_frames -1"),
        ({"video": "clip.gif", "video_start": 9}, "no frame between"),
    ],
)
def test_unusable_videos(tmp_path: Path, value: Any, problem: str) -> None:
    content = animation(6)
    (tmp_path / "clip.gif").write_bytes(content)
    (tmp_path / "cut.gif").write_bytes(content[:20])
    (tmp_path / "text.gif").write_bytes(b"GIF89a nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnusableVideo, match=f"video .*{problem}"):
        find(tmp_path, value)


def test_a_video_that_is_cut_within(tmp_path: Path) -> None:
    """Its beginning is good, and the frames that are left can be used."""
    content = animation(12, "PNG")
    found = find(tmp_path, content[: len(content) // 2])
    with pytest.raises(UnusableVideo, match="video 0' is truncated or damaged"):
        for frame in found.frames:
            frame.check()


def test_frames_that_are_no_images(tmp_path: Path) -> None:
    names = png_frames(tmp_path, 3)
    (tmp_path / names[1]).write_bytes(b"hello")
    found = find(tmp_path, names)
    with pytest.raises(UnusableImage, match=r"frame-1.png' is no image in a known format"):
        assert found.frames[1].size
    with pytest.raises(UnusableImage, match="video 0, frame 1' is int"):
        find(tmp_path, [names[0], 7])


def test_hostile_videos(tmp_path: Path) -> None:
    clip = animation(30)
    with pytest.raises(UnusableVideo, match=r"has 30 frames, more than data.videos.max_frames_in_file 20"):
        find(tmp_path, clip, max_frames_in_file=20)
    with pytest.raises(UnusableVideo, match=r"has 30 frames, more than"):
        find(tmp_path, frames(30), max_frames_in_file=20)
    with pytest.raises(UnusableVideo, match=r"frames of 40 x 30 pixels, and the limit is data.images.max_pixels_in_fi"):
        find(tmp_path, clip, {"max_pixels_in_file": 1000})
    many = animation(120, size=(40, 30))
    with pytest.raises(UnusableVideo, match=r"has 120 frames of 40 x 30 pixels to decode"):
        find(tmp_path, many, {"max_pixels_in_file": 1200})
    assert len(find(tmp_path, {"video": many, "video_end": 20}, {"max_pixels_in_file": 1200}).frames) == 32
    (tmp_path / "in").mkdir()
    with pytest.raises(UnusableVideo, match="is outside of the folders of images"):
        find(tmp_path, "../x.gif", {"folder": str(tmp_path / "in")})
    bomb = animation(2, size=(4000, 4000))
    with pytest.raises(UnusableVideo, match="4000 x 4000"):
        find(tmp_path, bomb, {"max_pixels_in_file": 1_000_000})
