"""A step that continues the forward passes of an evaluation: fewer passes, and not another bit."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.config.train_role import TrainRole
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.micro_batch import MicroBatch
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.models.model_facts import model_facts
from lockstep.models.tiny_model import make_tiny
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.train.fsdp.parallelize import local_shard, sharded_modules
from lockstep.train.trainer_kinds import trainer_kind

ROWS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny(
        tmp_path_factory.mktemp("kept") / "model", hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, max_length=64
    )


def ppo(path: Path, **changes: object) -> dict[str, object]:
    return {
        "recipe": "ppo",
        "name": "kept",
        "steps": 10,
        "prompts_per_step": 6,
        "token_budget": 40,
        "model": {"path": str(path)},
        "data": {"path": "unused.jsonl"},
        "reward": {"terms": [{"kind": "exact_match"}]},
        "rollout": {"sampling": {"max_tokens": 9}},
        **changes,
    }


def critic_of(path: Path, kept: int, critic: dict[str, object] | None = None, **changes: object) -> TrainRole:
    section = {"kept_microbatches": kept, **(critic or {})}
    return check_config(ppo(path, critic=section, **changes), "test").train_roles[1]


def batch(seed: int = 3) -> TrainingBatch:
    draw = np.random.default_rng(seed)
    groups = []
    for number in range(6):
        tokens = draw.integers(10, 60, draw.integers(5, 9)).astype(np.int32)
        zeros = np.zeros(tokens.size, np.float32)
        completion = Completion(f"{number}-0", tokens, zeros, np.zeros(tokens.size, np.int32), "stop", "")
        prompt = Prompt(f"0:{number}", number, draw.integers(10, 60, 9).astype(np.int32), "")
        groups.append(Group(prompt, [completion]))
    return pack(forest_from_rollouts(Rollouts(0, 0, groups)), 1, 40)


class Counted:
    """A critic that counts the forward passes of its model."""

    def __init__(self, role: TrainRole, ranks: ParallelContext | None = None) -> None:
        self.role, self.passes = role, 0
        self.trainer = trainer_kind(role).create(role, ranks or ParallelContext(), 1)
        assert isinstance(self.trainer, FSDP2Trainer)
        self.trainer.policy.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.passes += 1

    def values(self, of: TrainingBatch) -> list[MicroBatch[np.ndarray]]:
        """Evaluates the batch as the recipe does, and returns the rows of its update, with returns from the values."""
        everything = of.everything()
        assert everything.microbatches == ROWS
        of.set_field("old_value", everything, [[row["scores"] for row in self.evaluate(everything.by_rank[0])]])
        of.set_per_target("return", np.cos(np.arange(of.targets)) + of.fields["old_value"])
        return next(of.minibatches(1, None, self.role.objective)).by_rank[0]

    def evaluate(self, rows: list[MicroBatch[np.ndarray]]) -> list[dict[str, np.ndarray]]:
        return self.trainer.evaluate(rows, ["scores"])

    def step(self, rows: list[MicroBatch[np.ndarray]]) -> dict[str, float]:
        return self.trainer.step(rows).values

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: local_shard(parameter).clone() for name, parameter in self.trainer.policy.named_parameters()}


def wait_saved(trainer: FSDP2Trainer) -> None:
    deadline = time.monotonic() + 60
    while not trainer.saved():
        assert time.monotonic() < deadline, "the save does not end"
        time.sleep(0.005)


def trained(
    role: TrainRole, epochs: int = 2, ranks: ParallelContext | None = None
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], int]:
    """The metrics of two steps of so many epochs, the weights after them, and the number of forward passes."""
    critic, metrics = Counted(role, ranks), []
    assert bool(sharded_modules(critic.trainer.policy)) == (ranks is not None)
    for seed in (3, 4):
        rows = critic.values(batch(seed))
        metrics += [critic.step(rows) for _ in range(epochs)]
    return metrics, critic.weights(), critic.passes


@pytest.mark.parametrize("trainer", [{}, {"activation_checkpointing": True}], ids=["plain", "recomputed"])
def test_the_result_is_the_same_bit_by_bit_with_fewer_forward_passes(model, trainer):
    metrics, weights, passes = trained(critic_of(model, 0, {"trainer": trainer}))
    assert passes == 2 * 3 * ROWS and metrics[0]["loss"] > metrics[1]["loss"]
    for kept in (1, 2, ROWS, ROWS + 2):
        of_kept, kept_weights, fewer = trained(critic_of(model, kept, {"trainer": trainer}))
        assert of_kept == metrics and fewer == passes - 2 * min(kept, ROWS)
        assert all(torch.equal(kept_weights[name], weight) for name, weight in weights.items())


@pytest.fixture
def one_rank() -> Iterator[ParallelContext]:
    """A rank alone with a communicator, as on a GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield ParallelContext(group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reshard", [True, False])
def test_weights_that_are_gathered_in_compute_precision_are_gathered_again_for_what_was_kept(model, one_rank, reshard):
    """One rank on a GPU: FSDP2 casts the weights, and frees the cast ones between the evaluation and the update."""
    in_16_bit = {"path": str(model), "dtype": "bfloat16"}

    def role(kept: int) -> TrainRole:
        return critic_of(model, kept, {"trainer": {"reshard_after_forward": reshard}}, model=in_16_bit)

    metrics, weights, passes = trained(role(0), ranks=one_rank)
    for kept in (1, ROWS):
        of_kept, kept_weights, fewer = trained(role(kept), ranks=one_rank)
        assert of_kept == metrics and fewer == passes - 2 * kept
        assert all(torch.equal(kept_weights[name], weight) for name, weight in weights.items())


def test_values_of_other_rows_are_not_continued(model):
    plain, critic = Counted(critic_of(model, 0)), Counted(critic_of(model, ROWS))
    for each in (plain, critic):
        rows = each.values(batch(3))
        each.evaluate(batch(4).everything().by_rank[0])
        each.step(rows)
    assert critic.passes == plain.passes == 3 * ROWS
    assert all(torch.equal(critic.weights()[name], weight) for name, weight in plain.weights().items())


def test_rows_that_share_only_their_beginning_with_the_evaluated_ones_are_computed(model):
    critic = Counted(critic_of(model, ROWS))
    rows = critic.values(batch(3))
    critic.step(rows[:2])
    assert critic.passes == ROWS + 2


def test_a_loaded_checkpoint_ends_what_was_kept(model, tmp_path):
    plain, critic = Counted(critic_of(model, 0)), Counted(critic_of(model, ROWS))
    for number, each in enumerate((plain, critic)):
        each.step(each.values(batch(4)))
        each.trainer.save(tmp_path / str(number))
        wait_saved(each.trainer)
        each.step(each.values(batch(4)))
        rows = each.values(batch(3))  # with newer weights than those of the checkpoint
        each.trainer.load(tmp_path / str(number))
        before = each.passes
        each.step(rows)
        assert each.passes == before + ROWS
    assert all(torch.equal(critic.weights()[name], weight) for name, weight in plain.weights().items())


def test_what_is_kept_leaves_the_device_with_the_weights(model):
    critic = Counted(critic_of(model, ROWS))
    rows = critic.values(batch(3))
    critic.trainer.offload()
    critic.trainer.onload()
    critic.step(rows)
    assert critic.passes == 2 * ROWS


@pytest.mark.parametrize(
    ("changes", "critic"),
    [
        ({"minibatch_size": 3}, {}),
        ({"bootstrap_truncated": True}, {}),
        ({}, {"trainer": {"ranks": 2}}),
        ({}, {"trainer": {"offload": {"optimizer": True}}}),
        ({"placement": {"colocate": [["policy", "critic"]]}}, {}),
        ({"model": {"path": "m", "adapter": {"lora_dropout": 0.1}}}, {}),
    ],
    ids=["mini-batches", "bootstrap", "ranks", "offload", "shared devices", "dropout"],
)
def test_nothing_is_kept_where_the_update_has_other_passes_or_the_device_other_uses(model, changes, critic):
    assert critic_of(model, 2).kept_microbatches == critic_of(model, 2, epochs=4).kept_microbatches == 2
    assert critic_of(model, 1, critic, **changes).kept_microbatches == 0
    with pytest.raises(ConfigError, match=r"kept_microbatches 2 has no effect with .*: leave one of the two out"):
        critic_of(model, 2, critic, **changes)


def test_the_policy_keeps_nothing_and_the_estimate_counts_the_rows(model):
    policy, critic = check_config(ppo(model, critic={"kept_microbatches": 3}), "test").train_roles
    assert policy.kept_microbatches == 0
    facts = model_facts(critic.model, "cpu")
    parts = {
        kept: trainer_kind(critic).planner.memory(critic_of(model, kept), facts, 40)["activations"] for kept in range(4)
    }
    assert parts[0] == parts[1] and parts[3] == 3 * parts[1] > 0
