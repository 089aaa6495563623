"""How many images samples have, and how many tokens they take."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer
from vision_folders import load, png, vision_folder

from lockstep.config.data import DatasetConfig, TrainingDataConfig
from lockstep.data.datasets import load_rows
from lockstep.data.images.image_usage import ImageTally, ImageUsage, usage_of_samples
from lockstep.data.mixture import open_training_source
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.source_factory import SourceOptions, open_source


def test_only_the_rows_in_use_count() -> None:
    tally = ImageTally(4)
    tally.note(0, [((10, 20), 7), ((30, 10), 9)])
    tally.note(2, [((90, 90), 50)])
    assert tally.usage(np.array([0, 1])) == ImageUsage(2, 2, 16, 2, 16, 9, (30, 10))
    assert tally.usage(np.array([1, 2])) == ImageUsage(2, 1, 50, 1, 50, 50, (90, 90))
    assert tally.usage(np.array([], int)) == ImageUsage()


def test_two_datasets_are_added_up() -> None:
    one, other = ImageUsage(2, 2, 16, 2, 16, 9, (30, 10)), ImageUsage(3, 1, 50, 1, 50, 50, (90, 90))
    assert one + other == other + one == ImageUsage(5, 3, 66, 2, 50, 50, (90, 90))


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_samples_have_what_the_dataset_says(tmp_path: Path, family: str) -> None:
    folder = vision_folder(tmp_path, family)
    for name, size in (("a.png", (30, 50)), ("b.png", (64, 40))):
        (tmp_path / name).write_bytes(png(size))
    prompts = {"<image>what?": ["a.png"], "<image>what<image>?": ["a.png", "b.png"], "what?": []}
    rows = [{"prompt": prompt, "images": names} for prompt, names in prompts.items()]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = SourceOptions(images=load(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    values = {"path": str(tmp_path / "data.jsonl"), "shuffle": False}
    cfg = DatasetConfig.model_validate(values)
    source = open_source("prompts", load_rows(cfg), cfg, tokenizer, 0, LengthLimit(2000), options)
    samples = source.take(0, 3)
    usage = source.image_usage
    assert usage == usage_of_samples(samples)
    assert (usage.samples, usage.images, usage.most_images) == (3, 3, 2)
    assert usage.largest_size == ((30, 50) if family == "idefics3" else (64, 40)), "Idefics3 enlarges both alike"
    assert usage.most_tokens == sum(len(image.places) for image in samples[1].images) and source.has_images
    mixed = TrainingDataConfig.model_validate({"mixture": [values, {**values, "label": "again"}], "shuffle": False})
    assert open_training_source("prompts", mixed, tokenizer, 0, LengthLimit(2000), options).image_usage == usage + usage
