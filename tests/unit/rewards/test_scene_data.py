"""The scenes of the examples: the same for the same seed, with boxes that are where the pixels say."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from reward_samples import batch, prompt

from lockstep.config.terms.answer_terms import IouReward
from lockstep.rewards.reward_terms import build_term

EXAMPLE = Path(__file__).parents[3] / "examples" / "scene_data.py"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    spec = importlib.util.spec_from_file_location("scene_data", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    first, second = (tmp_path_factory.mktemp("scenes") for _ in range(2))
    module.main(first, share=0.02)
    module.main(second, share=0.02)
    return first, second


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def square(path: Path) -> str:
    """The box of the coloured pixels, in cells."""
    values = np.asarray(Image.open(path)).astype(int)
    y, x = np.nonzero(np.ptp(values, axis=2))
    return ",".join(str(each) for each in (x.min() // 4, y.min() // 4, x.max() // 4 + 1, y.max() // 4 + 1))


def test_the_same_seed_makes_the_same_bytes(scenes: tuple[Path, Path]) -> None:
    first, second = ({p.relative_to(f): p.read_bytes() for p in f.rglob("*.*")} for f in scenes)
    assert first == second and len(first) > 400


@pytest.mark.parametrize("name", ["grpo", "eval"])
def test_answers_are_where_the_square_is(scenes: tuple[Path, Path], name: str) -> None:
    for each in rows(scenes[0], name):
        assert each["conversations"][1] == {"from": "gpt", "value": square(scenes[0] / "images" / each["image"])}
        assert each["conversations"][0]["value"] in {f"<image>{c}?" for c in ("red", "green", "blue", "yellow")}


def test_about_half_of_the_labels_are_shifted(scenes: tuple[Path, Path]) -> None:
    right = [
        each["conversations"][1]["value"] == square(scenes[0] / "images" / each["image"])
        for each in rows(scenes[0], "sft")
    ]
    assert 0.4 < np.mean(right) < 0.6


def test_pairs_and_the_reward(scenes: tuple[Path, Path]) -> None:
    term = build_term(IouReward(coordinates="0-8", answer_coordinates="0-8", threshold=0.5), "iou")
    for each in rows(scenes[0], "pairs"):
        chosen, rejected = each["chosen"][0]["content"], each["rejected"][0]["content"]
        assert chosen == square(scenes[0] / "images" / each["images"][0]) != rejected
        found = term.score(batch([prompt(answer=chosen)], [[chosen, rejected]]), lambda count: None).values
        assert found[0] == 1.0 and found[1] in (0.0, 1.0)


def test_images_are_in_one_split_each(scenes: tuple[Path, Path]) -> None:
    pixels = {p.name: np.asarray(Image.open(p)).tobytes() for p in (scenes[0] / "images").iterdir()}
    assert len(set(pixels.values())) == len(pixels)
