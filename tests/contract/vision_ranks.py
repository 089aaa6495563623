"""Trainer ranks of vision-language models as real processes: images on one rank only, frozen parts, own learning rates,
objectives with pairs and groups, resume, and export.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import trainer_ranks as tr
from torch import Tensor

from lockstep.config.algorithm import CrossEntropy, PreferenceLoss
from lockstep.config.recipes import PreferenceConfig
from lockstep.config.train_role import TrainRole
from lockstep.data.forest_builder import forest_from_documents, forest_from_pairs, forest_from_rollouts
from lockstep.data.images.image_processor import load_image_processor
from lockstep.data.images.image_store import ImageStore
from lockstep.data.micro_batch import MicroBatch, MiniBatch
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.data.samples import Completion, Document, Group, Pair, PlacedImage, Prompt, Rollouts
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.vision.tiny_families import VISION_FAMILIES
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.run.step_preferences import prepare_pairs
from lockstep.train.distributed import ParallelContext
from lockstep.train.trainer_kinds import SERVED_MODELS
from lockstep.train.trainer_protocol import Trainer

FAMILIES = ("qwen3_vl", "idefics3", "gemma3", "llava_onevision")
"""Of the plain suite: they differ in positions, tiles, attention and the arguments of the tower."""
OTHERS = tuple(family for family in VISION_FAMILIES if family not in FAMILIES)
"""Of the long suites."""
SIZES = {"hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "vision_hidden": 16, "vision_heads": 2, "vision_ffn": 32}
FROZEN: dict[str, Any] = {"vision": {"tower": {"train": False}, "projector": {"train": False}}}
PROJECTOR: dict[str, Any] = {"vision": {"tower": {"train": False}, "language": {"train": False}}}
RATES: dict[str, Any] = {"vision": {"tower": {"lr": 5e-4}, "projector": {"lr": 4e-3}}}
BUDGET = 80


def make_models(folder: Path, families: Sequence[str] = FAMILIES) -> None:
    """Writes models, and for each the prompts of the data with their prepared images."""
    for family in families:
        make_tiny_vision(folder / family, family=family, **SIZES)
        torch.save(_prompts(folder, family), folder / f"{family}.prompts")


def images_of(folder: Path) -> Path:
    return folder / "images"


def _prompts(folder: Path, family: str) -> list[tuple[np.ndarray, list[PlacedImage]]]:
    """Two prompts with images, one of them with two, and two without."""
    cfg = tr.config(folder, family, "sft").model
    tokenizer = load_tokenizer(cfg)
    processor = load_image_processor(cfg, tokenizer, folder / family)
    assert processor is not None
    store, draw, made = ImageStore(images_of(folder)), np.random.default_rng(7), []
    for number, count in enumerate((1, 0, 2, 0)):
        pictures = [draw.integers(0, 256, (16, (16, 32)[k % 2], 3), dtype=np.uint8) for k in range(count)]
        prepared = []
        for picture in pictures:
            image = processor.prepare(PIL.Image.fromarray(picture), processor.digest(picture.tobytes(), count), count)
            store.write(image)
            prepared.append(image)
        text = " and ".join([processor.placeholder] * count) + f"what {number}?"
        made.append(processor.expand(text, prepared))
    return made


def load_prompts(folder: Path, family: str) -> list[tuple[np.ndarray, list[PlacedImage]]]:
    found: list[tuple[np.ndarray, list[PlacedImage]]] = torch.load(folder / f"{family}.prompts", weights_only=False)
    return found


def _answer(draw: np.random.Generator) -> np.ndarray:
    return draw.integers(20, 50, draw.integers(3, 9)).astype(np.int32)


def documents(folder: Path, family: str) -> list[Document]:
    draw, made = np.random.default_rng(8), []
    for number, (prompt, placed) in enumerate(load_prompts(folder, family)):
        answer = _answer(draw)
        tokens = np.concatenate([prompt, answer])
        made.append(Document(f"0:{number}", number, tokens, np.arange(tokens.size) >= prompt.size, placed))
    return made


def pairs(folder: Path, family: str) -> list[Pair]:
    draw = np.random.default_rng(9)
    prompts = enumerate(load_prompts(folder, family))
    return [Pair(f"0:{n}", n, prompt, _answer(draw), _answer(draw), images=placed) for n, (prompt, placed) in prompts]


def rollouts(folder: Path, family: str) -> tuple[Rollouts, np.ndarray]:
    """Some completions contain the placeholder token, as a policy may sample it."""
    draw, groups = np.random.default_rng(10), []
    prompts = load_prompts(folder, family)
    placeholder = prompts[0][0][prompts[0][1][0].places[0]]
    for number, (tokens, placed) in enumerate(prompts):
        completions = []
        for k in range(3):
            answer = _answer(draw)
            answer[1] = placeholder if k == 0 else answer[1]
            logprobs = (-4.6 + 0.1 * draw.standard_normal(answer.size)).astype(np.float32)
            versions = np.zeros(answer.size, np.int32)
            completions.append(Completion(f"{number}-{k}", answer, logprobs, versions, "stop", ""))
        groups.append(Group(Prompt(f"0:{number}", number, tokens, "", images=placed), completions))
    return Rollouts(0, 0, groups), draw.standard_normal((4, 3))


def role_of(folder: Path, family: str, recipe: str, model: dict[str, Any], kind: str, **trainer: Any) -> TrainRole:
    if recipe != "dpo":
        return tr.config(folder, family, recipe, model, kind=kind, **trainer).policy
    sft = tr.config(folder, family, "sft", model, kind=kind, **trainer)
    values = {name: getattr(sft, name).model_dump() for name in ("model", "data", "trainer")}
    return PreferenceConfig.model_validate({"recipe": "preference", "name": "contract", "steps": 10, **values}).policy


def rows_of_ranks(folder: Path, family: str, role: TrainRole, trainer: Trainer, ranks: ParallelContext) -> MiniBatch:
    """The data as one optimizer step: for supervised fine-tuning, with two ranks, all images are on the first. Fields
    that a rank evaluates are set for its own rows."""
    if isinstance(role.objective, CrossEntropy):
        forest = forest_from_documents(documents(folder, family))
        return next(iter(pack(forest, ranks.world, BUDGET, "single").minibatches(1, None, role.objective)))
    if isinstance(role.objective, PreferenceLoss):
        batch = pack(forest_from_pairs(pairs(folder, family)), ranks.world, BUDGET, "forest")
        prepare_pairs(batch, role.objective)
    else:
        batch = pack(forest_from_rollouts(*rollouts(folder, family)), ranks.world, BUDGET, "forest")
    _evaluate(batch, role, trainer, ranks.rank)
    return next(iter(batch.minibatches(1, None, role.objective)))


def _evaluate(batch: TrainingBatch, role: TrainRole, trainer: Trainer, rank: int) -> None:
    everything = batch.everything()
    for name, output in role.evaluated_fields.items():
        values = [[np.zeros(row.index.size, np.float32) for row in each] for each in everything.by_rank]
        mine = trainer.evaluate(everything.by_rank[rank], [output])
        values[rank] = [row[output] for row in mine]
        batch.set_field(name, everything, values)


def mine(minibatch: MiniBatch, role: TrainRole, rank: int) -> list[MicroBatch[np.ndarray]]:
    if not isinstance(role.objective, CrossEntropy) or minibatch.ranks == 1:
        return minibatch.by_rank[rank]
    rows = [row for each in minibatch.by_rank for row in each]
    empty = minibatch.spread(len(rows) + 1).by_rank[-1][0]
    assert empty.images == [] and empty.tokens.size == 1
    seeing, blind = [row for row in rows if row.images], [row for row in rows if not row.images]
    return [*seeing, empty] if rank == 0 else [blind[0], empty, *blind[1:]]


Pieces = dict[str, tuple[int, Tensor, tuple[int, ...]]]
"""By name: the first element that a rank has of a flattened tensor, its elements, and the shape of the whole."""


def first_moments(trainer: Any, ranks: ParallelContext) -> Pieces:
    """After one step, Adam's first moments: the clipped gradients, scaled."""
    state = trainer.state.state() if hasattr(trainer, "state") else trainer._state()
    moments = {name: rows for name, rows in state.items() if name.startswith("exp_avg.")}
    copies = trainer.writer.ranks
    return {n: (r.first_element(copies), r.local.flatten().clone(), tuple(r.shape)) for n, r in moments.items()}


def whole(parts: list[Pieces]) -> dict[str, Tensor]:
    """The tensors of which the ranks have pieces."""
    found = {name: torch.zeros(torch.Size(shape).numel()) for name, (_, _, shape) in parts[0].items()}
    for part in parts:
        for name, (first, elements, _) in part.items():
            found[name][first : first + len(elements)] = elements
    return found


@dataclass(frozen=True)
class Case:
    """Some steps, and what is published after them."""

    family: str = "qwen3_vl"
    recipe: str = "sft"
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    export: bool = False

    def __call__(self, kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
        role = role_of(folder, self.family, self.recipe, self.model, kind, **self.trainer)
        trainer = tr.create(role, ranks, images_of(folder))
        rows = mine(rows_of_ranks(folder, self.family, role, trainer, ranks), role, ranks.rank)
        result = tr.Result(ranks.rank, tr.take_steps(trainer, rows, 1))
        result.extra["gradient"] = first_moments(trainer, ranks)
        result.metrics += tr.take_steps(trainer, rows, 2)
        result.weights = tr.rows_of_all(trainer)
        result.extra["images"] = [len(row.images or ()) for row in rows]
        result.extra["published"] = [each.name for each in trainer.parameters()]
        result.extra["packing"] = trainer.probe_packing()
        result.extra["constant"] = trainer.forward.images.constant  # type: ignore[attr-defined]
        if self.export:
            trainer.export(folder / f"exported-{kind}-{ranks.world}")
        return result


def resume(model: dict[str, Any], kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Saves after two steps; a new trainer continues from there."""
    role = role_of(folder, "qwen3_vl", "grpo", model, kind)
    first, saved = tr.create(role, ranks, images_of(folder)), folder / "saved" / f"{kind}-{len(model)}-{ranks.world}"
    rows = mine(rows_of_ranks(folder, "qwen3_vl", role, first, ranks), role, ranks.rank)
    result = tr.Result(ranks.rank, tr.take_steps(first, rows, 2))
    first.save(saved)
    straight = tr.take_steps(first, rows, 2)
    tr.wait_saved(first)
    result.weights = tr.rows_of_all(first)
    second = tr.create(role, ranks, images_of(folder))
    second.load(saved)
    assert tr.take_steps(second, rows, 2) == straight
    result.extra["resumed"] = tr.rows_of_all(second)
    return result


def served(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """A served model gives the log-probabilities that a reference on the trainer's ranks gives."""
    from lockstep.config.serve_role import ServeRole

    role = role_of(folder, "qwen3_vl", "grpo", {}, kind)
    trainer = tr.create(role, ranks, images_of(folder))
    rows = mine(rows_of_ranks(folder, "qwen3_vl", role, trainer, ranks), role, ranks.rank)
    serve = ServeRole(name="reference", model=role.model, ranks=ranks.world, temperature=role.temperature)
    model = SERVED_MODELS.create(serve, ranks, images_of(folder))
    result = tr.Result(ranks.rank)
    result.extra["held"] = trainer.evaluate(rows, ["reference_logprobs"])
    result.extra["served"] = model.evaluate(rows, ["logprobs"])
    return result


def text_alone(kind: str, folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
    """Data without images: tower and projector are in no forward, and stay as they are."""
    role = role_of(folder, "qwen3_vl", "sft", {}, kind)
    trainer = tr.create(role, ranks)
    texts = [each for each in documents(folder, "qwen3_vl") if not each.images]
    batch = pack(forest_from_documents(texts * 2), ranks.world, BUDGET, "single")
    rows = next(iter(batch.minibatches(1, None, role.objective))).by_rank[ranks.rank]
    result = tr.Result(ranks.rank)
    assert len(rows) > 1
    result.extra["before"] = tr.rows_of_all(trainer)
    result.metrics = tr.take_steps(trainer, rows, 3)
    result.weights = tr.rows_of_all(trainer)
    return result


SUITE: dict[str, Any] = {
    **{family: Case(family, export=family == "qwen3_vl") for family in FAMILIES},
    "frozen": Case(model=FROZEN),
    "projector": Case(model=PROJECTOR),
    "projector-inside": Case("idefics3", model=PROJECTOR),
    "rates": Case(model=RATES),
    "dpo": Case(recipe="dpo"),
    "dpo-frozen": Case(recipe="dpo", model=FROZEN),
    "grpo": Case(recipe="grpo"),
    "grpo-frozen": Case(recipe="grpo", model=FROZEN),
    "adapter": Case("idefics3", model={"adapter": {"r": 2}}),
    "text-alone": text_alone,
    "resume": partial(resume, {}),
    "resume-frozen": partial(resume, FROZEN),
}
LONG: dict[str, Any] = {family: Case(family) for family in OTHERS}
"""Cases of all kinds in the long suites."""
FSDP2_ONLY: dict[str, Any] = {
    "recomputed": Case(trainer={"activation_checkpointing": True}),
    "zero2": Case(trainer={"reshard_after_forward": False}),
    "served": served,
}
KINDS = ("fsdp2", "deepspeed-2", "deepspeed-3", "deepspeed-1")


def suite(kind: str) -> dict[str, Any]:
    return {**SUITE, **(FSDP2_ONLY if kind == "fsdp2" else {})}


CASES: dict[str, tr.Case] = {
    f"{kind}:{name}": partial(case, kind) for kind in KINDS for name, case in {**suite(kind), **LONG}.items()
}
