"""Images of environments' answers: what crosses from the environment's process, what is refused, kept and deleted."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer
from vision_folders import load, picture, png, vision_folder

from lockstep.config.data import DatasetConfig
from lockstep.data.images import observation_images
from lockstep.data.images.image_store import ImageStore
from lockstep.data.images.observation_images import (
    ObservationImageLost,
    ObservationImages,
    UnusableObservation,
    image_parts,
    with_image_files,
)
from lockstep.data.samples import Completion, PlacedImage, Prompt
from lockstep.data.turn_tokenizer import TurnTokenizer
from lockstep.models.vision.tiny_families import VISION_FAMILIES

PIXELS = 64_000


def files(messages, *images, base: Path = Path()) -> list[bytes]:
    return [part["bytes"] for part in image_parts(with_image_files(messages, images, base, PIXELS))]


def user(content) -> dict:
    return {"role": "user", "content": content}


def animated() -> bytes:
    file = io.BytesIO()
    picture((8, 8)).save(file, "GIF", save_all=True, append_images=[picture((8, 8), 1)])
    return file.getvalue()


def test_every_form_becomes_the_content_of_a_file(tmp_path: Path) -> None:
    content = png((20, 10))
    (tmp_path / "a.png").write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    for value in (content, "a.png", str(tmp_path / "a.png"), url, {"bytes": content, "path": None}):
        assert files([user("look")], value, base=tmp_path) == [content]
        assert files([user([{"type": "image", "image": value}])], base=tmp_path) == [content]
    (drawn,) = files([user("look")], picture((20, 10)))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(drawn))), np.asarray(picture((20, 10))))


def test_images_are_where_the_text_has_markers_or_first() -> None:
    one, two = png((8, 8), 1), png((8, 8), 2)
    (message,) = with_image_files([user("a<image>b<image>")], [one, two], Path(), PIXELS)
    assert message["content"] == [
        {"type": "text", "text": "a"}, {"type": "image", "bytes": one},
        {"type": "text", "text": "b"}, {"type": "image", "bytes": two},
    ]  # fmt: skip
    (message,) = with_image_files([user("a")], [one], Path(), PIXELS)
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    text = [user("an <image> of nothing")]
    assert with_image_files(text, [], Path(), PIXELS) == text  # without images, a marker is text


@pytest.mark.parametrize(
    "value, problem",
    [
        (png((300, 300)), "300 x 300 pixels, more than"),
        (animated(), "has 2 frames"),
        (b"no picture", "is no image|cannot|not an image"),
        ("missing.png", "cannot be read|does not exist|missing.png"),
        ("https://example.org/a.png", "is on the web"),
        (3, "is int"),
    ],
)
def test_bad_images_are_refused_in_the_environments_process(value, problem) -> None:
    with pytest.raises(UnusableObservation, match=problem):
        files([user("look")], value)


def test_the_files_of_an_observation_are_limited(monkeypatch) -> None:
    content = png((20, 20))
    monkeypatch.setattr(observation_images, "MAX_OBSERVATION_BYTES", 2 * len(content))
    assert files([user("look")], content, content) == [content] * 2
    with pytest.raises(UnusableObservation, match="make them smaller"):
        files([user("look")], content, content, content)
    with pytest.raises(UnusableObservation, match="1 marker <image> and the row has 2 images"):
        files([user("<image>")], content, content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("models"), "qwen3_vl")


def observations(folder: Path, tmp_path: Path, most: int = 8) -> ObservationImages:
    store = ImageStore(tmp_path / "images")
    cfg = DatasetConfig.model_validate({"path": "data.jsonl", "images": {"max_pixels_in_file": PIXELS}})
    return ObservationImages(load(folder), store, cfg, most)


def messages_with(*contents: object) -> list[dict]:
    return [user([*({"type": "image", "bytes": each} for each in contents), {"type": "text", "text": "ab?"}])]


def test_an_image_is_prepared_and_its_file_kept_once(folder: Path, tmp_path: Path) -> None:
    made, content = observations(folder, tmp_path), png((30, 50))
    for key in ("0/1", "1/1"):
        made.prefetch(key, messages_with(content))
        messages, (image,) = made.load(key, messages_with(content), 0)
        assert messages == [user([{"type": "image"}, {"type": "text", "text": "ab?"}])]
    assert [path.read_bytes() for path in tmp_path.rglob("*.observed")] == [content]
    store = ImageStore(tmp_path / "images")
    assert store.read(image.digest).size == (30, 50) == image.size
    assert image.source == str(store.path(image.digest).with_suffix(".observed"))
    # An image of the data with the same content has files of its own, which are not deleted with this one.
    assert made.processor.digest(content) != image.digest


def test_what_the_process_sends_is_checked_again(folder: Path, tmp_path: Path) -> None:
    made, whole = observations(folder, tmp_path, most=2), png((40, 40))
    secret = tmp_path / "secret.png"
    secret.write_bytes(whole)
    for content, problem in [
        (str(secret), "has no content, but str"), (None, "has no content, but NoneType"),
        (png((300, 300)), "90|more than"), (whole[: len(whole) // 2], "truncated|damaged"), (animated(), "2 frames"),
    ]:  # fmt: skip
        made.prefetch("key", messages_with(content))
        with pytest.raises(UnusableObservation, match=problem):
            made.load("key", messages_with(content), 0)
    assert not list((tmp_path / "images").rglob("*.safetensors"))
    with pytest.raises(UnusableObservation, match="1 image after 2 of the conversation"):
        made.load("key", messages_with(whole), 2)
    assert len(made.load("other", messages_with(whole, whole), 0)[1]) == 2


def completion(*images: PlacedImage) -> Completion:
    nothing = np.zeros(9, np.float32)
    mask = np.zeros(9, np.bool_)
    return Completion("1/0:0/0", nothing.astype(np.int32), nothing, nothing.astype(np.int32), "stop", "", mask, None,
                      list(images))  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_vl", "llava_onevision"])
def test_lost_images_are_prepared_again_from_the_same_bytes(family: str, tmp_path: Path) -> None:
    made = observations(vision_folder(tmp_path / "models", family), tmp_path)
    _, loaded = made.load("a", messages_with(png((30, 50), 1), png((30, 50), 2)), 0)
    placed = [PlacedImage(image.digest, np.array([n], np.int32)) for n, image in enumerate(loaded)]
    store = ImageStore(tmp_path / "images")
    before = [store.read(image.digest).inputs for image in placed]
    for image in placed:
        store.path(image.digest).unlink()
    assert made.restore([completion(*placed)]) == 2 and made.restore([completion(*placed)]) == 0
    for image, arrays in zip(placed, before, strict=True):
        again = store.read(image.digest).inputs
        assert all(np.array_equal(again[name], array) for name, array in arrays.items())
    store.path(placed[0].digest).unlink()
    Path(loaded[0].source).write_bytes(png((30, 50), 3))
    with pytest.raises(ObservationImageLost, match=r"completion 1/0:0/0 .* is another image"):
        made.restore([completion(*placed)])
    Path(loaded[0].source).unlink()
    with pytest.raises(ObservationImageLost, match="No such file"):
        made.restore([completion(*placed)])


def test_images_of_conversations_that_no_step_needs_are_deleted(folder: Path, tmp_path: Path) -> None:
    made = observations(folder, tmp_path)

    def load_at(seed: int) -> str:
        return made.load(str(seed), messages_with(png((30, 50), seed)), 0)[1][0].digest

    def left() -> set[str]:
        return {path.stem for path in tmp_path.rglob("*.observed")}

    first, needed = load_at(1), load_at(2)
    assert made.delete_unused(4, {needed}, ahead=1) == []  # a conversation of a later step may have begun before
    second = load_at(3)
    assert made.delete_unused(8, {needed}, ahead=1) == [first]
    assert left() == {needed, second} and first not in ImageStore(tmp_path / "images")
    assert made.delete_unused(9, set(), ahead=1) == [needed]  # the other was used after the fourth step
    # A run that is resumed does not know since when they are unused, and keeps them for a while.
    again = observations(folder, tmp_path)
    assert again.delete_unused(12, set(), ahead=0) == [] and again.delete_unused(14, set(), ahead=0) == []
    assert again.delete_unused(16, set(), ahead=0) == [second]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_tokens_of_an_answer_have_the_places_of_its_images(family: str, tmp_path: Path) -> None:
    home = vision_folder(tmp_path / "models", family)
    made, tokenizer = observations(home, tmp_path), AutoTokenizer.from_pretrained(home)
    turns = TurnTokenizer(tokenizer, DatasetConfig(path="x"), images=made)
    prompt = Prompt("0:0", 0, np.array([1, 2], np.int32), "", [user("ab")])
    turns.check(prompt, "user")
    both = [png((30, 50)), png((60, 20))]
    parts = [{"type": "image", "bytes": both[0]}, {"type": "text", "text": "and"}, {"type": "image", "bytes": both[1]}]
    messages, images = made.load("a", [user([*parts, {"type": "text", "text": "ab?"}])], 0)
    for added in (turns.reply(prompt, messages, 5, images), turns.opening(prompt, messages, images)):
        features = [image.expansion.features for image in images]
        assert [len(image.places) for image in added.images] == features
        token = made.processor._feature_token
        inside = np.concatenate([image.places for image in added.images])
        assert (added.tokens[inside] == token).all() and np.count_nonzero(added.tokens == token) == len(inside)
        assert tokenizer.decode(added.tokens).replace(" ", "").endswith("ab?<assistant>")
    plain = Prompt("0:0", 0, np.array([1, 2], np.int32), "")
    assert len(turns.reply(plain, messages, 5, images).images) == 2
    with pytest.raises(UnusableObservation, match="no text may contain the placeholder"):
        turns.reply(prompt, [*messages, user(made.processor.placeholder)], 5, images)
    if family.startswith("qwen"):
        adjacent = [user([parts[0], parts[2], {"type": "text", "text": "ab?"}])]
        empty, loaded = made.load("c", adjacent, 0)
        with pytest.raises(UnusableObservation, match=r"no text between them.*: write some between them"):
            turns.reply(plain, empty, 5, loaded)
    alone, image = made.load("b", [user([{"type": "image", "bytes": both[0]}])], 0)
    if family in ("llava_onevision",):
        with pytest.raises(UnusableObservation, match="has no text after it"):
            turns.reply(plain, alone, 5, image)
