"""What reward functions get of images: VLM-R1's columns, paths, grids and PIL images."""

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from reward_samples import batch, prompt

from lockstep.config.reward import FunctionReward
from lockstep.data.images.image_store import ImageStore, PreparedImage
from lockstep.data.samples import PlacedImage, Prompt
from lockstep.rewards.reward_signatures import RewardFunctionError
from lockstep.rewards.reward_terms import build_term, check_term_columns
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scoring_messages import DataColumns

FUNCTIONS = Path(__file__).parent / "functions"
SIZE, RESIZED = (56, 140), (28, 70)


def image(folder: Path, name: str = "a.png", grey: int = 255) -> PlacedImage:
    """An image file, and its preparation in the store `folder/store`."""
    path, digest = folder / name, (name.encode().hex() + "0" * 8)[:16]
    PIL.Image.new("RGB", SIZE, (grey, grey, grey)).save(path)
    grid = np.array([[1, RESIZED[1] // 14, RESIZED[0] // 14]])
    ImageStore(folder / "store").write(PreparedImage(digest, {"image_grid_thw": grid}, 10, SIZE, RESIZED))
    return PlacedImage(digest, np.arange(10, dtype=np.int32), str(path), SIZE, RESIZED)


def row(number: int, answer: Any, images: list[PlacedImage], **columns: Any) -> Prompt:
    made = prompt(number, answer=answer, messages=True, **columns)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": "Where is it?"}]
    made.messages, made.images = [{"role": "user", "content": content}], images
    return made


def score(folder: Path, name: str, prompts: list[Prompt], texts: list[list[str]], **fields: Any) -> list[float | None]:
    config = FunctionReward(path=f"vlm_r1_rewards.py:{name}", **fields)
    term = build_term(config, name, FUNCTIONS, images=folder / "store")
    return term.score(batch(prompts, texts), lambda count: None).values


def test_a_function_of_vlm_r1_runs_unchanged(tmp_path: Path) -> None:
    """Boxes in the resized image are half as large as in the file."""
    prompts = [row(0, [0, 0, 28, 28], [image(tmp_path)]), row(1, "[28, 28, 56, 56]", [image(tmp_path, "b.png")])]
    texts = [["<answer>[0, 0, 14, 14]</answer>", "[0, 0, 14, 7]"], ["[14, 14, 28, 28]", "nothing"]]
    found = score(tmp_path, "iou_reward", prompts, texts, signature="vlm_r1")
    assert found == pytest.approx([1.0, 0.5, 1.0, 0.0])


def test_columns_as_its_script_makes_them(tmp_path: Path) -> None:
    prompts = [row(0, "cat", []), row(1, "<answer> dog </answer>", [], accu_reward_method="mcq")]
    texts = [["<answer>cat</answer>", "<answer>dog</answer>"], ["<answer>dog</answer>"]]
    assert score(tmp_path, "accuracy_reward", prompts, texts, signature="vlm_r1") == [1.0, 0.0, 0.0]


def test_a_prompt_without_images_among_others(tmp_path: Path) -> None:
    prompts = [row(0, 1, [image(tmp_path), image(tmp_path, "b.png")]), row(1, 1, [])]
    assert score(tmp_path, "image_count", prompts, [["x"], ["x"]], arguments={"data_source": "a"}) == [2.0, 0.0]


@pytest.mark.parametrize(("form", "given"), [("paths", 2.0), ("pil", 3.0), ("none", 0.0)])
def test_the_config_says_what_is_given(tmp_path: Path, form: Any, given: float) -> None:
    prompts = [row(0, 1, [image(tmp_path)])]
    assert score(tmp_path, "what_it_gets", prompts, [["x"]], images=form) == [given]


def test_pil_images_are_the_functions_own(tmp_path: Path) -> None:
    prompts = [row(0, 1, [image(tmp_path)]), row(1, 1, [image(tmp_path, "b.png", 51)])]
    for each in prompts:
        each.columns["images"] = ["as it is in the data"]
    assert score(tmp_path, "brightness", prompts, [["x", "y"], ["z"]], images="pil") == [1.0, 1.0, 0.2]


def test_images_without_a_file_come_from_the_row(tmp_path: Path) -> None:
    placed = image(tmp_path, grey=51)
    content = Path(placed.source).read_bytes()
    Path(placed.source).unlink()
    placed.source = "image 0"
    whole = row(0, 1, [placed])
    whole.columns["images"] = [{"bytes": content, "path": None}]
    assert score(tmp_path, "brightness", [whole], [["x"]], images="pil") == [0.2]


def test_an_image_that_is_gone_is_named(tmp_path: Path) -> None:
    there, gone = image(tmp_path), image(tmp_path, "b.png")
    Path(gone.source).unlink()
    prompts = [row(0, 1, [there]), row(1, 1, [gone])]
    with pytest.raises(BadReward, match=r"b\.png.* does not exist") as caught:
        score(tmp_path, "brightness", prompts, [["x", "y"], ["z"]], images="pil")
    assert caught.value.position == 2


def test_an_image_that_became_another_is_named(tmp_path: Path) -> None:
    changed = image(tmp_path)
    PIL.Image.new("RGB", (500, 500)).save(changed.source)
    with pytest.raises(BadReward, match="has 500 x 500 pixels, more than"):
        score(tmp_path, "brightness", [row(0, 1, [changed])], [["x"]], images="pil")


def test_a_preparation_that_is_gone_is_named(tmp_path: Path) -> None:
    prompts = [row(0, 1, [image(tmp_path)])]
    (ImageStore(tmp_path / "store").path(prompts[0].images[0].digest)).unlink()
    with pytest.raises(BadReward, match="does not exist"):
        score(tmp_path, "needs_grid", prompts, [["x"]])


def test_a_parameter_for_images_needs_no_column(tmp_path: Path) -> None:
    assert score(tmp_path, "needs_grid", [row(0, 1, [image(tmp_path)])], [["x"]]) == [5.0]
    data = [DataColumns("data.jsonl", ("image",), True, True)]
    config = FunctionReward(path="vlm_r1_rewards.py:needs_grid")
    check_term_columns([config], data, FUNCTIONS)
    with pytest.raises(RewardFunctionError, match="image_grid_thw"):
        check_term_columns([config.model_copy(update={"images": "none"})], data, FUNCTIONS)
    with pytest.raises(BadReward, match="image_grid_thw"):
        score(tmp_path, "needs_grid", [row(0, 1, [])], [["x"]])
