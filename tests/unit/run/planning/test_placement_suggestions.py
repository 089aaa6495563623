"""What is suggested for a run that does not fit: every suggestion, applied, is a config that loads and fits."""

import re
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.cluster.placement.assignment import DoesNotFit
from lockstep.cluster.placement.bundles import NodeResources, PlacementError
from lockstep.config.errors import ConfigError
from lockstep.config.loader import accepts_overrides, apply_overrides, check_config
from lockstep.run.planning.resources import HostResources
from lockstep.run.planning.run_plan import assign_nodes, make_plan

HOST = HostResources(cores=2, memory=1 << 20, shared_memory=1 << 20, device="cuda", gpus=16)
SETS: list[Any] = [
    [], "all", ["policy", "critic"], ["policy", "rollout"], ["policy", "critic", "rollout"],
    ["actor_ref", "critic_reward"], [["policy", "rollout"], ["critic", "reward_model"]],
]  # fmt: skip


def nodes_with(gpus: list[int], cpus: int) -> list[NodeResources]:
    return [
        NodeResources(f"id-{n}", f"node-{n}", f"address-{n}", cpus, count, cpus, count) for n, count in enumerate(gpus)
    ]


def overrides_in(suggestion: str) -> list[str]:
    """What a user would add to the command line."""
    values, _, removed = suggestion.partition("without ")
    found = [word for word in values.split() if "=" in word]
    assert all(re.fullmatch(r"[a-z_.0-9]+=[\w.,\[\]]+", word) for word in found), suggestion
    return found + [f"{field}=null" for field in removed.split(" and ") if field]


def refusal(values: dict[str, Any], nodes: list[NodeResources]) -> DoesNotFit | None:
    """Why a config does not fit the nodes; None if it fits. Raises ConfigError, PlacementError."""
    config = check_config(values, "test")
    plan = make_plan(config, None, HOST)
    try:
        assign_nodes(plan, config.placement, nodes, partial(accepts_overrides, config))
    except DoesNotFit as error:
        return error
    return None


def ppo(ranks: int = 2, critics: int = 2, **changes: Any) -> dict[str, Any]:
    model = {"kind": "model", "path": "r", "ranks": changes.pop("reward_ranks", 1)}
    return {
        "recipe": "ppo", "name": "x", "steps": 3, "model": {"path": "m"}, "data": {"path": "d"}, "cluster": "ray",
        "trainer": {"ranks": ranks, "replicas": changes.pop("replicas", 1)},
        "critic": {"trainer": {"ranks": critics, "replicas": 1}}, "reward": {"terms": [model]}, **changes,
    }  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    counts = st.sampled_from([1, 2, 3, 4, 6, 8])
    ranks = draw(counts)
    same = draw(st.booleans())
    colocate = draw(st.sampled_from(SETS))
    engine = {"kind": "vllm", "count": draw(counts), "tensor_parallel_size": draw(st.sampled_from([1, 2, 4]))}
    staleness = draw(st.sampled_from([0, 0, 1]))
    placement = {"colocate": colocate, "policy": {"nodes": draw(st.sampled_from([None, None, 1, 2]))}}
    reference = draw(st.sampled_from([None, {"ranks": ranks}]))
    return ppo(
        ranks, ranks if same else draw(counts), reward_ranks=ranks if same else draw(counts), reference=reference,
        replicas=draw(st.sampled_from([1, 1, 2])), placement=placement,
        rollout={"engine": engine, "max_staleness": staleness},
    )  # fmt: skip


@settings(max_examples=150)
@given(runs(), st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=1, max_size=3), st.sampled_from([4, 8, 64]))
def test_every_suggestion_loads_and_fits(values: dict[str, Any], gpus: list[int], cpus: int) -> None:
    nodes = nodes_with(gpus, cpus)
    try:
        error = refusal(values, nodes)
    except (ConfigError, PlacementError):
        error = None
    assume(error is not None)
    assert error is not None
    for suggestion in error.alternatives:
        assert refusal(apply_overrides(values, overrides_in(suggestion)), nodes) is None, suggestion


def test_the_roles_of_a_set_get_fewer_ranks_together() -> None:
    error = refusal(ppo(4, 4, placement={"colocate": ["policy", "critic"]}), nodes_with([4], 64))
    assert error is not None
    assert "trainer.ranks=2 with critic.trainer.ranks=2" in error.alternatives


@pytest.mark.parametrize(("staleness", "suggested"), [(0, True), (1, False)])
def test_engines_that_generate_ahead_are_not_put_on_the_trainers_devices(staleness: int, suggested: bool) -> None:
    engine = {"kind": "vllm", "count": 2}
    values = ppo(2, 2, rollout={"engine": engine, "max_staleness": staleness}, reward_ranks=2)
    error = refusal(values, nodes_with([6], 64))
    assert error is not None
    assert any("placement.colocate" in each for each in error.alternatives) == suggested
