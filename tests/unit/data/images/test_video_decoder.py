"""Video files: their frames by time, with and without seeking, and hostile or broken ones. Needs PyAV, except where
its absence is tested."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from video_files import encoded

from lockstep.config.vision import ImageDataConfig, VideoDataConfig
from lockstep.data.images.image_content import RowVideo, UnusableVideo
from lockstep.data.images.image_source import ImageFinder
from lockstep.data.images.video_source import FoundVideo, VideoFinder


def find(tmp_path: Path, value: Any, images: dict[str, Any] | None = None, **videos: Any) -> FoundVideo:
    cfg = ImageDataConfig.model_validate(images or {})
    finder = ImageFinder(cfg, str(tmp_path / "data.jsonl"))
    return VideoFinder(finder, cfg, VideoDataConfig.model_validate(videos)).find(RowVideo(value), 0)


def greys(found: FoundVideo) -> list[int]:
    """Which frames were decoded, by their colour."""
    return [round(float(np.asarray(frame.pixels())[30:].mean()) / 4) for frame in found.frames]


def expected(found: FoundVideo) -> list[int]:
    return [int(frame.origin.rpartition("#")[2]) for frame in found.frames]


def test_without_pyav_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.data.images.video_decoder import VideoDecoderMissing

    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    with pytest.raises(VideoDecoderMissing, match=r"PyAV \(package av\), which is missing.*lockstep-rl\[video\]"):
        find(tmp_path, "a.mp4")


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "mpeg4"), ("a.mp4", "libx264"), ("a.webm", "libvpx-vp9"), ("a.mkv", "libx264"),
                        ("a.avi", "mpeg4"), ("a.mov", "libx264")]
)  # fmt: skip
def test_frames_of_files(tmp_path: Path, name: str, codec: str) -> None:
    pytest.importorskip("av")
    content = encoded(tmp_path / name, 60, codec=codec)
    for value in (name, content, {"video": name, "fps": 2}):
        found = find(tmp_path, value)
        assert len(found.frames) == 12 and abs(found.duration - 6) <= 0.1
        assert [frame.size for frame in found.frames] == [(64, 48)] * 12
        assert greys(found) == expected(found)
        np.testing.assert_allclose(found.seconds, np.array(expected(found)) / 10, atol=0.01)
    chosen = find(tmp_path, {"video": name, "nframes": 60}, max_frames=60)
    assert greys(chosen) == list(range(60)), "one pass"
    found = find(tmp_path, name)
    assert len({frame.content() for frame in found.frames}) == 12
    assert [frame.content() for frame in find(tmp_path, content).frames] == [each.content() for each in found.frames]


def test_far_frames_are_found_from_key_frames(tmp_path: Path) -> None:
    pytest.importorskip("av")
    encoded(tmp_path / "a.mp4", 60, rate=2, codec="libx264")
    found = find(tmp_path, {"video": "a.mp4", "nframes": 5})
    assert greys(found) == expected(found) == [0, 15, 30, 44, 59]
    assert greys(find(tmp_path, {"video": "a.mp4", "video_start": 25, "nframes": 1})) == [50]
    backwards = find(tmp_path, {"video": "a.mp4", "nframes": 5})
    backwards.frames.reverse()
    assert greys(backwards) == [59, 44, 30, 15, 0]


def test_turned_videos_are_upright(tmp_path: Path) -> None:
    pytest.importorskip("av")
    encoded(tmp_path / "a.mp4", 6, codec="libx264", turned=90)
    found = find(tmp_path, "a.mp4")
    assert found.frames[0].size == found.frames[0].pixels().size == (48, 64)


def test_broken_files(tmp_path: Path) -> None:
    pytest.importorskip("av")
    content = encoded(tmp_path / "a.mp4", 60, noise=True, container={"movflags": "faststart"})
    (tmp_path / "cut.mp4").write_bytes(content[: len(content) // 2])
    found = find(tmp_path, "cut.mp4")
    with pytest.raises(UnusableVideo, match=r"cut.mp4' is .*truncated"):
        greys(found)
    webm = encoded(tmp_path / "a.webm", 60, codec="libvpx-vp9", noise=True)
    found = find(tmp_path, webm[: len(webm) // 2])
    with pytest.raises(UnusableVideo, match=r"video 0' is .*truncated"):
        greys(found)
    for name, broken in (("head.mp4", content[:40]), ("text.mp4", b"hello" * 100), ("none.mp4", b"")):
        (tmp_path / name).write_bytes(broken)
        problem = "(is no video in a known format, or is truncated or damaged|has no pictures)"
        with pytest.raises(UnusableVideo, match=f"{name}' {problem}"):
            find(tmp_path, name)


def test_files_that_name_others_are_not_opened(tmp_path: Path) -> None:
    pytest.importorskip("av")
    encoded(tmp_path / "a.mp4", 6)
    (tmp_path / "list.mp4").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{tmp_path}/a.mp4\n")
    (tmp_path / "concat.mp4").write_text(f"ffconcat version 1.0\nfile '{tmp_path}/a.mp4'\n")
    for name in ("list.mp4", "concat.mp4"):
        with pytest.raises(UnusableVideo, match=f"{name}' is no video in a known format"):
            find(tmp_path, name)


def test_hostile_files(tmp_path: Path) -> None:
    pytest.importorskip("av")
    encoded(tmp_path / "a.mp4", 60)
    with pytest.raises(UnusableVideo, match=r"has 60 frames, more than data.videos.max_frames_in_file 20"):
        find(tmp_path, "a.mp4", max_frames_in_file=20)
    with pytest.raises(UnusableVideo, match="frames of 64 x 48 pixels, and the limit is"):
        find(tmp_path, "a.mp4", {"max_pixels_in_file": 1000})
    import av

    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream: Any = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    with pytest.raises(UnusableVideo, match="has no pictures"):
        find(tmp_path, "sound.mp4")
