"""The measured workloads: the same tiny model, prompts, lengths and documents for every side.

A `Side` is one way to run a workload: Lockstep, or TRL with given settings. This file has all settings of both sides.
"""

import json
import string
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from lockstep.models.tiny_model import TinyModel, make_tiny
from lockstep.models.vision.tiny_vision import TinyVision, make_tiny_vision

MODEL = TinyModel(hidden=256, layers=4, heads=4, kv_heads=2, ffn=768, max_length=1024, seed=1)
"""Qwen2, 3.2 M parameters, tied embeddings, random weights."""
TOY = TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, ffn=64, max_length=1024, seed=1)
"""The model of `--quick`."""
VISION = TinyVision(
    "gemma3",
    hidden=256,
    layers=4,
    heads=4,
    kv_heads=2,
    ffn=768,
    max_length=1024,
    vision_hidden=128,
    vision_layers=4,
    vision_heads=4,
    vision_ffn=512,
    image_size=448,
    patch=14,
    merge=2,
    seed=1,
)
"""Gemma 3: 3.2 M parameters and a tower of 1.0 M; 1,024 patches of an image become 256 tokens. Its processor needs no
torchvision, which TRL would need for Qwen-VL's."""

LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Side:
    """One way to run a workload. The first side of a workload is Lockstep with its defaults."""

    name: str
    """`lockstep`, or the name in the table."""
    program: Literal["lockstep", "trl"]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings in addition to those of all sides of this program: overrides of the config, or arguments of TRL's
    config."""
    steps: int = 1
    """Measured steps of one repeat."""
    title: str = ""
    """Shown in the table instead of the name."""
    repeats: int | None = None
    """Number of repeats, if fewer than requested because a step takes a minute."""
    warm: bool = True
    """Whether a warm-up step comes before the measured ones; not if a step takes a minute."""


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the table."""

    name: str
    title: str
    kind: Literal["grpo", "sft", "preference"]
    sides: tuple[Side, ...]
    goals: dict[str, float]
    """Goal of Lockstep / peer by the name of the peer; of another way to run Lockstep by `way / peer`."""
    prompts: int = 16
    """Prompts per step; documents in SFT."""
    group: int = 8
    """Completions per prompt: 2 where pairs are compared."""
    prompt_tokens: int = 32
    max_tokens: int = 64
    """Length of a completion, or of a document in SFT."""
    tail: bool = False
    """Completions' lengths are exponential with mean `max_tokens / 3`, at most `max_tokens`; otherwise all maximal."""
    vision: TinyVision | None = None
    """The model, if each prompt has an image, of the model's `image_size`."""
    details: int = 0
    """Steps after the measured ones in which the stages of Lockstep are measured."""

    @property
    def completions(self) -> int:
        return self.prompts * self.group


def lengths(work: Work, steps: int = 1) -> np.ndarray:
    """int64 `[steps * prompts, group]`: tokens of each completion, end of sequence included; the same on both sides,
    and in every step."""
    shape = (work.prompts, work.group)
    if work.tail:
        drawn = np.random.default_rng(7).exponential(work.max_tokens / 3, size=shape)
        one = np.clip(np.rint(drawn), 1, work.max_tokens).astype(np.int64)
    else:
        one = np.full(shape, work.max_tokens, np.int64)
    return np.tile(one, (steps, 1))


def document_lengths(work: Work, steps: int = 1) -> np.ndarray:
    """int64 `[steps * documents]`: characters of each document, the same in every step: exponential, mean a quarter of
    the longest. Each is a token, and one more ends the document."""
    drawn = np.random.default_rng(8).exponential(work.max_tokens / 4, size=work.prompts)
    return np.tile(np.clip(np.rint(drawn), 8, work.max_tokens - 1).astype(np.int64), steps)


def texts(sizes: Iterable[int], seed: int = 9) -> list[str]:
    """Random letters, one token each."""
    draw = np.random.default_rng(seed)
    return ["".join(draw.choice(list(LETTERS), size=int(size))) for size in sizes]


def prepare(work: Work, folder: Path, steps: int, model: TinyModel = MODEL) -> None:
    """Write model and data for so many steps into `folder`: `model/` and `data.jsonl`, whose rows are used in order."""
    if work.vision:
        make_tiny_vision(folder / "model", work.vision)
    else:
        make_tiny(folder / "model", model)
    if work.kind == "grpo":
        prompts = texts([work.prompt_tokens] * steps * work.prompts)
        lines: list[dict[str, Any]] = [{"prompt": text} for text in prompts]
        if work.vision:
            images = draw_images(folder, len(prompts), work.vision.image_size)
            lines = [
                {"prompt": [{"role": "user", "content": text}], "image": str(image)}
                for text, image in zip(prompts, images, strict=True)
            ]
    elif work.kind == "preference":
        letters = np.maximum(lengths(work, steps) - 1, 1)  # the end of sequence is a token, too
        columns = {
            "prompt": texts([work.prompt_tokens] * steps * work.prompts),
            "chosen": texts(letters[:, 0], seed=10),
            "rejected": texts(letters[:, 1], seed=11),
        }
        lines = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    else:
        lines = [{"text": text} for text in texts(document_lengths(work, steps).tolist())]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def draw_images(folder: Path, count: int, side: int) -> list[Path]:
    """PNG files of coloured noise, each different."""
    draw = np.random.default_rng(12)
    paths = [folder / f"image-{number}.png" for number in range(count)]
    for path in paths:
        Image.fromarray(draw.integers(0, 256, (side, side, 3), np.uint8)).save(path)
    return paths


def lockstep_config(work: Work, side: Side, folder: Path, steps: int) -> dict[str, Any]:
    """The run's config. Other fields have their defaults: ledger, metrics and TensorBoard are on."""
    config: dict[str, Any] = {
        "recipe": work.kind,
        "name": "run",
        "folder": str(folder / "lockstep"),
        "steps": steps,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "data.jsonl"), "shuffle": False},
        "trainer": {"threads": 1, "optimizer": {"lr": 1e-6}, "max_grad_norm": 1.0},
        "checkpoint": {"every": 0, "export": False},
        "report": {"console": False, "html": False},
        "cluster": {"kind": "local", "device": "cpu"},
    }
    if work.kind == "grpo":
        config |= {
            "prompts_per_step": work.prompts,
            "group_size": work.group,
            "reward": {"terms": [{"kind": "function", "path": f"{REWARD}:signal", "signature": "trl"}]},
            "rollout": {
                "sampling": {"temperature": 1.0, "max_tokens": work.max_tokens, "ignore_eos": True},
                "engine": {"threads": 1},
            },
        }
    elif work.kind == "preference":
        config |= {"batch_size": work.prompts}
    else:
        config |= {"batch_size": work.prompts, "train_on_prompt": True}
        config["data"]["format"] = "text"
    return merged(config, side.settings)


REWARD = Path(__file__).with_name("reward.py")


def trl_arguments(work: Work, side: Side, folder: Path, steps: int) -> dict[str, Any]:
    """Arguments of TRL's config that differ from the defaults: those for the same work (32 bit, no
    checkpoints, no recomputation, the same optimizer) and the batch."""
    micro = side.settings["per_device_train_batch_size"]
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "max_steps": steps,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
    }
    if work.kind == "grpo":
        arguments |= {
            "gradient_accumulation_steps": work.completions // micro,
            "num_generations": work.group,
            "max_completion_length": work.max_tokens,
            "temperature": 1.0,
            "shuffle_dataset": False,
        }
    elif work.kind == "preference":
        arguments |= {
            "gradient_accumulation_steps": work.prompts // micro,
            "max_length": None,
            "train_sampling_strategy": "sequential",
        }
    else:
        arguments |= {"max_length": work.max_tokens, "train_sampling_strategy": "sequential"}
    return merged(arguments, side.settings)


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `more`, merged recursively."""
    out = dict(base)
    for key, value in more.items():
        deeper = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if deeper else value
    return out


def _trl(name: str, title: str, micro: int, steps: int, **more: Any) -> Side:
    return Side(name, "trl", {"per_device_train_batch_size": micro, **more}, steps, title)


def _lockstep(steps: int, **more: Any) -> Side:
    return Side("lockstep", "lockstep", more, steps)


FIXED = Work(
    "fixed",
    "GRPO, 16 prompts x 8, 64 tokens each, 32-token prompts",
    "grpo",
    (
        _lockstep(2),
        _trl("trl", "TRL, micro-batch 128", 128, 2),
        Side("compiled", "lockstep", {"trainer": {"compile": "layers"}}, 2, "layers compiled"),
    ),
    {"trl": 1.35, "compiled / trl": 1.5},
    details=3,
)
TAIL = replace(
    FIXED,
    name="tail",
    title="GRPO, the same with a long tail",
    sides=FIXED.sides[:2],
    goals={"trl": 2.6},
    tail=True,
    details=0,
)
BFD = {"packing": True, "packing_strategy": "bfd"}
BY_32 = {"steps_per_generation": 4}
LONG = ("trl default", "trl best")
COMPILED = FIXED.sides[2]


def _dpo(name: str, prompt_tokens: int, goal: float, tail: bool = False) -> Work:
    sides = (
        _lockstep(2),
        _trl("trl", "TRL, micro-batch 8 (its default)", 8, 2),
        _trl("trl 1", "TRL, micro-batch 1", 1, 2),
        _trl("trl 16", "TRL, micro-batch 16", 16, 2),
        replace(COMPILED, steps=2),
    )
    length = "1 to 64 tokens (mean 21)" if tail else "64 tokens"
    title = f"DPO, 16 pairs of {length} each, {prompt_tokens}-token prompts"
    goals = {side.name: goal for side in sides if side.program == "trl"}
    return Work(name, title, "preference", sides, goals, group=2, prompt_tokens=prompt_tokens, tail=tail)


WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        FIXED,
        TAIL,
        Work(
            "p512",
            "GRPO, 16 prompts x 8, 64 tokens each, 512-token prompts",
            "grpo",
            (
                _lockstep(1),
                replace(_trl(LONG[0], "TRL, micro-batch 8 (its default)", 8, 1), repeats=3, warm=False),
                replace(
                    _trl(LONG[1], "TRL, micro-batch 8, 32 generated at once", 8, 1, **BY_32), repeats=3, warm=False
                ),
                replace(COMPILED, steps=1),
            ),
            {LONG[0]: 9.0, LONG[1]: 6.0, f"compiled / {LONG[0]}": 9.0, f"compiled / {LONG[1]}": 6.0},
            prompt_tokens=512,
        ),
        Work(
            "sft",
            "SFT, 32 documents of 8 to 512 tokens, isolated",
            "sft",
            (
                _lockstep(3),
                _trl("trl unpacked", "TRL, unpacked, micro-batch 8 (its default)", 8, 3, gradient_accumulation_steps=4),
                _trl("trl unpacked 1", "TRL, unpacked, micro-batch 1", 1, 3, gradient_accumulation_steps=32),
                _trl("trl bfd", "TRL, `bfd`, micro-batch 8 (its default)", 8, 3, **BFD),
                _trl("trl bfd 1", "TRL, `bfd`, micro-batch 1", 1, 3, gradient_accumulation_steps=8, **BFD),
                replace(COMPILED, steps=3),
            ),
            {"trl unpacked": 1.9, "trl bfd": 3.5, "compiled / trl unpacked": 1.9, "compiled / trl bfd": 3.5},
            prompts=32,
            group=1,
            max_tokens=512,
        ),
        Work(
            "vision",
            "GRPO, 4 prompts x 8, 64 tokens each, an image of 448 x 448 pixels and 32 tokens per prompt",
            "grpo",
            (
                _lockstep(2),
                _trl("trl", "TRL, micro-batch 32", 32, 2),
                _trl("trl default", "TRL, micro-batch 8 (its default)", 8, 2),
            ),
            {"trl": 4.0, "trl default": 4.0},
            prompts=4,
            vision=VISION,
            details=2,
        ),
        _dpo("dpo", 32, 1.5),
        _dpo("dpo512", 512, 2.5),
        _dpo("dpo-tail", 32, 1.5, tail=True),
        _dpo("dpo512-tail", 512, 2.5, tail=True),
    )
}


def quick(work: Work) -> Work:
    """A version of the workload that takes seconds: two prompts or documents, few tokens, one step."""
    group = min(work.group, 2)
    sides = []
    for side in (side for side in work.sides if side is work.sides[0] or side.program == "trl"):
        small = {"per_device_train_batch_size": 2}
        small |= dict.fromkeys({"gradient_accumulation_steps", "steps_per_generation"} & set(side.settings), 1)
        settings = merged(side.settings, small) if side.program == "trl" else side.settings
        sides.append(replace(side, settings=settings, steps=1, warm=False))
    tokens, details = (64 if work.kind == "sft" else 4), min(work.details, 1)
    small_work: dict[str, Any] = {"prompts": 2, "group": group, "prompt_tokens": 8, "max_tokens": tokens}
    if work.vision:
        sizes = {"hidden": 32, "layers": 1, "ffn": 64, "vision_hidden": 16, "vision_layers": 1, "vision_ffn": 32}
        small_work["vision"] = replace(work.vision, **sizes, kv_heads=1, image_size=28)
    small_work["details"] = details
    return replace(work, sides=tuple(sides), **small_work)
