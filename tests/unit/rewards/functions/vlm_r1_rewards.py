"""Reward functions as VLM-R1 has them: its signature, its way to read completions, solutions, images and grids."""

import json
import re

from PIL import Image


def iou_reward(completions, solution, **kwargs):
    """Boxes of the resized image (grid times 14), against boxes of the file."""
    rewards = []
    for index, (completion, truth) in enumerate(zip(completions, solution, strict=True)):
        _, rows, columns = (int(each) for each in kwargs.get("image_grid_thw")[index])
        with Image.open(kwargs.get("image_path")[index][0]) as image:
            width, height = image.size
        truth = json.loads(re.findall(r"<answer>(.*?)</answer>", truth, re.DOTALL)[-1].strip())
        found = re.search(r"\[(\d+), (\d+), (\d+), (\d+)\]", completion[0]["content"])
        if found is None:
            rewards.append(0.0)
            continue
        x1, y1, x2, y2 = (int(each) for each in found.groups())
        box = (x1 * width / columns / 14, y1 * height / rows / 14, x2 * width / columns / 14, y2 * height / rows / 14)
        common = max(0, min(box[2], truth[2]) - max(box[0], truth[0]))
        common *= max(0, min(box[3], truth[3]) - max(box[1], truth[1]))
        both = sum((each[2] - each[0]) * (each[3] - each[1]) for each in (box, truth))
        rewards.append(common / (both - common))
    return rewards


def accuracy_reward(completions, solution, **kwargs):
    assert kwargs["problem"][0] == "Where is it?"
    tag = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
    methods = kwargs.get("accu_reward_method")
    return [
        float(tag.findall(each[0]["content"])[-1].strip() == tag.findall(truth)[-1].strip() and method == "default")
        for each, truth, method in zip(completions, solution, methods, strict=True)
    ]


def brightness(completions, images, **kwargs):
    """TRL's signature, with PIL images. It draws on its image, which the next completion must not see."""
    found = []
    for image in images:
        assert image[0].mode == "RGB"
        found.append(image[0].getpixel((0, 0))[0] / 255)
        image[0].putpixel((0, 0), (0, 0, 0))
    return found


def image_count(data_source, solution_str, ground_truth, extra_info=None, image_path=None):
    return float(len(image_path or []))


def what_it_gets(completions, **kwargs):
    given = set(kwargs) & {"image_path", "image_grid_thw", "images"}
    return [float(len(given))] * len(completions)


def needs_grid(completions, image_grid_thw):
    return [float(each[1]) for each in image_grid_thw]
