"""What a recipe's config class says of its run."""

import json
from typing import Any

import pytest

from lockstep.config.actor_critic import CriticConfig
from lockstep.config.algorithm import GSPO, CrossEntropy, KLPenalty, PPOClip
from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.config.recipes import RECIPES
from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.config.trainer import TrainerConfig

COMMON: dict[str, Any] = {"name": "x", "steps": 10, "seed": 4, "model": {"path": "m"}, "data": {"path": "d"}}
REWARD = {"terms": [{"kind": "exact_match"}]}


def sft(**changes: Any) -> RunConfig:
    return check_config({**COMMON, "recipe": "sft", **changes}, "test")


def grpo(**changes: Any) -> RunConfig:
    return check_config({**COMMON, "recipe": "grpo", "reward": REWARD, **changes}, "test")


def test_sft_trains_on_documents() -> None:
    config = sft(batch_size=6, train_on_prompt=True)
    assert (config.data_kind, config.generation, config.learns_prompts) == ("documents", None, True)
    assert (config.sequences_per_step, config.passes_of(config.policy), config.updates_per_step) == (6, 1, 1)
    assert config.policy.objective == CrossEntropy() and config.policy.temperature == 1.0
    assert not config.needs_engines
    assert sft(evaluation={"data": {"path": "e"}}).needs_engines


def test_grpo_trains_on_completions() -> None:
    config = grpo(
        prompts_per_step=4, group_size=6, epochs=2, minibatch_size=12, rollout={"sampling": {"temperature": 0.7}}
    )
    assert config.data_kind == "prompts" and config.needs_engines
    assert config.generation is not None
    assert (config.generation.prompts_per_step, config.generation.group_size) == (4, 6)
    assert (config.sequences_per_step, config.passes_of(config.policy), config.updates_per_step) == (24, 2, 4)
    assert config.policy.temperature == 0.7
    assert config.policy.optimizer_steps == 40


def ppo(**changes: Any) -> RunConfig:
    return check_config({**COMMON, "recipe": "ppo", "reward": REWARD, **changes}, "test")


def test_the_kl_penalty_of_ppo_is_the_same_in_every_form() -> None:
    """A loss by its name, as a section and as an object; as a loss k1 would have no effect."""
    for loss in ("gspo", {"kind": "gspo"}, GSPO()):
        kl = ppo(loss=loss).objective.kl
        assert (kl.coefficient, kl.estimator, kl.where) == (0.01, "k1", "reward")
    kl = ppo(loss={"kl": {"where": "loss"}}).objective.kl
    assert (kl.coefficient, kl.estimator, kl.where) == (0.01, "k3", "loss")
    critic = ppo(critic=CriticConfig(trainer=TrainerConfig(ranks=2))).train_roles[1].trainer
    assert (critic.ranks, critic.optimizer.lr) == (2, 9e-6)


def test_a_horizon_of_less_than_a_step_is_refused() -> None:
    """The coefficient would be multiplied by 1 - 0.2 * completions / horizon."""
    count = ppo().sequences_per_step
    with pytest.raises(ConfigError, match="the coefficient could become 0 or negative"):
        ppo(kl_controller={"target": 0.1, "horizon": count // 5})
    assert ppo(kl_controller={"target": 0.1, "horizon": count})


def test_ppo_trains_a_policy_and_a_critic() -> None:
    config = ppo(critic={"warmup_steps": 4}, epochs=2, minibatch_size=8)
    policy, critic = config.train_roles
    assert (policy.name, critic.name, critic.section) == ("policy", "critic", "critic")
    assert (policy.model.head, critic.model.head, critic.model.path) == ("vocabulary", "score", "m")
    assert (policy.trainer.optimizer.lr, critic.trainer.optimizer.lr) == (1e-6, 9e-6)
    assert (policy.optimizer_steps, critic.optimizer_steps) == (6 * 8, 10 * 8), "warm-up updates the critic only"
    kl = policy.objective.kl  # type: ignore[union-attr]
    assert (kl.coefficient, kl.estimator, kl.where) == (0.01, "k1", "reward")
    changed = ppo(loss={"kl": {"coefficient": 0.5}, "clip_high": 0.3}).objective
    assert isinstance(changed, PPOClip) and changed.kl == KLPenalty(coefficient=0.5, estimator="k1", where="reward")
    assert critic.evaluated_fields == {"old_value": "scores"} and not critic.holds_reference and policy.holds_reference
    assert [each.folder for each in ppo(critic={"export": True}).exports] == ["export", "critic/export"]
    again = check_config(json.loads(json.dumps(config.model_dump(mode="json"))), "stored")
    assert again == config


def test_a_critic_has_the_policys_adapter_settings_or_a_model_of_its_own() -> None:
    adapter = {"kind": "lora", "r": 4, "path": "adapter"}
    critic = ppo(model={"path": "m", "adapter": adapter}).train_roles[1]
    assert critic.model.adapter is not None and (critic.model.adapter.r, critic.model.adapter.path) == (4, None)
    other = ppo(critic={"model": {"path": "reward-model"}, "trainer": {"ranks": 2}}).train_roles[1]
    assert (other.model.path, other.model.tokenizer, other.model.head) == ("reward-model", "m", "score")
    assert (other.trainer.ranks, other.trainer.optimizer.lr) == (2, 9e-6)


def test_a_critic_starts_from_the_first_reward_model_that_has_a_path() -> None:
    terms = [
        {"kind": "exact_match"}, {"kind": "model", "url": "http://host/classify", "tokenizer": "t"},
        {"kind": "model", "path": "first", "revision": "r", "tokenizer": "own", "dtype": "bfloat16"},
        {"kind": "model", "path": "second"},
    ]  # fmt: skip
    changes: dict[str, Any] = {"reward": {"terms": terms}, "critic": {"model": "reward_model"}}
    config = ppo(**changes, model={"path": "m", "max_length": 777, "adapter": {"r": 4, "path": "adapter"}})
    found = config.train_roles[1].model
    assert (found.path, found.revision, found.tokenizer, found.head) == ("first", "r", "m", "score")
    assert (found.dtype, found.max_length) == ("auto", 777), "as the policy's: it is trained"
    assert found.adapter is not None and (found.adapter.r, found.adapter.path) == (4, None)
    assert check_config(json.loads(json.dumps(config.model_dump(mode="json"))), "stored") == config
    assert ppo(critic={"model": None}) == ppo(critic={"model": "policy"}) == ppo()


def test_a_run_may_train_only_the_critic() -> None:
    config = ppo(critic={"warmup_steps": 10, "warmup_epochs": 3, "export": True, "warmup_explained_variance": 0.5})
    assert [each.folder for each in config.exports] == ["critic/export"], "the policy is as it was"
    assert config.train_roles[1].optimizer_steps == 30
    assert config.reason_to_stop({"critic/explained_variance": 0.6})
    assert not config.reason_to_stop({"critic/explained_variance": 0.4}) and not config.reason_to_stop({})
    longer = config.model_copy(update={"steps": 12})
    assert not longer.reason_to_stop({"critic/explained_variance": 0.6}), "then the policy is trained"
    policy, critic = longer.train_roles
    assert (policy.optimizer_steps, critic.optimizer_steps) == (11, 32), (
        "the warm-up has a step at least, and 10 at most"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kl_controller": {"target": 0.1}, "loss": {"kl": {"where": "loss"}}}, "set loss.kl.where=reward"),
        ({"kl_controller": {"target": 0.1}, "loss": {"kl": {"coefficient": 0}}}, "loss.kl.coefficient above 0"),
        ({"bootstrap_truncated": True, "loss": {"mask_truncated": True}}, "but loss.mask_truncated treats it"),
        (
            {
                "bootstrap_truncated": True,
                "reward": {"terms": [{"kind": "exact_match"}, {"kind": "length", "soft": 4, "hard": 8}]},
            },
            "but the term of kind length in reward.terms treats it",
        ),
        ({"critic": {"warmup_steps": 10}}, "leaves no step of 10"),
        ({"critic": {"warmup_steps": 11, "export": True}}, "leaves no step of 10"),
        ({"critic": {"warmup_lam": 0.9}}, "critic: warmup_lam has no effect with warmup_steps 0"),
        ({"critic": {"model": "reward_model"}}, "no term of reward.terms has kind model and a path"),
        (
            {"critic": {"model": "org/name"}},
            "expected policy, reward_model, or a section with a path: set critic.model",
        ),
        ({"critic": {"model": {"pth": "x"}}}, "critic.model.pth: unknown key"),
        ({"critic": {"model": {"path": "x", "head": "vocabulary"}}}, "does not suit a critic"),
        ({"reward_clip": [1, 0]}, "the lowest reward 1 must be less than the highest 0"),
        ({"advantage": {"lam": 0.9, "length_adaptive_alpha": 0.05}}, "leave one of the two out"),
        ({"advantage": {"kind": "grpo"}}, "advantage.kind"),
        (
            {"critic": {"trainer": {"offload": {"optimizer": True}}}, "rollout": {"max_staleness": 1}},
            "critic.trainer.offload frees the GPU",
        ),
    ],
)
def test_ppo_refuses_what_contradicts_itself(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ppo(**changes)
    assert problem in str(caught.value)


def online_dpo(**changes: Any) -> RunConfig:
    return check_config({**COMMON, "recipe": "online_dpo", "reward": REWARD, **changes}, "test")


def rejection_sampling(**changes: Any) -> RunConfig:
    return check_config({**COMMON, "recipe": "rejection_sampling", "reward": REWARD, **changes}, "test")


def test_online_dpo_learns_pairs_of_completions() -> None:
    """Log-probabilities are those at temperature 1, and there is no ratio that staleness or truncation would spoil."""
    sampling = {"temperature": 0.7, "top_p": 0.9}
    config = online_dpo(
        prompts_per_step=4,
        group_size=6,
        epochs=2,
        minibatch_size=12,
        rollout={"sampling": sampling, "max_staleness": 3},
    )
    assert config.generation is not None and config.generation.group_size == 6
    assert (config.data_kind, config.sequences_per_step, config.updates_per_step) == ("prompts", 8, 4)
    assert config.policy.temperature == 1.0 and config.policy.holds_reference
    apart = online_dpo(reference={"ranks": 2}, rollout={"sampling": sampling})
    assert [(role.name, role.temperature) for role in apart.serve_roles] == [("reference", 1.0)]
    assert not apart.policy.holds_reference and not online_dpo(loss={"type": "simpo"}).policy.holds_reference


def test_rejection_sampling_learns_some_completions() -> None:
    config = rejection_sampling(prompts_per_step=4, group_size=6, best_k=2, rollout={"max_staleness": 1})
    assert config.generation is not None and config.generation.group_size == 6
    assert (config.sequences_per_step, config.policy.objective, config.policy.temperature) == (8, CrossEntropy(), 1.0)
    assert rejection_sampling(group_size=1, min_reward=0.5).sequences_per_step == 32


@pytest.mark.parametrize(
    ("make", "changes", "problem"),
    [
        (online_dpo, {"loss": {"type": "kto"}}, "loss.type kto learns from single completions with a label"),
        (online_dpo, {"loss": {"type": "apo_zero_unpaired"}}, "choose a loss of pairs"),
        (online_dpo, {"group_size": 1}, "greater than or equal to 2"),
        (online_dpo, {"group_size": 4, "minibatch_size": 6}, "must be a multiple of group_size 4"),
        (online_dpo, {"rollout": {"sampling": {"temperature": 0}}}, "all completions of a group are the same"),
        (online_dpo, {"model": {"path": "m", "adapter": {"lora_dropout": 0.1}}}, "lora_dropout 0.1 would make"),
        (online_dpo, {"reference": {}, "loss": {"type": "simpo"}}, "loss.type simpo has no reference"),
        (online_dpo, {"reference": {}, "loss": {"sync_ref_model": True}}, "its processes do not have"),
        (online_dpo, {"reward": None}, "reward"),
        (rejection_sampling, {"group_size": 2, "best_k": 3}, "best_k 3 is more than the 2 completions"),
        (rejection_sampling, {"group_size": 2, "best_k": 2}, "learns every completion, whatever its reward"),
        (rejection_sampling, {"group_size": 1}, "or set min_reward"),
        (rejection_sampling, {"loss": {"kind": "ppo_clip"}}, "loss.kind"),
    ],
)
def test_recipes_that_choose_completions_refuse_what_contradicts_itself(
    make: Any, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert problem in str(caught.value)


@pytest.mark.parametrize("make", [sft, grpo, ppo, online_dpo, rejection_sampling])
def test_a_role_travels_as_json(make: Any) -> None:
    role = make().policy
    assert (role.name, role.seed, role.model.path) == ("policy", 4, "m")
    assert TrainRole.model_validate(json.loads(json.dumps(role.model_dump(mode="json")))) == role


def test_a_trial_run_is_valid_and_smaller() -> None:
    for config in (
        sft(batch_size=64),
        grpo(prompts_per_step=64, minibatch_size=64),
        ppo(prompts_per_step=64, critic={"warmup_steps": 5}),
        online_dpo(prompts_per_step=64, minibatch_size=16),
        rejection_sampling(prompts_per_step=64, minibatch_size=64),
    ):
        values = config.model_dump(mode="json")
        for name, value in config.trial_overrides.items():
            *sections, key = name.split(".")
            section = values
            for each in sections:
                section = section[each]
            section[key] = value
        tiny = RECIPES[config.recipe].model_validate(values)
        assert tiny.sequences_per_step < config.sequences_per_step


def test_what_losses_need_of_the_trainer() -> None:
    assert CrossEntropy().evaluated_fields == PPOClip().evaluated_fields == {}
    both = PPOClip(old_logprobs="trainer", kl=KLPenalty(coefficient=0.1))
    assert both.evaluated_fields == {"old_logprob": "logprobs", "reference_logprob": "reference_logprobs"}
    assert both.needs_reference and not PPOClip(old_logprobs="trainer").needs_reference
    in_reward = PPOClip(kl=KLPenalty(coefficient=0.1, where="reward"))
    assert in_reward.needs_reference and "reference_logprob" not in in_reward.required_fields


def test_an_unknown_recipe_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "best_of_n", RECIPES["sft"])
    with pytest.raises(
        ConfigError,
        match=r"'best_of' is unknown.*sft, grpo, ppo, online_dpo, rejection_sampling, preference, reward, best_of_n",
    ):
        check_config({**COMMON, "recipe": "best_of"}, "test")


def test_reward_models_have_their_own_defaults_and_refusals() -> None:
    base = {"recipe": "reward", "name": "r", "steps": 1, "model": {"path": "m"}, "data": {"path": "d"}}
    config = check_config(base, "test")
    assert (config.model.head, config.trainer.optimizer.lr, config.data_kind) == ("score", 9e-6, "pairs")
    assert check_config(base | {"trainer": {"optimizer": {"lr": 1e-5}}}, "test").trainer.optimizer.lr == 1e-5
    for changes, words in (
        ({"model": {"path": "m", "adapter": {"lora_dropout": 0.1}}}, "lora_dropout 0.1 would make"),
        ({"evaluation": {"data": {"path": "e"}}}, "a reward model gives scores: use validation"),
        ({"model": {"path": "m", "head": "vocabulary"}}, "head vocabulary does not suit this recipe"),
        ({"early_stopping": {"metric": "eval/accuracy"}}, "is measured by validation: set validation.every"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_config(base | changes, "test")
    with pytest.raises(ConfigError, match="overlong: truncate cuts pairs of completions, and nothing else"):
        check_config(base | {"recipe": "sft", "data": {"path": "d", "overlong": "truncate"}}, "test")
