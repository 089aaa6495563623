"""The contract of every kind of trainer, used through its protocol alone: equal results however work is split, complete
checkpoints, no step on bad numbers. What a kind lacks, it refuses before anything starts.
"""

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import replicated_trainer
import torch
import trainer_ranks as tr
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.config.algorithm import KLPenalty
from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.config.trainer import TRAINER_KINDS
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import pack
from lockstep.models.model_facts import model_facts
from lockstep.run.planning.resources import host_resources
from lockstep.run.planning.run_plan import make_plan
from lockstep.train.checkpoints.checkpoint_retention import checkpoint_bytes, remove_checkpoint, remove_leftovers
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.errors import CheckpointError, TrainerUnsupported
from lockstep.train.trainer_kinds import TRAINERS

TIGHT = 1e-5 if tr.DEVICE == "cpu" else 2e-4
"""Relative; the order of a GPU's sums differs."""
ON_ONE_RANK = [*tr.VARIANTS, "again", "resume", "gathered", "export", "non_finite", "memory", "adapter"]

NEEDS_DEEPSPEED = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="the package deepspeed is not installed: script/bootstrap --deepspeed"
    ),
]
Results = dict[str, list[tr.Result]]
"""The results of each rank, by case."""


def marks(kind: str) -> list[pytest.MarkDecorator]:
    found = [pytest.mark.xdist_group(f"trainer-{kind}"), pytest.mark.timeout(600)]
    if kind in tr.DEEPSPEED:
        found += NEEDS_DEEPSPEED
    if kind in (*tr.LONG, replicated_trainer.KIND):
        found.append(pytest.mark.slow)
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    tr.make_models(made)
    return made


@pytest.fixture(scope="module")
def truths(models: Path) -> dict[str, tr.Result]:
    return {
        f"{family}-{recipe}": tr.truth(models, tr.config(models, family, recipe))
        for family in tr.FAMILIES
        for recipe in ("sft", "grpo")
    }


@pytest.fixture(
    scope="module",
    # one test process computes the results of a kind
    params=[pytest.param(kind, marks=marks(kind)) for kind in tr.KINDS],
)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with replicated_trainer.registered():
        yield request.param


@pytest.fixture(scope="module")
def folder(kind: str, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and what this kind of trainer writes."""
    made = tmp_path_factory.mktemp(kind)
    for model in models.iterdir():
        (made / model.name).symlink_to(model)
    return made


@pytest.fixture(scope="module")
def alone(folder: Path, kind: str) -> Results:
    """Results of the cases with one rank, in this process."""
    names = [name for name in tr.cases_of(kind, folder) if name in ON_ONE_RANK]
    return {name: [tr.SUITE[name](kind, folder, tr.alone(), 0)] for name in names}


@pytest.fixture(scope="module")
def pair(folder: Path, kind: str, alone: Results) -> Results:
    """Results of the cases on two ranks. They load checkpoints of the cases with one rank."""
    if tr.DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    found = tr.launch(folder, 2, [f"{kind}:{name}" for name in tr.cases_of(kind, folder)], limit_s=500)
    return {name.partition(":")[2]: results for name, results in found.items()}


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def results(request: pytest.FixtureRequest, alone: Results) -> Results:
    """Two ranks are started only where a test wants them: one GPU is not enough for them."""
    if request.param == 1:
        return alone
    found: Results = request.getfixturevalue("pair")
    return found


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative distance between two tensors of one name."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm().clamp_min(1e-12)) for n in expected)


def weights_of(ranks: list[tr.Result]) -> dict[str, Tensor]:
    return tr.assemble([rank.weights for rank in ranks])


def assert_true(ranks: list[tr.Result], truth: tr.Result) -> None:
    assert apart(weights_of(ranks), weights_of([truth])) < TIGHT
    for rank in ranks:
        for step, expected in enumerate(truth.metrics):
            found = {name: rank.metrics[step][name] for name in expected}
            assert found == pytest.approx(expected, rel=TIGHT), f"step {step}"


def assert_same_rows(found: dict[str, tuple[int, Tensor]], expected: dict[str, tuple[int, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name, (offset, rows) in expected.items():
        assert found[name][0] == offset and torch.equal(found[name][1], rows), name


# --- results


@pytest.mark.parametrize("name", tr.VARIANTS)
def test_steps_compute_what_torch_and_transformers_do(
    name: str, results: Results, truths: dict[str, tr.Result]
) -> None:
    assert_true(results[name], truths["-".join(name.split("-")[:2])])


def test_ranks_report_the_same_metrics_bit_by_bit(pair: Results) -> None:
    for name in tr.VARIANTS:
        assert pair[name][0].metrics == pair[name][1].metrics


def test_the_metrics_of_a_policy_step(pair: Results) -> None:
    first, *_, last = pair["qwen2-grpo-split"][0].metrics
    parts = first["policy_loss"] + first["kl_loss"] + first["entropy_loss"]
    assert parts == pytest.approx(first["loss"], rel=1e-6)
    assert first["tokens"] == sum(c.tokens.size for group in tr.rollouts()[0].groups for c in group.completions)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert last["kl"] > 1e-5
    assert 4.0 < first["entropy"] < 4.7  # about log(vocabulary) for random weights
    assert 0 < first["clip_fraction"] < 1
    assert first["clip_fraction"] == pytest.approx(first["clip_low"] + first["clip_high"])
    assert 0 < first["engine_gap_mean"] < first["engine_gap_max"]
    assert 0 < first["importance_cut"] < 1


def test_two_identical_runs_agree_bit_by_bit(results: Results) -> None:
    for first, second in zip(results["qwen2-grpo-split"], results["again"], strict=True):
        assert first.metrics == second.metrics
        assert_same_rows(second.weights, first.weights)


def test_an_empty_microbatch_changes_nothing(kind: str, folder: Path, pair: Results) -> None:
    both = pair["empty"]
    assert [result.extra["empty"] for result in both] == [False, True]
    one = tr.empty(kind, folder, tr.alone(), 0)
    assert apart(weights_of(both), weights_of([one])) < TIGHT
    assert both[1].metrics[0]["loss"] == pytest.approx(one.metrics[0]["loss"], rel=TIGHT)
    assert both[0].metrics[0]["tokens"] == int(tr.documents()[0].loss_mask.sum())


def test_without_advantages_the_weights_do_not_change(kind: str, folder: Path) -> None:
    cfg = tr.config(folder, "qwen2", "grpo", optimizer={"lr": 0.1, "weight_decay": 0.0}, kind=kind)
    loss = cfg.loss.model_copy(update={"entropy_coefficient": 0.0, "kl": KLPenalty()})
    trainer = tr.create(cfg.model_copy(update={"loss": loss}).policy)
    rolled, advantages = tr.rollouts()
    batch = pack(forest_from_rollouts(rolled, 0 * advantages), 1, 100)
    before = tr.rows_of_all(trainer)
    everything = batch.everything()
    batch.set_field("old_logprob", everything, [[row.fields["engine_logprob"] for row in everything.by_rank[0]]])
    stats = [trainer.step(m.by_rank[0]).values for m in batch.minibatches(2, None, loss)]
    assert_same_rows(tr.rows_of_all(trainer), before)
    assert [s["grad_norm"] for s in stats] == [0.0, 0.0]
    assert all(s["lr"] > 0 for s in stats)


def test_evaluate_gives_the_log_probabilities_of_transformers(kind: str, folder: Path) -> None:
    cfg = tr.config(folder, "llama", "grpo", kind=kind)
    trainer = tr.create(cfg.policy)
    assert trainer.has_reference
    batch = tr.batch_of(cfg, 1, budget=60)
    everything = batch.everything()
    values = trainer.evaluate(everything.by_rank[0], ["logprobs", "entropy", "reference_logprobs"])
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32)
    with torch.no_grad():
        logprobs, entropies = tr._sequences(model)
    for row, found in zip(everything.by_rank[0], values, strict=True):
        assert found["logprobs"] == pytest.approx(logprobs[row.index].numpy(), abs=TIGHT)
        assert found["entropy"] == pytest.approx(entropies[row.index].numpy(), abs=TIGHT)
        assert found["reference_logprobs"] == pytest.approx(found["logprobs"], abs=TIGHT / 10)
        assert found["logprobs"].dtype == "float32"


def test_a_reference_that_was_not_loaded_is_not_evaluated(kind: str, folder: Path) -> None:
    cfg = tr.config(folder, "qwen2", "sft", kind=kind)
    trainer = tr.create(cfg.policy)
    assert not trainer.has_reference
    with pytest.raises(ValueError, match="reference_logprobs"):
        trainer.evaluate(tr.batch_of(cfg, 1).everything().by_rank[0], ["reference_logprobs"])


def test_non_finite_numbers_are_refused_by_all_ranks_before_anything_changes(results: Results) -> None:
    ranks = results["non_finite"]
    for result in ranks:
        message, step, what, places = result.extra["error"]
        assert (step, what, places) == (1, "loss", [(len(ranks) - 1, 1)])
        assert f"rank {len(ranks) - 1} micro-batch 1" in message
        assert result.extra["untouched"]
        assert result.extra["steps"] == 0
        without = result.extra["without"]
        assert result.metrics == without.metrics, "neither was the optimizer's state changed"
        assert_same_rows(result.weights, without.weights)


def test_a_missing_field_is_named_before_the_step(kind: str, folder: Path) -> None:
    cfg = tr.config(folder, "qwen2", "grpo", kind=kind)
    trainer = tr.create(cfg.policy)
    rows = next(iter(tr.batch_of(cfg, 1).minibatches(1, None, cfg.loss))).by_rank[0]
    with pytest.raises(ValueError, match="no field 'old_logprob'"):
        trainer.step(rows)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        trainer.step([])


# --- weights for engines


def test_shards_and_gathered_weights_are_every_row_once(results: Results) -> None:
    ranks = results["gathered"]
    parameters = ranks[0].extra["parameters"]
    assert all(rank.extra["parameters"] == parameters for rank in ranks)
    rows = {name: sorted((r.weights[name] for r in ranks if name in r.weights), key=lambda row: row[0])
            for name in {name for rank in ranks for name in rank.weights}}  # fmt: skip
    for info in parameters:
        offsets = [offset for offset, _ in rows[info.name]]
        assert offsets == [sum(len(part) for _, part in rows[info.name][:n]) for n in range(len(offsets))], info.name
    expected = weights_of(ranks)
    assert {name: tuple(value.shape) for name, value in expected.items()} == {p.name: p.shape for p in parameters}
    assert {str(value.dtype) for value in expected.values()} == {"torch.float32"}
    for rank in ranks:
        for way in ("first", "everyone"):
            found = rank.extra[way]
            assert list(found) == ([p.name for p in parameters] if way == "everyone" or rank.rank == 0 else [])
            assert all(torch.equal(found[n].view(expected[n].shape), expected[n].to(found[n].dtype)) for n in found)


# --- checkpoints


def assert_resumed(ranks: list[tr.Result]) -> None:
    for result in ranks:
        extra = result.extra
        assert extra["steps"] == 2
        assert_same_rows(extra["loaded"], extra["at_save"])  # as it was when save() was called
        assert_same_rows(extra["resumed"].weights, extra["straight"].weights)
        assert extra["straight"].metrics == extra["resumed"].metrics
        assert any(not torch.equal(r, extra["loaded"][n][1]) for n, (_, r) in extra["resumed"].weights.items())


def test_resume_is_bitwise(results: Results) -> None:
    assert_resumed(results["resume"])


def test_a_checkpoint_of_two_ranks_loads_at_one(kind: str, folder: Path, pair: Results) -> None:
    role = tr.config(folder, "qwen2", "grpo", kind=kind).policy
    trainer = tr.create(role)
    trainer.load(folder / "saved" / "ranks-2")
    assert trainer.optimizer_step == 2
    found = tr.assemble([tr.rows_of_all(trainer)])
    expected = tr.assemble([result.extra["loaded"] for result in pair["resume"]])
    assert found.keys() == expected.keys()
    assert all(torch.equal(rows, expected[name]) for name, rows in found.items())
    continued = tr.train(trainer, tr.batch_of(role, 1), role, steps=2)
    straight = [result.extra["straight"] for result in pair["resume"]]
    assert apart(weights_of([continued]), weights_of(straight)) < TIGHT, "the optimizer's state was loaded"
    assert [m["lr"] for m in continued.metrics] == [m["lr"] for m in straight[0].metrics]
    assert continued.metrics[0]["lr"] == tr.LR


def test_a_checkpoint_of_one_rank_loads_at_two(alone: Results, pair: Results) -> None:
    one, two = alone["resume"][0].extra, pair["reload"]
    found = tr.assemble([result.extra["loaded"] for result in two])
    assert all(torch.equal(rows, found[name]) for name, (_, rows) in one["loaded"].items())
    assert apart(weights_of(two), weights_of([one["straight"]])) < TIGHT, "the optimizer's state was loaded"


@pytest.fixture
def checkpoint(folder: Path, alone: Results, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "saved" / "ranks-1", tmp_path / "step-2"))


def refused(kind: str, folder: Path, checkpoint: Path, family: str = "qwen2") -> str:
    """Check that the checkpoint is refused and nothing is changed; returns the reason."""
    trainer = tr.create(tr.config(folder, family, "grpo", kind=kind).policy)
    before = tr.rows_of_all(trainer)
    with pytest.raises(CheckpointError) as caught:
        trainer.load(checkpoint)
    assert_same_rows(tr.rows_of_all(trainer), before)
    assert trainer.optimizer_step == 0
    assert caught.value.folder == checkpoint
    return caught.value.reason


def test_torn_checkpoints_are_refused(kind: str, folder: Path, checkpoint: Path) -> None:
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        assert refused(kind, folder, checkpoint), file
        file.unlink()
        assert refused(kind, folder, checkpoint), file
        file.write_bytes(content)
    tr.create(tr.config(folder, "qwen2", "grpo", kind=kind).policy).load(checkpoint)
    assert refused(kind, folder, checkpoint.with_name("nothing"))


def test_a_damaged_checkpoint_is_refused(kind: str, folder: Path, checkpoint: Path) -> None:
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        content = file.read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        file.write_bytes(changed)
        assert "damaged" in (reason := refused(kind, folder, checkpoint)) or "cannot be read" in reason, file
        file.write_bytes(content)


def test_unfinished_checkpoints_and_those_of_other_models_are_refused(
    kind: str, folder: Path, checkpoint: Path
) -> None:
    assert "another model" in refused(kind, folder, checkpoint, family="llama")
    assert "did not finish" in refused(kind, folder, checkpoint.rename(checkpoint.with_name("step-2.tmp-1-1")))


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(folder: Path, pair: Results) -> None:
    for result in pair["full_disk"]:
        assert "rank 1: " in result.extra["error"]
        assert "File too large" in result.extra["error"]
        assert "may not write files over 1,024 bytes" in result.extra["error"]
        assert result.extra["told_once"]
    assert sorted(path.name for path in (folder / "full").iterdir()) == ["again"]


def test_a_save_replaces_one_of_the_same_name_and_removal_leaves_no_trace(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    trainer = tr.create(tr.config(folder, "qwen2", "sft", kind=kind).policy)
    assert trainer.saved(), "nothing is being saved"
    for _ in range(2):
        trainer.save(tmp_path / "step-0")
        tr.wait_saved(trainer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
    assert checkpoint_bytes(tmp_path) > 0
    (tmp_path / "step-1.tmp-1-7").mkdir()
    assert remove_leftovers(tmp_path) == [tmp_path / "step-1.tmp-1-7"]
    remove_checkpoint(tmp_path / "step-0")
    assert list(tmp_path.iterdir()) == []


# --- exports


def test_exports_are_ordinary_model_folders(folder: Path, results: Results) -> None:
    ranks = results["export"]
    exported = folder / f"exported-{len(ranks)}"
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert apart(dict(model.state_dict()), weights_of(ranks)) == 0
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(exported).eos_token_id == model.config.eos_token_id
    assert not list(folder.glob("*.tmp-*"))


def test_an_exported_model_has_the_trainers_logits(kind: str, folder: Path, tmp_path: Path) -> None:
    cfg = tr.config(folder, "qwen2", "sft", kind=kind)  # tied embeddings
    trainer, batch = tr.create(cfg.policy), tr.batch_of(cfg, 1)
    tr.train(trainer, batch, cfg.policy)
    trainer.export(tmp_path / "final")
    values = trainer.evaluate(batch.everything().by_rank[0], ["logprobs"])[0]["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype="auto")
    with torch.no_grad():
        loss = tr._sft_truth(model)
    assert float(-values.mean()) == pytest.approx(float(loss), rel=TIGHT)
    assert "lm_head.weight" not in json.loads(_header(tmp_path / "final" / "model.safetensors"))
    with tr.no_space(), pytest.raises(CheckpointError, match="could not be exported"):
        trainer.export(tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def _header(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode()


# --- what a kind of trainer may lack


def assert_refused(kind: str, error: TrainerUnsupported, setting: str, remedy: str = "") -> None:
    assert (error.kind, error.setting) == (tr.trainer_of(kind), setting)
    assert str(error) == f"trainer.kind {error.kind} does not support {setting}; {error.remedy}"
    assert remedy in error.remedy and error.remedy


def test_memory_checkpoints_are_exact_or_refused(kind: str, folder: Path, tmp_path: Path, results: Results) -> None:
    if "memory" in results:
        for rank in results["memory"]:
            first, second, again = rank.metrics
            assert rank.extra["steps"] == 1
            assert second == again != first
            assert_same_rows(rank.extra["again"], rank.weights)
        return
    cfg = tr.config(folder, "qwen2", "sft", kind=kind)
    facts = model_facts(cfg.model, "cpu")
    assert make_plan(cfg, facts, host_resources(cfg.cluster)).memory_copy == 0
    wanted = cfg.model_copy(update={"recovery": cfg.recovery.model_copy(update={"memory_copy": True})})
    with pytest.raises(TrainerUnsupported) as caught:
        make_plan(wanted, facts, host_resources(cfg.cluster))
    assert_refused(kind, caught.value, "recovery.memory_copy", "set it to auto or false")
    trainer, copies = tr.create(cfg.policy), MemoryCheckpoints(tmp_path, 0, 1)
    for method in (trainer.save_to_memory, trainer.load_from_memory):
        with pytest.raises(TrainerUnsupported):
            method(copies, 1)


def refusal(kind: str, folder: Path, model: dict[str, Any] | None = None, **trainer: Any) -> TrainerUnsupported | None:
    """How the planner refuses these settings, also as a part of the run's plan; None if it does not."""
    cfg = tr.config(folder, "llama", "sft", model, kind=kind, **trainer)
    try:
        TRAINERS[tr.trainer_of(kind)].planner.check(cfg.policy)
    except TrainerUnsupported as error:
        with pytest.raises(TrainerUnsupported):
            make_plan(cfg, model_facts(cfg.model, "cpu"), host_resources(cfg.cluster))
        return error
    return None


@pytest.mark.parametrize(
    ("recipe", "loss", "setting"),
    [
        ("preference", {"use_weighting": True}, "loss.use_weighting"),
        ("preference", {"sync_ref_model": True}, "loss.sync_ref_model"),
        ("reward", {}, "reward models"),
        ("preference", {}, None),
    ],
)
def test_an_objective_is_planned_or_refused(
    kind: str, folder: Path, recipe: str, loss: dict[str, Any], setting: str | None
) -> None:
    common = tr.config(folder, "llama", "sft", kind=kind).model_dump(
        mode="json", include={"name", "steps", "data", "trainer"}
    )
    cfg = check_config({**common, "recipe": recipe, "loss": loss, "model": {"path": str(folder / "llama")}}, "test")
    facts, host = model_facts(cfg.model, "cpu"), host_resources(cfg.cluster)
    if setting is None or kind == "fsdp2" or (kind in tr.DEEPSPEED and setting != "loss.sync_ref_model"):
        assert make_plan(cfg, facts, host).processes
        return
    with pytest.raises(TrainerUnsupported) as caught:
        make_plan(cfg, facts, host)
    assert_refused(kind, caught.value, setting, "leave it out, or set trainer.kind=fsdp2")


def test_offloading_changes_no_bit_or_is_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    refused = {part: refusal(kind, folder, offload={part: True}) for part in ("parameters", "optimizer")}
    offload = {part: error is None for part, error in refused.items()}
    role = tr.config(folder, "qwen2", "grpo", kind=kind, offload=offload).policy
    stays, goes = tr.create(role), tr.create(role)
    for error in (each for each in refused.values() if each is not None):
        assert error.setting.startswith("trainer.offload")
        assert_refused(kind, error, error.setting)
        with pytest.raises(TrainerUnsupported):
            goes.offload()
    if not any(offload.values()):
        return
    batch = tr.batch_of(role, 1)
    for trainer in (stays, goes):
        tr.train(trainer, batch, role, steps=1)
    goes.offload(**offload)
    published = tr.rows_of_all(goes)  # from host memory
    goes.save(tmp_path / "step-1")
    goes.onload()
    assert_same_rows(published, tr.rows_of_all(stays))
    one, two = tr.train(stays, batch, role, steps=2), tr.train(goes, batch, role, steps=2)
    assert one.metrics == two.metrics
    assert_same_rows(two.weights, one.weights)
    tr.wait_saved(goes)
    stays.load(tmp_path / "step-1")
    assert_same_rows(tr.rows_of_all(stays), published)


def test_an_adapter_is_merged_for_engines_and_exports_or_refused(kind: str, folder: Path, results: Results) -> None:
    plain = tr.create(tr.config(folder, "llama", "sft", kind=kind).policy)
    with pytest.raises(ValueError, match=r"model\.adapter"):
        plain.export_adapter(folder / "none")
    if "adapter" not in results:
        error = refusal(kind, folder, {"adapter": {"r": 4}})
        assert error is not None
        assert_refused(kind, error, "model.adapter")
        return
    ranks = results["adapter"]
    merged = AutoModelForCausalLM.from_pretrained(folder / f"merged-{len(ranks)}")
    assert apart({name: each.detach() for name, each in merged.named_parameters()}, weights_of(ranks)) == 0
    base = AutoModelForCausalLM.from_pretrained(folder / "llama")
    before = {name: each.detach().clone() for name, each in base.named_parameters()}
    constant = set.union(*(rank.extra["constant"] for rank in ranks))
    for name, weight in weights_of(ranks).items():
        assert torch.equal(weight, before[name]) == (name in constant), name
    adapted = PeftModel.from_pretrained(base, folder / f"adapter-{len(ranks)}").merge_and_unload()  # type: ignore[operator]
    assert apart({name: each.detach() for name, each in adapted.named_parameters()}, weights_of(ranks)) < 1e-6


def test_replicas_are_supported_or_refused(kind: str, folder: Path) -> None:
    error = refusal(kind, folder, ranks=4, replicas=2)
    if error is not None:
        assert_refused(kind, error, "trainer.replicas")


def test_every_kind_plans_memory_and_collectives(kind: str, folder: Path) -> None:
    planner = TRAINERS[tr.trainer_of(kind)].planner
    for ranks in (1, 2):
        cfg = tr.config(folder, "qwen2", "grpo", kind=kind, ranks=ranks)
        facts = model_facts(cfg.model, "cpu")
        long, short = (sum(planner.memory(cfg.policy, facts, tokens).values()) for tokens in (1000, 10))
        assert long > short > 0
        plan = make_plan(cfg, facts, host_resources(cfg.cluster))
        assert bool(plan.collectives) == (ranks > 1)
        assert all(each.bytes > 0 and each.operation and each.times for each in plan.collectives)


def test_an_unknown_kind_is_refused_by_the_config(folder: Path) -> None:
    assert list(TRAINERS) == TRAINER_KINDS, "the config knows those that are implemented"
    values = tr.config(folder, "qwen2", "sft").model_dump(mode="json")
    values["trainer"]["kind"] = "deepspeeed"
    with pytest.raises(ConfigError) as caught:
        check_config(values, "run.yaml")
    assert "trainer.kind: 'deepspeeed': unknown kind of trainer, expected fsdp2 or deepspeed or replicated" in str(
        caught.value
    )


# --- the service


def test_the_service_on_two_ranks(pair: Results) -> None:
    for rank, result in enumerate(pair["service"]):
        info = result.extra["info"]
        assert (info.rank, info.world, info.device, info.compute_dtype) == (rank, 2, str(tr.device_of(rank)), "float32")
        assert info.packing == "forest", info.packing_reason
        assert info.reference
        assert info.context_length == 256
        assert [p.name for p in info.parameters][-1] == "lm_head.weight"
        assert result.extra["steps"] == (2, 1)
        assert result.metrics[1] == result.metrics[2]  # the same step, before and after going back
        assert result.metrics[0] == pytest.approx(pair["llama-grpo-plain"][rank].metrics[0], rel=TIGHT, abs=1e-7)
        assert set(result.extra["values"][0]) == {"logprobs", "entropy", "reference_logprobs"}


def test_a_rank_missing_from_a_step_is_noticed_within_the_time_limit(pair: Results) -> None:
    waiting = pair["absent"][0].extra
    assert "error" in waiting
    assert tr.ABSENT_LIMIT_S - 1 < waiting["waited"] < 20.0
