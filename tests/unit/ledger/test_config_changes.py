import copy

import pytest

from lockstep.config.recipes import GRPOConfig
from lockstep.ledger import compare_config

HTTP = {"kind": "http", "url": "http://a.invalid", "retries": 1}
BASE = GRPOConfig.model_validate(
    {
        "recipe": "grpo",
        "name": "sort",
        "steps": 10,
        "model": {"path": "tiny"},
        "data": {"path": "train.jsonl"},
        "evaluation": {"data": {"path": "test.jsonl"}},
        "reward": {"terms": [{"kind": "exact_match"}, {"kind": "length", "soft": 5, "hard": 9}, HTTP]},
    }
).model_dump(mode="json")


def changed(path: str, value: object, base: dict = BASE) -> dict:
    config = copy.deepcopy(base)
    *parents, last = path.split(".")
    section = config
    for key in parents:
        section = section[int(key)] if isinstance(section, list) else section[key]
    section[last] = value
    return config


def resolved(values: dict) -> dict:
    return GRPOConfig.model_validate(values).model_dump(mode="json")


def test_equal_configs():
    assert compare_config(BASE, copy.deepcopy(BASE)) == []
    assert compare_config({"a": (1, 2.0)}, {"a": [1, 2]}) == []  # as YAML and JSON give them back


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", "other"),
        ("folder", "/elsewhere"),
        ("steps", 20),
        ("checkpoint.every", 1),
        ("checkpoint.keep_best", False),
        ("report.html", False),
        ("evaluation.samples_shown", 0),
        ("cluster.stall_limit_s", 5.0),
        ("filter_groups.at_limit", "error"),
        ("reward.timeout_s", 600.0),
        ("reward.workers", 4),
        ("reward.terms.2.url", "http://b.invalid"),
        ("reward.terms.2.retries", 9),
        ("trainer.collective_timeout_s", 60.0),
        ("trainer.malloc", "default"),
    ],
)
def test_what_a_resumed_run_may_change(path, value):
    (change,) = compare_config(BASE, changed(path, value))
    assert change.path == path and change.new == value and change.effect == "none"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", 1),
        ("recipe", "sft"),
        ("group_size", 16),
        ("model.path", "other"),
        ("cluster.device", "cuda"),
        ("trainer.optimizer.lr", 1e-3),
        ("data.limit", 5),
        ("reward.terms.1.soft", 6),
        ("reward.terms.2.batch_size", 6),
        ("loss.clip_low", 0.1),
        ("rollout.max_staleness", 1),
        ("filter_groups.max_num_gen_batches", 3),
        ("evaluation.every", 3),
    ],
)
def test_what_would_change_the_result(path, value):
    (change,) = compare_config(BASE, changed(path, value))
    assert change.path == path and change.new == value and change.changes_result


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainer.threads", 4),
        ("trainer.ranks", 2),
        ("trainer.activation_checkpointing", True),
        ("trainer.compile", "layers"),
        ("rollout.engine.count", 2),
    ],
)
def test_what_changes_the_last_bits_only(path, value):
    (change,) = compare_config(BASE, changed(path, value))
    assert change.path == path and change.new == value
    assert change.changes_bits and not change.changes_result


def test_ranks_change_the_result_if_the_adapter_has_dropout():
    for dropout, effect in ((0.0, "bits"), (0.1, "result")):
        old = resolved(changed("model.adapter", {"kind": "lora", "r": 8, "lora_dropout": dropout}))
        (change,) = compare_config(old, changed("trainer.ranks", 2, old))
        assert change.effect == effect
    for field, value in (("r", 4), ("target_modules", ["q_proj"]), ("lora_alpha", 8.0)):
        (change,) = compare_config(old, changed(f"model.adapter.{field}", value, old))
        assert change.path.startswith(f"model.adapter.{field}") and change.changes_result


def test_a_run_can_be_made_shorter_down_to_the_steps_done():
    (change,) = compare_config(BASE, changed("steps", 6), steps_done=6)
    assert change.effect == "none"
    (change,) = compare_config(BASE, changed("steps", 5), steps_done=6)
    assert change.changes_result and "it has done 6 steps" in str(change) and "--from RUN@5" in str(change)


@pytest.mark.parametrize("steps", [7, 20])
def test_another_number_of_steps_changes_the_result_if_the_schedule_spans_the_run(steps):
    cosine = changed("epochs", 2, changed("trainer.schedule.kind", "cosine"))
    length = GRPOConfig.model_validate(cosine).policy.optimizer_steps
    (change,) = compare_config(cosine, changed("steps", steps, cosine))
    assert change.changes_result and "cosine schedule spans the run" in str(change)
    assert f"set trainer.schedule.total_steps={length} to keep it as it is" in str(change)

    mended = changed("trainer.schedule.total_steps", length, changed("steps", steps, cosine))
    assert {c.path: c.effect for c in compare_config(cosine, mended)} == {
        "steps": "none",
        "trainer.schedule.total_steps": "none",
    }
    other = changed("trainer.schedule.total_steps", length + 1, changed("steps", steps, cosine))
    assert [c.path for c in compare_config(cosine, other) if c.changes_result] == ["trainer.schedule.total_steps"]
    fixed = changed("trainer.schedule.total_steps", 100, cosine)
    assert [c.changes_result for c in compare_config(fixed, changed("steps", steps, fixed))] == [False]


@pytest.mark.parametrize(
    ("field", "value", "effect"),
    [
        ("trainer.ranks", 2, "bits"),
        ("trainer.malloc", "default", "none"),
        ("trainer.optimizer.lr", 1e-3, "result"),
        ("model.path", "other", "result"),
    ],
)
def test_the_fields_of_every_trained_role_have_the_same_effect(field, value, effect):
    old = with_critic(BASE)
    (change,) = compare_config(old, changed(f"critic.{field}", value, old))
    assert (change.path, change.effect) == (f"critic.{field}", effect)


def test_dropout_and_schedule_of_another_role():
    old = with_critic(changed("model.adapter", {"kind": "lora", "r": 8, "lora_dropout": 0.1}))
    (change,) = compare_config(old, changed("critic.trainer.ranks", 2, old))
    assert change.effect == "result" and "critic.model.adapter.lora_dropout" in change.reason
    old["critic"]["model"]["adapter"]["lora_dropout"] = 0.0
    (change,) = compare_config(old, changed("critic.trainer.ranks", 2, old))
    assert change.effect == "bits"
    old["critic"]["trainer"]["schedule"]["kind"] = "cosine"
    (change,) = compare_config(old, changed("steps", 20, old))
    assert change.changes_result and "critic.trainer.schedule.total_steps" in change.reason


def with_critic(base: dict) -> dict:
    """The same config with a second trained role."""
    return {**base, "critic": {"model": copy.deepcopy(base["model"]), "trainer": copy.deepcopy(base["trainer"])}}


def test_added_and_removed_sections():
    (change,) = compare_config(BASE, changed("evaluation", None))
    assert change.path == "evaluation" and change.changes_result
    less = copy.deepcopy(BASE)
    del less["loss"]["clip_low"]
    (change,) = compare_config(BASE, less)
    assert str(change) == "loss.clip_low: 0.2 -> (absent)"


def test_a_field_that_did_not_exist_when_the_run_began_had_its_default():
    old = copy.deepcopy(BASE)
    for path in ("trainer.malloc", "model.adapter", "loss.mask_truncated", "rollout.max_staleness", "tracking"):
        *parents, last = path.split(".")
        section = old
        for key in parents:
            section = section[key]
        del section[last]
    assert compare_config(old, BASE) == []
    (change,) = compare_config(old, changed("rollout.max_staleness", 2))
    assert str(change) == "rollout.max_staleness: 0 -> 2" and change.changes_result


def test_a_boolean_is_not_a_number():
    assert [c.path for c in compare_config({"a": True}, {"a": 1})] == ["a"]
    assert compare_config({"a": 1}, {"a": 1.0}) == []


def test_lists_of_other_length_are_one_change():
    terms = [*BASE["reward"]["terms"], {"kind": "exact_match"}]
    (change,) = compare_config(BASE, changed("reward.terms", terms))
    assert change.path == "reward.terms"
