"""Keys of TRL, OpenRLHF and verl get the names that they have here. tests/unit/convert compares the converter."""

import re

import pytest

from lockstep.config.errors import ConfigError
from lockstep.config.loader import apply_overrides, check_config, dotted_keys, find_keys
from lockstep.config.other_frameworks import ABSENT_KEYS, QUALIFIED_KEYS, RENAMED_KEYS
from lockstep.config.recipes import RECIPES

KNOWN = {key for recipe in RECIPES.values() for key in dotted_keys(recipe)}
VALUES = {
    "recipe": "grpo",
    "name": "x",
    "steps": 3,
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "reward": {"terms": [{"kind": "exact_match"}]},
}


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check_config(apply_overrides(VALUES, overrides), "test")
    return {problem.field: problem.hint for problem in caught.value.problems}


def test_every_counterpart_is_a_field() -> None:
    fields = {key: re.split(r"[ :,(]", field)[0] for key, field in (RENAMED_KEYS | QUALIFIED_KEYS).items()}
    assert {key: field for key, field in fields.items() if field not in KNOWN} == {}
    assert not set(QUALIFIED_KEYS) & set(ABSENT_KEYS)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("actor_rollout_ref.rollout.n=8", "here it is called 'group_size'"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "here it is called 'trainer.optimizer.lr'"),
        ("algorithm.adv_estimator=grpo", "here it is called 'advantage.kind'"),
        ("algo.advantage.estimator=rloo", "here it is called 'advantage.kind'"),
        ("advantage_estimator=rloo", "here it is called 'advantage.kind'"),
        ("trainer.total_epochs=2", "here it is called 'steps'"),
        ("data.train_files=x.parquet", "here it is called 'data.path'"),
        ("rollout.n=4", "here it is called 'group_size'"),
        ("rollout.tensor_model_parallel_size=2", "here it is called 'rollout.engine.tensor_parallel_size'"),
        ("model.use_remove_padding=true", "leave it out: rows are always packed, and there is no padding"),
        ("ds.ring_attn_size=2", "leave it out: there is no context or tensor parallelism"),
        ("colocate_all_models=true", "here it is called 'placement.colocate (all)'"),
    ],
)
def test_a_key_of_another_framework_is_refused_with_its_name_here(override: str, hint: str) -> None:
    assert problems(override) == {override.partition("=")[0]: hint}


def test_a_section_of_another_framework_is_reported_key_by_key() -> None:
    found = problems("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.grad_clip=1", "actor_rollout_ref.x.y=1")
    assert found == {
        "actor_rollout_ref.rollout.n": "here it is called 'group_size'",
        "actor_rollout_ref.actor.grad_clip": "here it is called 'trainer.max_grad_norm'",
        "actor_rollout_ref.x.y": "",
    }
    assert list(problems("nonsense.a.b=1")) == ["nonsense"], "a section of nobody is one problem"


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("steps", ["steps"]),
        ("lr", ["trainer.optimizer.lr"]),
        ("betas", ["trainer.optimizer.betas", "critic.trainer.optimizer.betas"]),
        ("learning_rate", ["trainer.optimizer.lr"]),
        ("trainer.optimizer.lr", ["trainer.optimizer.lr"]),
        ("advantage_estimator", ["advantage.kind"]),
        ("actor_rollout_ref.rollout.n", ["group_size"]),
        ("data.prompt_probs", ["data.mixture"]),
        ("datasets", ["data.mixture"]),
        ("kind", []),
        ("nonsense", []),
    ],
)
def test_the_keys_that_a_name_may_mean(name: str, keys: list[str]) -> None:
    assert find_keys(name) == keys
