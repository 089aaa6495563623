"""Prompts and documents with videos, from the formats of other frameworks, for models of each family."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_image_samples import Opener, parts
from video_files import animation, png_frames
from vision_folders import png, vision_folder

from lockstep.data.dataset_rows import DataError
from lockstep.data.images.image_errors import ImageRefused
from lockstep.data.images.image_processor import ImageProcessor
from lockstep.data.images.restored_images import ImageChanged, restore_images
from lockstep.data.samples import PlacedImage
from lockstep.models.vision.tiny_families import VISION_FAMILIES

SIZE = (40, 30)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def opener_of(home: Path, tmp_path: Path, family: str) -> Opener:
    opener = Opener(vision_folder(home, family), tmp_path)
    (tmp_path / "a.gif").write_bytes(animation(4, milliseconds=500))
    (tmp_path / "b.webp").write_bytes(animation(3, "WEBP", milliseconds=1000))
    png_frames(tmp_path / "clip", 2)
    return opener


@pytest.fixture
def qwen(home: Path, tmp_path: Path) -> Opener:
    return opener_of(home, tmp_path, "qwen3_vl")


def at(*seconds: float) -> list[dict[str, str]]:
    """Parts of the frames at these times, for families whose processors have no words for them."""
    return [part for each in seconds for part in parts(f"<{each:.1f} seconds>", "image")]


GIF, WEBP, FOLDER = at(0, 0.5, 1, 1.5), at(0, 1, 2), at(0, 0.5)


def question(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_each_family(home: Path, tmp_path: Path, family: str) -> None:
    """A video becomes images that the model's own template and processor write."""
    opener = opener_of(home, tmp_path, family)
    rows = [{"video": "a.gif", "conversations": [{"from": "human", "value": "<video>what?"},
                                                 {"from": "gpt", "value": "that"}]}]  # fmt: skip
    (prompt,) = opener.open("prompts", rows).take(0, 1)
    messages = json.loads(json.dumps(prompt.messages))
    assert prompt.tokens.tolist() == opener.expected(messages, [SIZE] * 4)
    opener.check(prompt.tokens, prompt.images, [SIZE] * 4)
    if family not in ("smolvlm", "internvl"):
        assert messages == question(*GIF, *parts("what?"))
    assert [image.origin for image in prompt.images] == [f"{tmp_path}/a.gif#{n}" for n in range(4)]
    with Image.open(prompt.images[2].source) as file, Image.open(tmp_path / "a.gif") as gif:
        gif.seek(2)
        np.testing.assert_array_equal(np.asarray(file), np.asarray(gif.convert("RGB")))
    assert prompt.columns["video"] == "a.gif" and prompt.answer == "that"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # verl: markers in messages, mappings with options, a column that is null in other rows
        ({"prompt": [{"role": "user", "content": "<video>what?"}], "videos": [{"video": "a.gif", "nframes": 2}]},
         [*at(0, 1.5), *parts("what?")]),
        ({"prompt": [{"role": "user", "content": "<image>or<video>or<image>?"}], "images": ["a.png", "b.png"],
          "videos": [{"type": "video", "video": "b.webp", "fps": 1, "nframes": None}]},
         [*parts("image", "or"), *WEBP, *parts("or", "image", "?")]),
        ({"prompt": [{"role": "user", "content": "what?"}], "videos": None}, "what?"),
        # columns without markers: images come first, then videos
        ({"prompt": [{"role": "user", "content": "what?"}], "image": "a.png", "video": "clip"},
         [*parts("image"), *FOLDER, *parts("what?")]),
        ({"prompt": [{"role": "user", "content": "<video>and<video>"}], "videos": ["a.gif", ["a.png", "b.png"]]},
         [*GIF, *parts("and"), *FOLDER]),
        # parts, as TRL, transformers, qwen-vl-utils and OpenAI's API write them
        ({"prompt": question({"type": "video", "video": "a.gif"}, *parts("what?"))}, [*GIF, *parts("what?")]),
        ({"prompt": question({"type": "video", "path": "b.webp", "text": None}, *parts("?"))}, [*WEBP, *parts("?")]),
        ({"prompt": question({"type": "video", "url": "b.webp"}, *parts("?"))}, [*WEBP, *parts("?")]),
        ({"prompt": question({"type": "video_url", "video_url": {"url": "b.webp"}})}, WEBP),
        ({"prompt": question({"type": "video", "video": ["clip/frame-0.png", "clip/frame-1.png"], "sample_fps": 1.0})},
         at(0, 1)),
        ({"prompt": question({"type": "video"}, {"type": "image"}), "videos": ["clip"], "images": ["a.png"]},
         [*FOLDER, *parts("image")]),
        ({"prompt": question({"type": "video"}, *parts("<image>?")), "videos": ["clip"], "images": ["a.png"]},
         [*FOLDER, *parts("image", "?")]),
    ],
)  # fmt: skip
def test_forms_of_rows(qwen: Opener, row: dict[str, Any], expected: Any) -> None:
    (prompt,) = qwen.open("prompts", [{**row, "answer": "x"}]).take(0, 1)
    assert prompt.messages == [{"role": "user", "content": expected}]
    json.dumps(prompt.columns)
    count = sum(part["type"] == "image" for part in expected) if isinstance(expected, list) else 0
    qwen.check(prompt.tokens, prompt.images, [image.size for image in prompt.images])
    assert len(prompt.images) == count


def test_texts_and_documents(qwen: Opener) -> None:
    rows = [{"problem": "see <video>?", "answer": "5", "videos": ["clip"]}]
    (plain,) = qwen.open("prompts", rows).take(0, 1)
    one = qwen.processor.expansion(SIZE, 2).text
    assert plain.tokens.tolist() == qwen.tokenizer(f"see <0.0 seconds>{one}<0.5 seconds>{one}?")["input_ids"]
    (chat,) = qwen.open("prompts", rows, chat=True).take(0, 1)
    assert chat.tokens.tolist() == qwen.expected(question(*parts("see "), *FOLDER, *parts("?")), [SIZE] * 2)
    talk = [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "a cat"}]
    (document,) = qwen.open("documents", [{"messages": talk, "video": "a.gif"}]).take(0, 1)
    learned = qwen.tokenizer.decode(document.tokens[document.loss_mask])
    assert learned == f"a cat{qwen.tokenizer.eos_token}" and len(document.images) == 4
    pair = {"prompt": "<video>?", "chosen": "a", "rejected": "b", "video": "clip"}
    assert len(qwen.open("pairs", [pair]).take(0, 1)[0].images) == 2


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "<video>a<video>", "videos": ["a.gif"]}, "2 markers <video> and the row has 1 video"),
        ({"prompt": [{"role": "user", "content": "<video>a"}], "videos": ["clip/frame-0.png", "clip/frame-1.png"]},
         "1 marker <video> and the row has 2 videos. .* the frames of one video are a list of their own"),
        ({"prompt": [{"role": "user", "content": "<video>a"}], "videos": []}, "1 marker <video> and the row has 0"),
        ({"prompt": question({"type": "video"}), "videos": []}, "a part for a video, and there is no video for it"),
        ({"prompt": question({"type": "video"}), "videos": ["clip"] * 2}, "2 videos for 1 empty part"),
        ({"prompt": [{"role": "user", "content": "<video>a"}], "videos": ["gone.gif"]}, "video '.*gone.gif' does not"),
        ({"prompt": question({"type": "audio", "audio": "a.mp3"}), "videos": []}, "type 'audio'"),
        ({"prompt": question(*parts("?")), "images": ["a.gif"]}, "has 4 frames. Give it as a video"),
    ],
)  # fmt: skip
def test_problems_are_named(qwen: Opener, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"line 1.*{problem}"):
        qwen.open("prompts", [{**row, "answer": "x"}])


def test_unusable_videos_are_skipped_and_counted(qwen: Opener, caplog: pytest.LogCaptureFixture) -> None:
    content = animation(8, "PNG")
    (qwen.tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    names = ("a.gif", "gone.gif", "cut.png", "clip", "https://example.org/a.mp4")
    rows = [{"prompt": "<video>a", "answer": "x", "videos": [name]} for name in names]
    source = qwen.open("prompts", rows, images={"on_error": "skip"})
    assert source.dropped == 3 and [prompt.row for prompt in source.take(0, 2)] == [0, 3]
    assert "left out 3 rows with unusable images, of 5; the first, line 2: " in caplog.text
    cut = qwen.open("prompts", [rows[2]])
    with pytest.raises(DataError, match=r"line 1: video '.*cut.png' is truncated or damaged"):
        cut.take(0, 1)


def test_too_long_prompts_are_dropped_and_counted(qwen: Opener) -> None:
    rows = [{"prompt": "<video>a", "answer": "x", "video": name} for name in ("a.gif", "clip", "b.webp")]
    lengths = [prompt.tokens.size for prompt in qwen.open("prompts", rows).take(0, 3)]
    assert lengths[1] < lengths[2] < lengths[0]
    source = qwen.open("prompts", rows, limit=lengths[2], overlong="drop")
    assert source.dropped == 1 and [prompt.row for prompt in source.take(0, 2)] == [1, 2]
    few = qwen.open("prompts", rows, limit=lengths[2], videos={"max_frames": 2})
    assert few.dropped == 0 and [len(prompt.images) for prompt in few.take(0, 3)] == [2, 2, 2]


def test_a_replay_uses_the_same_pixels_or_says_that_they_changed(qwen: Opener) -> None:
    rows = [{"prompt": "<video>a", "answer": "x", "video": "a.gif"}]
    source = qwen.open("prompts", rows)
    (prompt,) = source.take(0, 1)
    again = [PlacedImage.from_json(json.loads(json.dumps(image.to_json()))) for image in prompt.images]
    assert [image.origin for image in again] == [image.origin for image in prompt.images]
    for image in prompt.images[1:3]:
        qwen.store.path(image.digest).unlink()
    assert restore_images([prompt], source, qwen.store) == (1, set())
    assert restore_images([prompt], source, qwen.store) == (0, set())
    qwen.store.path(prompt.images[2].digest).unlink()
    (qwen.tmp_path / "a.gif").write_bytes(animation(5, milliseconds=500))
    with pytest.raises(ImageChanged, match=r"image '.*a.gif#0' of sample 0:0 is not the one"):
        restore_images([prompt], qwen.open("prompts", rows), qwen.store)


def test_a_processor_that_reads_one_image(qwen: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a processor refuses two; so far none of the eight families does."""
    assert qwen.processor.reads_several
    own = ImageProcessor._inputs

    def one_only(self: ImageProcessor, processor: Any, image: Any, different: bool) -> Any:
        if different:
            raise ImageRefused("one image per prompt")
        return own(self, processor, image, different)

    monkeypatch.setattr(ImageProcessor, "_inputs", one_only)
    qwen.processor.__dict__.pop("reads_several")
    with pytest.raises(DataError, match=r"line 1: video .*cannot be shown to this model, whose processor reads one"):
        qwen.open("prompts", [{"prompt": "<video>a", "answer": "x", "video": "clip"}])
    assert len(qwen.open("prompts", [{"prompt": "<image>a", "answer": "x", "image": "a.png"}])) == 1


def test_a_model_that_reads_no_images(qwen: Opener) -> None:
    with pytest.raises(DataError, match="line 1: the row has an image, and the model reads none"):
        qwen.open("prompts", [{"prompt": "a", "answer": "x", "video": "clip"}], processor=False)


def test_frames_in_parquet(qwen: Opener) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    frames = [{"bytes": png(SIZE, number), "path": None} for number in range(2)]
    asked = {"data_source": "v", "prompt": [{"role": "user", "content": "<video>?"}]}
    rows = [{**asked, "reward_model": {"ground_truth": "5"}, "videos": [{"video": frames, "fps": 1.0}]}]
    pq.write_table(pa.Table.from_pylist(rows), qwen.tmp_path / "train.parquet")
    (prompt,) = qwen.open("prompts", qwen.tmp_path / "train.parquet").take(0, 1)
    assert prompt.messages == question(*at(0, 1), *parts("?"))
    assert Path(prompt.images[1].source).read_bytes() == png(SIZE, 1)
    assert json.loads(json.dumps(prompt.columns))["videos"] == [["video 0", "video 1"]]
