"""The plan that `--dry-run` shows lists the collectives that a trainer rank really enters."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served_ranks as sr
import torch
import torch.distributed as dist
import trainer_ranks as tr
import vision_ranks as vr
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.base.wait_state import WaitTimeout
from lockstep.config.loader import check_config
from lockstep.config.run_config import RunConfig
from lockstep.data.forest_builder import forest_from_documents, forest_from_pairs, forest_of_scored_pairs
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Pair
from lockstep.models.model_facts import model_facts
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_plan import FSDP2Planner, FSDP2ServedModelPlanner
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.train.fsdp.sharded_model import FSDP2ServedModel
from lockstep.train.metric_reduction import MetricAccumulator
from lockstep.train.objective import make_objective
from lockstep.train.trainer_plan import PlannedCollective


def planned_collectives(config: RunConfig) -> list[PlannedCollective]:
    """The collectives of one step with one update."""
    facts = model_facts(config.model, "cpu")
    return FSDP2Planner().collectives(config.policy, facts, 1, publishes=config.needs_engines)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the collectives of one of two ranks by name; its peer is a fake."""
    found: Counter[str] = Counter()
    for name, label in (
        ("all_gather_single", "gather"),
        ("reduce_scatter_single", "scatter"),
        ("all_gather", "gathered_list"),
    ):
        original = getattr(dist, name)

        def counted(*args: Any, original: Any = original, label: str = label, **kwargs: Any) -> Any:
            found[label] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield found
    dist.destroy_process_group()


UPPER = {"kind": "dora", "r": 4, "target_modules": ["layers.1.mlp.up_proj"]}


BESIDE = UPPER | {"modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(
    "adapter",
    [None, {"r": 4}, UPPER, BESIDE],
    ids=["all weights", "lora", "dora in the upper layer", "with the tied embedding"],
)
@pytest.mark.parametrize("reshard", [True, False])
def test_the_planned_collectives_are_those_of_a_step(
    tmp_path: Path, counts: Counter[str], reshard: bool, adapter: dict[str, Any] | None
) -> None:
    tr.make_models(tmp_path)
    config = tr.config(tmp_path, "qwen2", "grpo", {"adapter": adapter}, ranks=2, reshard_after_forward=reshard)
    planned = planned_collectives(config)
    trainer = FSDP2Trainer(config.policy, ParallelContext(0, 2, torch.device("cpu"), 0.1, dist.group.WORLD))
    batch = tr.batch_of(config, ranks=2, budget=40)
    minibatch = batch.everything()
    rows = minibatch.by_rank[0]
    assert len(rows) > 1

    def expected(line: int) -> int:
        times = planned[line].times.partition(" (")[0]
        per, _, also = times.partition(", and ")
        return int(re.match(r"\d+", per)[0]) * (len(rows) if "micro-batch" in per else 1) + int(also or 0)  # type: ignore[index]

    counts.clear()
    trainer.evaluate(rows, ["logprobs", "reference_logprobs"])
    assert counts == {"gather": expected(0)}
    for name in ("old_logprob", "reference_logprob"):
        batch.set_field(name, minibatch, [[row.fields["engine_logprob"] for row in rank] for rank in minibatch.by_rank])
    counts.clear()
    with pytest.raises(WaitTimeout):  # the fake peer sends nothing, so the optimizer is not reached
        trainer.step(batch.everything().by_rank[0])
    assert counts == {"gather": expected(1), "scatter": expected(2), "gathered_list": expected(3)}
    counts.clear()
    if adapter is not None:
        with pytest.raises(WaitTimeout):
            list(trainer.shards())
        assert counts == {"gathered_list": expected(4)}
        assert planned[4].bytes == 4 * sum(parameter.numel() for parameter in trainer.merged_weights.adapter.values())


def test_replicas_add_the_planned_all_reduce(
    tmp_path: Path, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    original = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kw: (counts.update(["reduce"]), original(*args, **kw))[1])
    tr.make_models(tmp_path)
    config = tr.config(tmp_path, "qwen2", "sft", ranks=4, replicas=2)
    planned = planned_collectives(config)
    assert [line.operation for line in planned] == ["all_gather", "reduce_scatter", "all_reduce", "all_gather"]
    here, across = dist.new_group([0, 1]), dist.new_group([0, 2])
    ranks = ParallelContext(0, 4, torch.device("cpu"), 0.1, dist.group.WORLD, replicas=2, copy=here, across=across)
    trainer = FSDP2Trainer(config.policy, ranks)
    counts.clear()
    with pytest.raises(WaitTimeout):
        trainer.step(tr.batch_of(config, ranks=4, budget=40).everything().by_rank[0])
    assert counts["reduce"] == counts["scatter"] == int(planned[2].times.split()[0]) == 3


def test_the_vector_of_metrics_is_as_long_as_planned(tmp_path: Path) -> None:
    tr.make_models(tmp_path)
    for recipe in ("sft", "grpo"):
        config = tr.config(tmp_path, "qwen2", recipe, ranks=2)
        (planned,) = [line for line in planned_collectives(config) if "gradient norm and metrics" in line.times]
        metrics = make_objective(config.objective).metrics
        vector = MetricAccumulator(metrics, torch.device("cpu")).vector(torch.zeros(()))
        assert vector.numel() * vector.element_size() == planned.bytes


def test_the_planned_collectives_of_a_served_model_are_those_of_an_evaluation(
    tmp_path: Path, counts: Counter[str]
) -> None:
    tr.make_models(tmp_path)
    role = sr.role(tmp_path, "qwen2", ranks=2)
    (planned,) = FSDP2ServedModelPlanner().collectives(role, model_facts(role.model, "cpu"))
    model = FSDP2ServedModel(role, ParallelContext(0, 2, torch.device("cpu"), 0.1, dist.group.WORLD))
    rows = sr.batch(tmp_path, "qwen2", 40).everything().spread(2).by_rank[0]
    counts.clear()
    model.evaluate(rows, ["logprobs"])
    per, also = map(int, re.findall(r"\d+", planned.times)[:2])
    assert len(rows) > 1 and counts == {"gather": per * len(rows) + also}
    alone = role.model_copy(update={"ranks": 1})
    assert FSDP2ServedModelPlanner().collectives(alone, model_facts(role.model, "cpu")) == []


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    ("recipe", "changes", "output", "when"),
    [
        ("reward", {}, "scores", "only if pairs are divided"),
        ("preference", {}, "logprobs", "only if pairs are divided"),
        ("preference", {}, "reference_logprobs", "log-probabilities before training"),
        ("preference", {"loss": {"type": "aot"}, "reference": {}}, "logprobs", "log-probabilities before training"),
        ("preference", {"precompute_ref_log_probs": True}, "logprobs", "only before the first step"),
    ],
)
def test_evaluations_that_not_every_step_has_are_planned(
    tmp_path: Path, counts: Counter[str], recipe: str, changes: dict[str, Any], output: Any, when: str, reshard: bool
) -> None:
    tr.make_models(tmp_path)
    made = tr.config(tmp_path, "qwen2", "sft", ranks=2, reshard_after_forward=reshard)
    common = made.model_dump(mode="json", include={"name", "steps", "data", "trainer"})
    config = check_config({**common, "recipe": recipe, "model": {"path": made.model.path}, **changes}, "test")
    (planned,) = [line for line in planned_collectives(config) if when in line.times]
    trainer = FSDP2Trainer(config.policy, ParallelContext(0, 2, torch.device("cpu"), 0.1, dist.group.WORLD))
    tokens = np.arange(10, 18, dtype=np.int32)
    pairs = [Pair(str(n), n, tokens, tokens, tokens[::-1].copy()) for n in range(6)]
    forest = forest_of_scored_pairs(pairs) if recipe == "reward" else forest_from_pairs(pairs)
    rows = pack(forest, 2, 20).everything().by_rank[0]
    counts.clear()
    trainer.evaluate(rows, [output])
    per, _, also = planned.times.partition(" (")[0].partition(", and ")
    times = int(per.split()[0]) * (len(rows) if "micro-batch" in per else 1) + int(also or 0)
    assert len(rows) > 1 and counts == {"gather": times}


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_images_add_the_planned_collectives_of_tower_and_projector(
    family: str, tmp_path: Path, counts: Counter[str]
) -> None:
    """Also for rows without images. A frozen tower adds none, and neither does data without images."""
    make_tiny_vision(tmp_path / family, family=family, **vr.SIZES)
    torch.save(vr._prompts(tmp_path, family), tmp_path / f"{family}.prompts")
    ranks = ParallelContext(0, 2, torch.device("cpu"), 0.1, dist.group.WORLD)
    batch = pack(forest_from_documents(vr.documents(tmp_path, family)), 1, vr.BUDGET, "single")
    found = []
    for model in (vr.FROZEN, {}):
        config = tr.config(tmp_path, family, "sft", model, ranks=2)
        rows = next(iter(batch.minibatches(1, None, config.policy.objective))).by_rank[0]
        trainer = FSDP2Trainer(config.policy, ranks, images=vr.images_of(tmp_path))
        counts.clear()
        with pytest.raises(WaitTimeout):
            trainer.step(rows)
        found.append(dict(counts))
    vision = [line for line in planned_collectives(config) if "tower and projector" in line.times]
    gathers, scatters = (int(line.times.split()[0]) for line in vision)
    assert found[1]["gather"] - found[0]["gather"] == gathers * len(rows)
    assert found[1]["scatter"] - found[0]["scatter"] == scatters
    trainer = FSDP2Trainer(config.policy, ranks)
    counts.clear()
    with pytest.raises(WaitTimeout):  # the same rows, as if the data had no images: none calls the tower
        trainer.step([replace(row, images=None) for row in rows])
    assert counts == found[0]
