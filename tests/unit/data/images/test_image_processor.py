"""Preparing images and expanding their placeholders gives what transformers' own processors give, for each family."""

import threading
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer
from vision_folders import SMALL, load, picture, transformers_processor, vision_folder

from lockstep.config.model import ModelConfig
from lockstep.data.images.image_errors import ImageProcessorError, ImageRefused, PlaceholderMismatch
from lockstep.data.images.image_processor import load_image_processor
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.tiny_families import VISION_FAMILIES
from lockstep.models.vision.tiny_vision import make_tiny_vision

SIZES = [(30, 50), (100, 41), (400, 300), (8, 8), (33, 32), (64, 64), (17, 170), (300, 20), (1, 1), (65, 63)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("vision")
    return {family: vision_folder(home, family) for family in VISION_FAMILIES}


@pytest.fixture(params=VISION_FAMILIES)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_tokens_places_and_pixels_are_those_of_transformers(folder: Path, count: int) -> None:
    ours, theirs = load(folder), transformers_processor(folder)
    config = AutoConfig.from_pretrained(folder)
    for first in range(0, len(SIZES) - count + 1, count):
        images = [picture(size, first) for size in SIZES[first : first + count]]
        text = "ab" + "a?".join(ours.placeholder for _ in images) + "b"
        expected = theirs(images=[images], text=[text], return_tensors="np", add_special_tokens=False)
        prepared = [ours.prepare(image, f"{number:08x}", count) for number, image in enumerate(images)]
        tokens, placed = ours.expand(text, prepared)
        np.testing.assert_array_equal(tokens, expected["input_ids"][0])
        features = np.flatnonzero(tokens == config.image_token_id)
        np.testing.assert_array_equal(np.concatenate([each.places for each in placed]), features)
        assert [each.places.size for each in placed] == [each.features for each in prepared]
        assert [each.size for each in placed] == [image.size for image in images]
        if count == 1:
            names = set(expected) - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
            assert names == set(prepared[0].inputs)
            for name in names:
                np.testing.assert_array_equal(prepared[0].inputs[name], expected[name])
        elif "image_grid_thw" in expected:
            together = [each.inputs["pixel_values"] for each in prepared]
            np.testing.assert_array_equal(np.concatenate(together), expected["pixel_values"])
        elif "batch_num_images" in expected:
            assert all(each.inputs["batch_num_images"].tolist() == [count] for each in prepared)
            together = [each.inputs["pixel_values"] for each in prepared]
            np.testing.assert_array_equal(np.concatenate(together), expected["pixel_values"])


def test_the_expansion_is_known_from_the_size_alone(folder: Path) -> None:
    """transformers counts the tokens of an image by its size too; it counts tokens around the features as well."""
    ours, theirs = load(folder), transformers_processor(folder)
    config = AutoConfig.from_pretrained(folder)
    for size in SIZES:
        expansion = ours.expansion(size)
        tokens = ours.tokenizer(expansion.text, add_special_tokens=False)["input_ids"]
        assert expansion.features == tokens.count(config.image_token_id)
        assert ours.prepare(picture(size), "00000000").features == expansion.features
        if hasattr(theirs, "_get_num_multimodal_tokens"):  # SmolVLM's has none
            # Gemma's leaves out what is written around the features.
            counted = expansion.features if config.model_type == "gemma3" else len(tokens)
            assert theirs._get_num_multimodal_tokens(image_sizes=[size[::-1]]).num_image_tokens == [counted]


def test_the_resized_size_is_that_of_the_grid(folders: dict[str, Path]) -> None:
    processor = load(folders["qwen2_5_vl"])
    for size in SIZES:
        prepared = processor.prepare(picture(size), "00000000")
        _, height, width = prepared.inputs["image_grid_thw"][0]
        assert prepared.resized == (width * 4, height * 4)


def test_placeholders_that_are_text_are_no_places(folders: dict[str, Path]) -> None:
    """Gemma's placeholder in the text differs from the token that marks a feature."""
    processor = load(folders["gemma3"])
    prepared = processor.prepare(picture((30, 50)), "00000000")
    literal = processor.tokenizer.image_token
    tokens, (placed,) = processor.expand(f"a{literal}b{processor.placeholder}{literal}", [prepared])
    assert np.count_nonzero(tokens == tokens[1]) == prepared.features + 2
    assert placed.places[0] > 1 and placed.places.size == prepared.features
    assert np.all(np.diff(placed.places) == 1)


def test_another_number_of_placeholders_is_refused(folder: Path) -> None:
    processor = load(folder)
    prepared = processor.prepare(picture((8, 8)), "00000000")
    for count in (0, 2):
        with pytest.raises(PlaceholderMismatch, match=rf"{count} times, and there are 1 images"):
            processor.expand("a" + processor.placeholder * count, [prepared])
    tokens, placed = processor.expand("ab", [])
    assert tokens.size == 2 and placed == []


def test_positions_in_a_text_move_with_its_expansions(folder: Path) -> None:
    processor = load(folder)
    text = f"a{processor.placeholder}b{processor.placeholder}?"
    expanded = processor.expand_text(text, [(30, 50), (8, 8)])
    for mark in "ab?":
        assert expanded.text[expanded.moved(text.index(mark))] == mark
    assert expanded.moved(len(text)) == len(expanded.text)
    assert expanded.text[slice(*expanded.spans[0])] == processor.expansion((30, 50), 2).text


def test_the_digest_is_of_content_and_settings(folders: dict[str, Path]) -> None:
    first = load(folders["qwen3_vl"])
    digest = first.digest(b"content")
    assert digest == load(folders["qwen3_vl"]).digest(b"content")
    assert digest == first.digest(b"content", among=3), "Qwen prepares an image in the same way among others"
    assert len({digest, first.digest(b"other"), load(folders["qwen3_vl"], max_pixels=1024).digest(b"content")}) == 3
    alone = load(folders["llava_onevision"])
    assert alone.digest(b"content") != alone.digest(b"content", among=2)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_pixel_limits(folders: dict[str, Path], family: str) -> None:
    limited = load(folders[family], min_pixels=512, max_pixels=1024)
    for size in [each for each in SIZES if max(each) < 3 * min(each)]:
        width, height = limited.expansion(size).resized
        assert 512 <= width * height <= 1024
        assert limited.prepare(picture(size), "00000000").resized == (width, height)
    assert load(folders[family], max_pixels=64).expansion((400, 300)).features == 1


def test_limits_that_a_processor_cannot_keep_are_refused(folders: dict[str, Path]) -> None:
    assert load(folders["idefics3"], max_pixels=1024).expansion((400, 400)).resized == (32, 32)
    for family, vision in (
        ("gemma3", {"max_pixels": 999}),
        ("idefics3", {"min_pixels": 9}),
        ("internvl", {"max_pixels": 9}),
    ):
        with pytest.raises(ImageProcessorError, match=f"Remove model.vision.{next(iter(vision))}"):
            load(folders[family], **vision)


def test_the_smallest_image(folder: Path) -> None:
    processor = load(folder)
    smallest = processor.smallest()
    ordinary = [size for size in SIZES if max(size) < 8 * min(size)]
    assert smallest.features == min(processor.expansion(size).features for size in [*ordinary, smallest.size])
    assert smallest.digest == processor.smallest().digest


def test_images_are_prepared_in_threads_while_the_tokenizer_is_used(folders: dict[str, Path]) -> None:
    processor, errors = load(folders["idefics3"]), []

    def work() -> None:
        try:
            for number in range(20):
                processor.prepare(picture((30 + number, 50)), "00000000")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        processor.tokenizer(["ab"] * 3, padding=True)
        processor.tokenizer("ab", truncation=True, max_length=1)
    assert errors == []


def test_too_narrow_an_image_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ImageRefused, match="aspect ratio must be smaller than 200"):
        load(folders["qwen2_vl"]).expansion((1, 300))


def test_a_model_without_images_has_no_processor(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "text")
    assert load_image_processor(ModelConfig(path=str(folder)), AutoTokenizer.from_pretrained(folder)) is None


def test_a_damaged_processor_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "model", family="qwen3_vl", **SMALL)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ImageProcessorError, match="cannot be loaded"):
        load(folder)


def test_the_chat_template_is_the_processors(folders: dict[str, Path]) -> None:
    folder = folders["idefics3"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    load_image_processor(ModelConfig(path=str(folder)), tokenizer)
    assert tokenizer.chat_template == template
