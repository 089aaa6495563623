"""From rewards to the advantages of targets, with the KL penalty."""

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.actor_critic import ValueLoss
from lockstep.config.algorithm import (
    DrGRPOAdvantage,
    GRPOAdvantage,
    KLPenalty,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RLOOAdvantage,
)
from lockstep.config.loader import check_config
from lockstep.config.recipes import PPOConfig
from lockstep.data.forest_builder import forest_from_rollouts, forest_of_states
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.run.step_advantages import (
    actor_critic_targets,
    compute_advantages,
    is_warmup,
    kl_coefficient,
    values_of_states,
)
from lockstep.train.objective import check_fields, make_objective

REWARDS = np.array([[1.0, 0.0], [2.0, 2.0]], np.float32)
LENGTHS = [[2, 1], [1, 3]]


def batch() -> TrainingBatch:
    def completion(length: int) -> Completion:
        return Completion(
            "r", np.arange(length, dtype=np.int32), np.full(length, -1.0, np.float32), np.zeros(length, np.int32),
            "stop", "",
        )  # fmt: skip

    groups = [
        Group(Prompt(f"0:{g}", g, np.array([1], np.int32), ""), [completion(length) for length in lengths])
        for g, lengths in enumerate(LENGTHS)
    ]
    return pack(forest_from_rollouts(Rollouts(0, 0, groups)), 1, 64)


def test_every_target_has_the_advantage_of_its_completion() -> None:
    made = batch()
    assert made.sequences.tolist() == [0, 0, 1, 2, 3, 3, 3]
    found = compute_advantages(REWARDS, made, DrGRPOAdvantage(), KLPenalty())
    assert found.dtype == np.float32
    assert found.tolist() == [0.5, 0.5, -0.5, 0, 0, 0, 0]
    assert compute_advantages(REWARDS, made, RLOOAdvantage(), KLPenalty()).tolist() == [1, 1, -1, 0, 0, 0, 0]
    assert compute_advantages(REWARDS, made, GRPOAdvantage(epsilon=0), KLPenalty())[:3] == pytest.approx(
        [0.5**0.5] * 2 + [-(0.5**0.5)]
    )


def test_group_advantages_subtract_the_penalty_of_the_whole_completion() -> None:
    made = batch()
    gap = np.array([0.1, 0.2, 0.0, 0.0, 0.4, 0.0, 0.1], np.float32)  # k1: policy - reference
    made.set_per_target("reference_logprob", -1.0 - gap)
    kl = KLPenalty(coefficient=2.0, estimator="k1", where="reward")
    found = compute_advantages(REWARDS, made, DrGRPOAdvantage(), kl)
    first, second = (1 - 0.6 - 0.0) / 2, (0.0 - (-1.0)) / 2
    assert found.tolist() == pytest.approx([first, first, -first, second, -second, -second, -second], abs=1e-6)
    assert compute_advantages(REWARDS, made, DrGRPOAdvantage(), kl.model_copy(update={"where": "loss"}))[0] == 0.5


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_subtracts_the_penalty_per_token(baseline: bool) -> None:
    made = batch()
    gap = np.array([0.1, 0.2, 0.0, 0.0, 0.4, 0.0, 0.1], np.float32)
    made.set_per_target("reference_logprob", -1.0 - gap)
    config = ReinforcePlusPlusBaselineAdvantage() if baseline else ReinforcePlusPlusAdvantage()
    found = compute_advantages(REWARDS, made, config, KLPenalty(coefficient=2.0, estimator="k1", where="reward"))
    rewards = [0.5, 0.5, -0.5, 0, 0, 0, 0] if baseline else [1, 1, 0, 2, 2, 2, 2]
    returns = torch.tensor(rewards) - 2 * torch.tensor([0.3, 0.2, 0.0, 0.0, 0.5, 0.1, 0.1])
    np.testing.assert_allclose(found, ((returns - returns.mean()) / returns.std()).numpy(), rtol=1e-5, atol=1e-6)


def ppo(**changes: Any) -> PPOConfig:
    base = {
        "recipe": "ppo", "name": "x", "steps": 9, "model": {"path": "m"}, "data": {"path": "d"},
        "reward": {"terms": [{"kind": "exact_match"}]}, "prompts_per_step": 2, "group_size": 2,
    }  # fmt: skip
    config = check_config({**base, **changes}, "test")
    assert isinstance(config, PPOConfig)
    return config


def conversations(*masks: str, finish: str = "stop") -> Rollouts:
    """A group of conversations that begin alike. In a mask, `o` is a token of the policy and `-` an observation."""
    completions = []
    for number, mask in enumerate(masks):
        own = np.array([each == "o" for each in mask])
        tokens = np.arange(len(mask), dtype=np.int32)
        tokens[-1] = 50 + number
        logprobs = np.where(own, -1.0, 0.0).astype(np.float32)
        completions.append(Completion("r", tokens, logprobs, np.zeros(len(mask), np.int32), finish, "", own))  # type: ignore[arg-type]
    return Rollouts(0, 0, [Group(Prompt("0:0", 0, np.array([1], np.int32), ""), completions)])


def in_loops(rewards: list[float], values: np.ndarray, last: list[float], gamma: float, lam: float) -> list[float]:
    """GAE of completions of equal length, token by token from the end."""
    found: list[float] = []
    for reward, own, after in zip(rewards, values, last, strict=True):
        advantage, value_after, backwards = 0.0, after, []
        for place in reversed(range(len(own))):
            earned = reward if place == len(own) - 1 else 0.0
            advantage = earned + gamma * value_after - own[place] + gamma * lam * advantage
            value_after = own[place]
            backwards.append(advantage)
        found += reversed(backwards)
    return found


@pytest.mark.parametrize("masks", [("ooo", "ooo"), ("o--oo", "o--oo"), ("oo---o", "oo---o")])
def test_observations_are_no_steps_of_time(masks: tuple[str, ...]) -> None:
    """Whether or not an environment wrote between them, three own tokens have the same advantages."""
    made = pack(forest_from_rollouts(conversations(*masks)), 1, 64)
    order = np.argsort(made.sequences, kind="stable")
    values = np.array([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]])
    of_targets = np.empty(6)
    of_targets[order] = values.ravel()
    config = ppo(advantage={"gamma": 0.9, "lam": 0.8, "whiten": "off"}, loss={"kl": {"coefficient": 0}})
    found = actor_critic_targets(np.array([[1.0, -2.0]]), made, of_targets, np.zeros(2), 0.0, config)
    expected = in_loops([1.0, -2.0], values, [0.0, 0.0], 0.9, 0.8)
    np.testing.assert_allclose(found.advantages[order], expected, rtol=1e-6)
    np.testing.assert_allclose(found.returns[order], np.array(expected) + values.ravel(), rtol=1e-6)


@pytest.mark.parametrize("masks", [("ooo", "ooo"), ("o--oo", "o--oo")])
def test_the_value_after_a_truncated_completion(masks: tuple[str, ...]) -> None:
    rollouts = conversations(*masks, finish="length")
    rollouts.groups[0].completions[0].finish = "stop"
    states, made = (pack(make(rollouts), 1, 64) for make in (forest_of_states, forest_from_rollouts))
    assert np.bincount(states.sequences).tolist() == [3, 4] and np.bincount(made.sequences).tolist() == [3, 3]
    everything = states.everything().by_rank[0]
    values = np.zeros(states.targets, np.float32)
    for row in everything:  # the value of a state is the token at its end
        values[row.index] = row.tokens[row.sources]
    states.set_per_target("old_value", values)
    known, last = values_of_states(states, made)
    prompt, first = 1, rollouts.groups[0].completions[1].tokens
    ends = np.flatnonzero(np.array(list(masks[1])) == "o")
    before = [prompt if end == 0 else int(first[end - 1]) for end in ends]
    assert known[made.sequences == 1].tolist() == before
    assert last.tolist() == [0.0, 51.0]
    config = ppo(advantage={"whiten": "off"}, loss={"kl": {"coefficient": 0}}, bootstrap_truncated=True)
    found = actor_critic_targets(np.array([[0.0, 2.0]]), made, known, last, 0.0, config)
    assert found.returns[made.sequences == 1].tolist() == [53.0] * 3, "the reward, and what is still to come"
    assert found.returns[made.sequences == 0].tolist() == [0.0] * 3


def test_rewards_are_normalised_and_clipped_before_penalties() -> None:
    made = batch()
    gap = np.array([0.1, 0.2, 0.0, 0.0, 0.4, 0.0, 0.1], np.float32)
    made.set_per_target("reference_logprob", -1.0 - gap)
    rewards, nothing = np.array([[30.0, 0.0], [-1.0, -1.0]], np.float32), np.zeros(7)
    common = {"advantage": {"whiten": "off"}, "loss": {"kl": {"coefficient": 2.0}}}
    found = actor_critic_targets(rewards, made, nothing, np.zeros(4), 2.0, ppo(**common))
    clipped = np.array([10, 10, 0, -1, -1, -1, -1.0])
    np.testing.assert_allclose(found.returns, clipped - 2 * np.array([0.3, 0.2, 0, 0, 0.5, 0.1, 0.1]), atol=1e-6)
    assert found.metrics["reward/kl"] == pytest.approx(np.mean([0.15, 0.0, 0.0, 0.5 / 3]))
    config = ppo(**common, normalize_reward=True, reward_clip=[-1.0, 1.0])
    found = actor_critic_targets(rewards, made, nothing, np.zeros(4), 2.0, config)
    shaped = np.clip((rewards - rewards.mean()) / rewards.std(ddof=1), -1, 1).ravel()
    expected = shaped[made.sequences] - 2 * np.array([0.3, 0.2, 0, 0, 0.5, 0.1, 0.1])
    np.testing.assert_allclose(found.returns, expected, atol=1e-6)


def test_advantages_are_whitened_and_returns_are_not() -> None:
    made, values = batch(), np.linspace(-1, 1, 7)
    plain = {"loss": {"kl": {"coefficient": 0}}}
    raw, whitened, centred = (
        actor_critic_targets(REWARDS, made, values, np.zeros(4), 0.0, ppo(advantage={"whiten": how}, **plain))
        for how in ("off", "mean_std", "mean")
    )
    expected = (raw.advantages - raw.advantages.mean()) / raw.advantages.std(ddof=1)
    np.testing.assert_allclose(whitened.advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(centred.advantages, raw.advantages - raw.advantages.mean(), rtol=1e-5, atol=1e-6)
    assert raw.returns.tolist() == whitened.returns.tolist() == centred.returns.tolist()


@pytest.mark.parametrize("masks", [("ooo", "ooo"), ("o--oo", "oo---o")])
def test_a_step_whose_completions_are_all_masked_has_empty_rows(masks: tuple[str, ...]) -> None:
    """Every rank gets a row with all fields that the loss needs, and nothing is learned from it."""
    config = ppo()
    made = pack(forest_from_rollouts(conversations(*masks, finish="length"), mask_truncated=True), 2, 64)
    assert made.targets == 0
    made.set_per_target("reference_logprob", np.zeros(0))
    found = actor_critic_targets(np.array([[1.0, -2.0]]), made, np.zeros(0), np.zeros(2), 0.01, config)
    made.set_per_target("advantage", found.advantages)
    minibatch = next(made.minibatches(objective=config.loss))
    for rows in minibatch.by_rank:
        check_fields(rows, make_objective(config.loss))
        assert all(row.fields["weight"].tolist() == [0.0] for row in rows)


def test_the_coefficient_is_not_adapted_to_steps_in_which_only_the_critic_was_trained() -> None:
    config = ppo(kl_controller={"target": 0.1}, critic={"warmup_steps": 2}, steps=4)
    before = {"reward/kl": 0.0, "reward/kl_coefficient": 0.01}
    assert kl_coefficient(config, {**before, "critic/warmup": 1.0}) == 0.01
    assert kl_coefficient(config, {**before, "critic/warmup": 0.0}) < 0.01


def test_the_coefficient_of_a_step_follows_from_the_step_before() -> None:
    fixed, adaptive = ppo(), ppo(kl_controller={"target": 0.1, "horizon": 40})
    before = {"reward/kl": 0.11, "reward/kl_coefficient": 0.05}
    assert kl_coefficient(fixed, before) == kl_coefficient(adaptive, None) == 0.01
    assert kl_coefficient(adaptive, before) == pytest.approx(0.05 * (1 + 0.1 * 4 / 40))
    assert kl_coefficient(adaptive, {"reward/kl_coefficient": 0.05}) == 0.05, "no token was learnt"


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("masks", [("ooo", "ooo"), ("o--oo", "o--oo")])
def test_in_the_warmup_returns_are_discounted_sums_of_rewards(masks: tuple[str, ...], gamma: float) -> None:
    """They depend neither on the critic's values nor on the lambdas of later steps, and its values may move freely."""
    made = pack(forest_from_rollouts(conversations(*masks)), 1, 64)
    order = np.argsort(made.sequences, kind="stable")
    gaps = np.array([[0.1, 0.2, 0.0], [0.0, 0.4, -0.3]])
    reference = np.empty(6, np.float32)
    reference[order] = -1.0 - gaps.ravel()
    made.set_per_target("reference_logprob", reference)
    config = ppo(
        advantage={"gamma": gamma, "lam": 0.5, "lam_critic": 0.7}, loss={"kl": {"coefficient": 2.0}},
        critic={"warmup_steps": 3},
    )  # fmt: skip
    rewards, values = np.array([[1.0, -2.0]]), np.array([0.3, -0.2, 5.0, 0.1, 0.4, -0.6], np.float32)
    per_token = -2 * gaps + [[0, 0, 1.0], [0, 0, -2.0]]
    expected = [sum(gamma**k * each for k, each in enumerate(row[t:])) for row in per_token for t in range(3)]
    found = actor_critic_targets(rewards, made, values, np.zeros(2), 2.0, config, warmup=True)
    np.testing.assert_allclose(found.returns[order], expected, rtol=1e-6)
    assert found.metrics["critic/warmup"] == 1.0
    loss = make_objective(ValueLoss(clip=0.01))
    fields = {"weight": torch.ones(6), "return": torch.from_numpy(found.returns)}
    moved = torch.from_numpy(values) + 3
    free = loss.compute({**fields, "old_value": torch.from_numpy(found.old_values)}, {"scores": moved}, None)
    assert free.loss.item() == pytest.approx(((moved.numpy() - found.returns) ** 2 / 2).sum(), rel=1e-6)
    assert free.metrics["clip_fraction"].item() == 0
    later = actor_critic_targets(rewards, made, values, np.zeros(2), 2.0, config)
    assert later.metrics["critic/warmup"] == 0.0 and later.old_values is values
    assert np.abs(later.returns[order] - expected).max() > 0.1


def test_the_warmup_ends_once_the_critic_explains_enough() -> None:
    fixed, config = (ppo(critic={"warmup_steps": 4, **changes}) for changes in ({}, {"warmup_explained_variance": 0.5}))
    good, bad = ({"critic/warmup": 1.0, "critic/explained_variance": value} for value in (0.5, 0.4))
    assert [is_warmup(fixed, step, good) for step in range(6)] == [True] * 4 + [False] * 2
    assert is_warmup(config, 0, None) and is_warmup(config, 1, bad) and not is_warmup(config, 1, good)
    assert is_warmup(config, 1, {"critic/warmup": 1.0}), "all returns were equal"
    assert not is_warmup(config, 3, {**bad, "critic/warmup": 0.0}), "it has ended before"
    assert not is_warmup(config, 4, bad), "it does not end later than warmup_steps"
    assert not is_warmup(ppo(), 0, None)
