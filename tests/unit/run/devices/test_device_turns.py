"""Roles that share devices take turns: one at a time is on them, and none is moved without a reason."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.loader import check_config
from lockstep.run.devices.device_turns import DeviceTurns, EngineTurn, divide_into_waves, turns_by_role


class User:
    """A role whose state is where it is."""

    def __init__(self, turns: DeviceTurns) -> None:
        self.on_device, self.moves, self.turns = False, 0, turns
        turns.join(self)

    def compute(self) -> None:
        self.turns.begin(self)
        self.on_device = True

    def offload(self) -> None:
        self.moves += self.on_device
        self.on_device = False


@given(st.lists(st.integers(0, 3), max_size=20))
def test_one_user_at_a_time_is_on_the_devices(order: list[int]) -> None:
    turns = DeviceTurns()
    users = [User(turns) for _ in range(4)]
    for number in order:
        users[number].compute()
        assert [user.on_device for user in users] == [each == number for each in range(4)]
    changes = sum(one != other for one, other in pairwise(order))
    assert sum(user.moves for user in users) == changes
    turns.begin()
    assert not any(user.on_device for user in users)


def test_a_turn_that_could_not_begin_begins_again() -> None:
    turns = DeviceTurns()
    first, second = User(turns), User(turns)
    first.compute()

    def fail() -> None:
        raise RuntimeError

    first.offload = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        second.compute()
    del first.offload  # type: ignore[method-assign]
    second.compute()
    assert second.on_device and not first.on_device


def test_engines_sleep_when_another_role_begins_and_wake_when_it_has_left() -> None:
    turns, order = DeviceTurns(), list[str]()
    user = User(turns)

    def wake() -> None:
        order.append("engines wake" if not user.on_device else "too early")

    engines = EngineTurn(turns, SimpleNamespace(sleep=lambda: order.append("engines sleep"), wake=wake))
    user.compute()
    engines.begin()
    assert not user.on_device
    user.compute()
    assert order == ["engines sleep", "engines wake", "engines sleep"]


def test_engines_sleep_before_any_model_is_loaded() -> None:
    """They load theirs as they start, so they are on the devices first."""
    turns, slept = DeviceTurns(), list[str]()
    EngineTurn(turns, SimpleNamespace(sleep=lambda: slept.append("engines"), wake=lambda: None))
    turns.begin()
    assert slept == ["engines"]


@given(st.lists(st.integers(0, 4), max_size=12))
def test_waves_keep_the_order_of_those_that_share_devices(sets: list[int]) -> None:
    turns = [DeviceTurns() for _ in range(5)]
    roles = list(enumerate(sets))
    waves = divide_into_waves(roles, lambda role: turns[role[1]])
    assert sorted(role for wave in waves for role in wave) == roles
    for wave in waves:
        assert len({of for _, of in wave}) == len(wave), "a set has one role in a wave"
    for of in set(sets):
        assert [role for wave in waves for role in wave if role[1] == of] == [role for role in roles if role[1] == of]
    assert len(waves) == max((sets.count(of) for of in sets), default=0)


def ppo(**changes: Any) -> Any:
    model = {"kind": "model", "path": "r"}
    values = {
        "recipe": "ppo", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d"}, "reference": {},
        "reward": {"terms": [{**model, "name": "a"}, {**model, "name": "b"}]}, **changes,
    }  # fmt: skip
    return check_config(values, "test")


@pytest.mark.parametrize(
    ("colocate", "sets"),
    [
        ([], []),
        ("all", [{"policy", "critic", "reference", "reward_model", "reward_model_2", "rollout"}]),
        (["actor_ref", "critic_reward"], [{"policy", "reference"}, {"critic", "reward_model", "reward_model_2"}]),
        ([["policy", "rollout"]], [{"policy", "rollout"}]),
    ],
)
def test_roles_of_a_set_have_the_same_turns(colocate: Any, sets: list[set[str]]) -> None:
    found = turns_by_role(ppo(placement={"colocate": colocate}))
    assert set(found) == {"policy", "critic", "reference", "reward_model", "reward_model_2", "rollout"}
    for one in found:
        for other in found:
            together = one == other or any({one, other} <= names for names in sets)
            assert (found[one] is found[other]) == together, (one, other)


def test_roles_that_share_devices_are_offloaded_unless_the_config_says_otherwise() -> None:
    def offloads(**changes: Any) -> list[tuple[bool | None, bool | None]]:
        roles = ppo(**changes).train_roles
        return [(role.trainer.offload.parameters, role.trainer.offload.optimizer) for role in roles]

    assert offloads() == [(False, False)] * 2
    assert offloads(placement={"colocate": "critic_reward"}) == [(False, False), (True, True)]
    kept = {"trainer": {"offload": {"optimizer": False}}}
    assert offloads(placement={"colocate": "all"}, critic=kept) == [(True, True), (True, False)]
    inside = {"placement": {"colocate": "actor_ref"}, "reference": None}
    assert offloads(**inside) == [(False, False)] * 2, "the policy's ranks hold the reference"
    frozen = {"path": "m", "adapter": {"r": 4}, "quantization": {"kind": "nf4"}}
    model = {"model": frozen, "critic": {"model": {"path": "c"}}, "reference": None}
    assert offloads(**model, placement={"colocate": "all"}) == [(False, True), (True, True)], "quantized weights stay"
