"""The text between frames equals that of transformers' processors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vision_folders import load, transformers_processor, vision_folder

from lockstep.data.images.video_source import FoundVideo
from lockstep.data.images.video_text import in_words, write_videos


def video(seconds: list[float], duration: float = 12.0) -> FoundVideo:
    return FoundVideo([None] * len(seconds), seconds, duration)  # type: ignore[list-item]  # no frame is opened


def written(folder: Path, found: FoundVideo, image: str) -> str:
    """Our text of a video, with what stands for each image."""
    text = write_videos("<video>", [found], load(folder).name)
    assert isinstance(text, str)
    return text.replace("<image>", image)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def metadata(seconds: list[float], fps: float, duration: float) -> Any:
    indices = [round(each * fps) for each in seconds]
    return SimpleNamespace(fps=fps, timestamps=seconds, duration=duration, frames_indices=indices)


@pytest.mark.parametrize("seconds", [[0.0, 1.5, 59.0, 61.0], [0.0] * 21, [float(n) for n in range(64)]])
def test_smolvlm(home: Path, seconds: list[float]) -> None:
    folder = vision_folder(home, "smolvlm")
    load(folder)  # which lets the processor do without num2words: it writes digits then
    own = transformers_processor(folder)
    about = {"pixel_values": np.zeros((1, len(seconds), 3, 8, 8)), "video_metadata": [metadata(seconds, 2, 3723.5)]}
    expected = own.replace_video_token(about, 0)
    one = own.fake_image_token + own.global_image_token + own.image_token * own.image_seq_len + own.fake_image_token
    found = written(folder, video(seconds, 3723.5), one)
    assert found.replace(in_words(len(seconds)), str(len(seconds)), 1) == expected
    assert "a 1:02:03 [H:MM:SS] video" in expected


def test_internvl(home: Path) -> None:
    folder = vision_folder(home, "internvl")
    own = transformers_processor(folder)
    expected = own.replace_video_token({"pixel_values_videos": np.zeros((1, 3, 3, 8, 8))}, 0)
    one = own.start_image_token + own.image_token * own.image_seq_length + own.end_image_token
    assert written(folder, video([0, 1, 2]), one) == expected


def test_qwen3_vl(home: Path) -> None:
    folder = vision_folder(home, "qwen3_vl")
    own = transformers_processor(folder)
    own.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=1)
    seconds = [0.0, 0.5, 1.25, 61.0]
    about = {"video_grid_thw": np.array([[4, 4, 4]]), "video_metadata": [metadata(seconds, 4, 62)]}
    expected = own.replace_video_token(about, 0)
    one = own.vision_start_token + own.video_token * 4 + own.vision_end_token
    assert written(folder, video(seconds), one) == expected


def test_messages_and_several_videos() -> None:
    text = [{"type": "text", "text": "what?"}]
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "video"}, *text]},
              {"role": "assistant", "content": "ok"},
              {"role": "user", "content": [*text, {"type": "image"}, {"type": "video"}]}]  # fmt: skip
    found = write_videos(prompt, [video([0.0, 1.0]), video([0.5])], "Qwen2VLProcessor")
    image = {"type": "image"}

    def at(seconds: str) -> dict[str, str]:
        return {"type": "text", "text": f"<{seconds} seconds>"}

    assert found[1]["content"] == [at("0.0"), image, at("1.0"), image, *text]
    assert found[3]["content"] == [*text, image, at("0.5"), image]
    assert (found[0], found[2]) == (prompt[0], prompt[2])
    assert write_videos("a<video>b<video>", [video([0.0]), video([2.0])], "") == (
        "a<0.0 seconds><image>b<2.0 seconds><image>"
    )


def test_numbers_in_words() -> None:
    expected = {
        0: "zero", 4: "four", 13: "thirteen", 20: "twenty", 21: "twenty-one", 64: "sixty-four", 100: "one hundred",
        105: "one hundred and five", 768: "seven hundred and sixty-eight", 1000: "1000",
    }  # fmt: skip
    assert {number: in_words(number) for number in expected} == expected
