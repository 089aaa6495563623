"""Assignments of bundles to nodes, and refusals with suggestions."""

import itertools
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cluster.placement.assignment import Assignment, DoesNotFit, NodesBusy, assign
from lockstep.cluster.placement.bundles import NodeResources, PlacementError, ProcessRequest, total_gpus
from lockstep.config.cluster import PlacementConfig


def node(number: int, cpus: float = 16, gpus: float = 8, **facts: Any) -> NodeResources:
    facts = {"free_cpus": cpus, "free_gpus": gpus, **facts}
    return NodeResources(f"id-{number}", f"node-{number}", f"address-{number}", cpus, gpus, **facts)


def run(ranks: int, engines: int = 0, width: int = 1, cpus: float = 1.0, gpus: bool = True) -> list[ProcessRequest]:
    found = [ProcessRequest(f"policy-{rank}", "policy", rank, cpus, int(gpus)) for rank in range(ranks)]
    return found + [ProcessRequest(f"engine-{rank}", "rollout", rank, cpus, width * gpus) for rank in range(engines)]


def where(assignment: Assignment) -> dict[str, str]:
    return {name: node.name for name, node in assignment.node_of.items()}


def check(assignment: Assignment, wanted: list[ProcessRequest], nodes: list[NodeResources]) -> None:
    """No node is over its free resources, every process is placed once, and GPUs are distinct unless shared."""
    names = [name for bundle in assignment.bundles for name in bundle.processes]
    assert Counter(names) == Counter(each.name for each in wanted)
    of = {each.name: each for each in wanted}
    for share in assignment.shares:
        assert share.cpus <= share.node.free_cpus + 1e-6 and share.gpus <= share.node.free_gpus
        assert share.cpus == pytest.approx(sum(of[name].cpus for name in share.processes))
        if share.node.memory:
            assert sum(of[name].memory for name in share.processes) <= share.node.memory
        for bundle in share.bundles:
            used = [(of[name].role, slot) for name in bundle.processes for slot in assignment.slots[name]]
            assert len(set(used)) == len(used), "two processes of a role on one GPU"
            assert all(0 <= slot < share.gpus for _, slot in used)
        taken = [slot for b in share.bundles for slot in {s for name in b.processes for s in assignment.slots[name]}]
        assert len(taken) == len(set(taken)), "two bundles on one GPU"
    assert all(len(assignment.slots[each.name]) == each.gpus for each in wanted)


def exists(wanted: list[ProcessRequest], nodes: list[NodeResources]) -> bool:
    """Tries every node for every process."""
    for places in itertools.product(range(len(nodes)), repeat=len(wanted)):
        for number, each in enumerate(nodes):
            here = [w for w, place in zip(wanted, places, strict=True) if place == number]
            if sum(w.cpus for w in here) > each.free_cpus or sum(w.gpus for w in here) > each.free_gpus:
                break
        else:
            return True
    return not wanted


@st.composite
def small(draw: st.DrawFn) -> tuple[list[ProcessRequest], list[NodeResources]]:
    ranks, engines = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    width = draw(st.integers(1, 3))
    wanted = run(ranks, engines, width, cpus=draw(st.sampled_from([0.5, 1.0, 2.0])))
    wanted += [ProcessRequest(f"scorer-{n}", "reward", n, 1.0) for n in range(draw(st.integers(0, 2)))]
    sizes = st.tuples(st.integers(0, 5), st.integers(0, 5))
    return wanted, [node(n, cpus, gpus) for n, (cpus, gpus) in enumerate(draw(st.lists(sizes, min_size=1, max_size=3)))]


@settings(max_examples=150, deadline=None)
@given(small(), st.sampled_from(["pack", "spread"]))
def test_a_placement_is_found_if_there_is_one(
    case: tuple[list[ProcessRequest], list[NodeResources]], strategy: Any
) -> None:
    wanted, nodes = case
    try:
        found = assign(wanted, PlacementConfig(strategy=strategy), nodes)
    except DoesNotFit as error:
        assert not exists(wanted, nodes), str(error)
    else:
        check(found, wanted, nodes)
        assert found == assign(wanted, PlacementConfig(strategy=strategy), nodes)


@settings(max_examples=100, deadline=None)
@given(
    ranks=st.integers(1, 9), engines=st.integers(1, 5), width=st.sampled_from([1, 2, 4]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), strategy=st.sampled_from(["pack", "spread"]),
)  # fmt: skip
def test_colocated_roles_share_gpus(ranks: int, engines: int, width: int, sizes: list[int], strategy: Any) -> None:
    wanted, nodes = run(ranks, engines, width), [node(n, 64, gpus) for n, gpus in enumerate(sizes)]
    placement = PlacementConfig(strategy=strategy, colocate="all")
    try:
        found = assign(wanted, placement, nodes)
    except DoesNotFit:
        return
    except PlacementError as error:
        assert engines * width > ranks and "rollout.engine.count" in str(error)
        return
    check(found, wanted, nodes)
    for engine in range(engines):
        with_it = [f"policy-{rank}" for rank in range(engine * width, (engine + 1) * width)]
        assert {found.node_of[name].id for name in with_it} == {found.node_of[f"engine-{engine}"].id}
        assert [slot for name in with_it for slot in found.slots[name]] == list(found.slots[f"engine-{engine}"])


ROLES = ("policy", "critic", "reference", "reward_model", "reward_model_2")


def of_roles(ranks: int, roles: Sequence[str]) -> list[ProcessRequest]:
    return [ProcessRequest(f"{role}-{rank}", role, rank, 0.5, 1) for role in roles for rank in range(ranks)]


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 4), roles=st.sets(st.sampled_from(ROLES), min_size=1),
    colocate=st.sampled_from(["all", "actor_ref", ["actor_ref", "critic_reward"], [["policy", "critic"]], []]),
    nodes=st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_roles_of_a_set_have_the_same_gpus(ranks: int, roles: set[str], colocate: Any, nodes: int | None) -> None:
    wanted = of_roles(ranks, sorted(roles))
    each = {} if nodes is None else {section: {"nodes": nodes} for section in ("policy", "critic")}
    placement = PlacementConfig(colocate=colocate, **each)
    try:
        found = assign(wanted, placement, [node(number, 64, 20) for number in range(2)])
    except PlacementError as error:
        assert nodes == 2 and ranks % 2 and "cannot be divided evenly" in str(error)
        return
    check(found, wanted, list(found.nodes))
    for one, other in itertools.combinations(sorted(roles), 2):
        members = placement.set_of(other)
        together = len(members) > 1 and one.partition("_2")[0] in members
        for rank in range(ranks):
            names = f"{one}-{rank}", f"{other}-{rank}"
            gpus = [(found.node_of[name].id, found.slots[name]) for name in names]
            assert (gpus[0] == gpus[1]) == together


def test_roles_of_a_set_need_as_many_ranks_and_one_placement() -> None:
    unequal = of_roles(2, ["critic"]) + of_roles(3, ["reward_model"])
    message = (
        r"puts critic and reward_model on the same devices, .* \(critic.trainer.ranks 2, reward.terms.\*.ranks 3\): "
        r"set reward.terms.\*.ranks=2, or leave reward_model out of the set"
    )
    with pytest.raises(PlacementError, match=message):
        assign(unequal, PlacementConfig(colocate="critic_reward"), [node(0)])
    assert len(assign(unequal, PlacementConfig(), [node(0)]).bundles) == 5
    differ = PlacementConfig(colocate="critic_reward", critic={"nodes": 1}, reward_model={"nodes": 2})
    with pytest.raises(PlacementError, match=r"placement.critic.nodes 1 and placement.reward_model.nodes 2 differ"):
        assign(of_roles(2, ["critic", "reward_model"]), differ, [node(0)])


def test_search_beats_largest_first() -> None:
    """Largest-first fails here: 3 + 3 GPUs on one node and 2 + 2 + 2 on the other."""
    wanted = [ProcessRequest(f"a-{n}", "policy", n, 0.1, 3) for n in range(2)] + [
        ProcessRequest(f"b-{n}", "x", n, 0.1, 2) for n in range(3)
    ]
    nodes = [node(0, 8, 7), node(1, 8, 6)]
    check(assign(wanted, PlacementConfig(strategy="spread"), nodes), wanted, nodes)


def test_pack_fills_a_node_and_keeps_neighbours_together() -> None:
    found = where(assign(run(10, 3, 2), PlacementConfig(), [node(0), node(1)]))
    ranks = [found[f"policy-{rank}"] for rank in range(10)]
    assert len(set(found.values())) == 2 and ranks == sorted(ranks)


def test_spread_uses_all_nodes_and_isolates_the_engine() -> None:
    nodes = [node(0, 2, 0), node(1, 2, 0)]
    assert where(assign(run(1, 1, gpus=False), PlacementConfig(strategy="spread"), nodes)) == {
        "policy-0": "node-0", "engine-0": "node-1",
    }  # fmt: skip
    six = where(assign(run(6), PlacementConfig(strategy="spread"), [node(n) for n in range(3)]))
    assert Counter(six.values()) == {"node-0": 2, "node-1": 2, "node-2": 2}
    assert [six[f"policy-{rank}"] for rank in range(6)] == sorted(six.values())


def test_nodes_and_gpus_per_node_of_a_role() -> None:
    placement = PlacementConfig(policy={"nodes": 2, "gpus_per_node": 4}, rollout={"nodes": 2})
    found = where(assign(run(8, 4, 2), placement, [node(n) for n in range(4)]))
    ranks, engines = Counter(found[f"policy-{n}"] for n in range(8)), Counter(found[f"engine-{n}"] for n in range(4))
    assert set(ranks.values()) == {4} and len(ranks) == 2
    assert set(engines.values()) == {2} and len(engines) == 2


def test_nodes_of_colocated_roles() -> None:
    placement = PlacementConfig(colocate=["policy", "rollout"], rollout={"nodes": 2, "gpus_per_node": 4})
    found = assign(run(8, 2, 2), placement, [node(n, gpus=4) for n in range(2)])
    assert [len(bundle.processes) for bundle in found.bundles] == [6, 4]
    assert [found.slots[name] for name in ("policy-3", "engine-1", "policy-7")] == [(3,), (2, 3), (3,)]
    rows = [row[2:] for row in found.rows()]
    assert rows == [("policy-0..3, engine-0..1", "6 of 16", "4 of 4"), ("policy-4..7", "4 of 16", "4 of 4")]


@pytest.mark.parametrize(
    ("placement", "wanted", "said"),
    [
        pytest.param(
            {"policy": {"nodes": 2, "gpus_per_node": 8}}, run(8), r"are 16 GPUs, and trainer\.ranks 8 .*=16",
            id="product",
        ),
        pytest.param({"policy": {"nodes": 3}}, run(8), r"trainer\.ranks 8 .*nodes 3: set trainer\.ranks to 9", id="3"),
        pytest.param({"policy": {"gpus_per_node": 3}}, run(8), r"a multiple of 3", id="per node"),
        pytest.param({"rollout": {"gpus_per_node": 3}}, run(1, 2, 2), r"parallel_size to a divisor of 3", id="width"),
        pytest.param(
            {"colocate": "all", "policy": {"nodes": 1}, "rollout": {"nodes": 2}}, run(4, 4), "nodes 1 and .*2 differ",
            id="two words",
        ),
        pytest.param({"colocate": "all"}, run(2, 2, 2), r"rollout\.engine\.count=1 .*trainer\.ranks=4", id="too many"),
        pytest.param(
            {"colocate": "all", "policy": {"nodes": 2}}, run(6, 1, 2), "a divisor of 3", id="engine over two nodes"
        ),
    ],
)  # fmt: skip
def test_contradicting_placements_are_refused(
    placement: dict[str, Any], wanted: list[ProcessRequest], said: str
) -> None:
    with pytest.raises(PlacementError, match=said):
        assign(wanted, PlacementConfig(**placement), [node(n) for n in range(4)])


@pytest.mark.parametrize(
    ("wanted", "placement", "nodes", "bundle", "would"),
    [
        pytest.param(
            run(2, 1, 8), {}, [node(0, gpus=4), node(1, gpus=2)], "engine-0",
            "rollout.engine.tensor_parallel_size=4", id="width",
        ),
        pytest.param(run(16, 1), {}, [node(0)], "policy-8", "trainer.ranks=7", id="ranks"),
        pytest.param(run(8, 4, 2), {}, [node(0)], "policy-0", "placement.colocate=all", id="colocate"),
        pytest.param(
            run(16, 4, 2), {"policy": {"nodes": 2, "gpus_per_node": 8}}, [node(0), node(1)], "engine-0",
            "trainer.ranks=8 with placement.policy.nodes=1", id="ranks of whole nodes",
        ),
        pytest.param(run(8, 2), {}, [node(0, cpus=4, gpus=16)], "policy-4", "placement.policy.cpus=0.25", id="cores"),
        pytest.param(
            run(4), {"policy": {"nodes": 4}}, [node(0), node(1)], "policy-2",
            "without placement.policy.nodes", id="nodes",
        ),
        pytest.param(
            run(8, 4, 8), {}, [node(0, gpus=4)], "engine-0",
            "trainer.ranks=2 with rollout.engine.count=1 and rollout.engine.tensor_parallel_size=2", id="all",
        ),
    ],
)  # fmt: skip
def test_refusals_suggest_what_fits(
    wanted: list[ProcessRequest], placement: dict[str, Any], nodes: list[NodeResources], bundle: str, would: str
) -> None:
    with pytest.raises(DoesNotFit) as caught:
        assign(wanted, PlacementConfig(**placement), nodes)
    error = caught.value
    assert error.bundle.processes[0] == bundle and error.largest is nodes[0]
    assert would in error.alternatives and would in str(error)
    assert f"has {nodes[0].gpus:g} GPUs" in str(error) or f"(node-0) {nodes[0].gpus:g} GPUs" in str(error)


@pytest.mark.parametrize("asked", [(12, 4, 4), (8, 2, 8), (16, 1, 1), (3, 9, 2), (40, 40, 8)], ids=str)
def test_suggestions_fit(asked: tuple[int, int, int]) -> None:
    """Applies every suggestion."""
    nodes = [node(0), node(1, gpus=4)]
    with pytest.raises(DoesNotFit) as caught:
        assign(run(*asked), PlacementConfig(), nodes)
    names = ("trainer.ranks", "rollout.engine.count", "rollout.engine.tensor_parallel_size")
    assert caught.value.alternatives
    for said in caught.value.alternatives:
        given = dict(re.findall(r"([a-z_.]+)=(\w+)", said))
        wanted = run(*(int(given.get(name, number)) for name, number in zip(names, asked, strict=True)))
        placement = PlacementConfig(colocate="all" if given.pop("placement.colocate", None) else ())
        assert set(given) <= set(names)
        check(assign(wanted, placement, nodes), wanted, nodes)


def test_memory_is_a_resource() -> None:
    wanted = [ProcessRequest(f"policy-{n}", "policy", n, 1, memory=3 << 30) for n in range(3)]
    check(assign(wanted, PlacementConfig(), [node(0, memory=6 << 30), node(1)]), wanted, [])
    with pytest.raises(DoesNotFit, match=r"3.0 GiB of memory.*9.0 GiB in all.*6.0 GiB"):
        assign(wanted, PlacementConfig(), [node(0, memory=6 << 30)])


def test_refusals_without_gpus_do_not_mention_gpus() -> None:
    with pytest.raises(DoesNotFit) as caught:
        assign(run(5, gpus=False), PlacementConfig(), [node(0, 4, 0)])
    assert str(caught.value) == (
        "policy-4 (1 CPU) does not fit beside the others: the run needs 5 CPUs in all, and 1 node has 4 CPUs, the "
        "largest (node-0) 4 CPUs. Would fit: trainer.ranks=4, or placement.policy.cpus=0.5"
    )


def test_busy_is_not_infeasible() -> None:
    nodes = [node(0, free_gpus=3), node(1, gpus=2)]
    with pytest.raises(NodesBusy, match=r"policy-1\.\.3 wait for 3 GPUs .*node-0 has 5 of 8 GPUs in use"):
        assign(run(4, 2, 2), PlacementConfig(), nodes)
    with pytest.raises(DoesNotFit):
        assign(run(7, 2, 2), PlacementConfig(), nodes)


def test_nothing_fits_without_living_nodes() -> None:
    with pytest.raises(DoesNotFit, match="no node is alive"):
        assign(run(1), PlacementConfig(), [])


@pytest.mark.parametrize("strategy", ["pack", "spread"])
def test_thousands_of_processes_are_placed_fast(strategy: Any) -> None:
    """Within half a second of CPU time."""
    nodes = [node(n) for n in range(640)]
    began = time.process_time()
    found = assign(run(4096, 1024), PlacementConfig(strategy=strategy), nodes)
    placed = time.process_time() - began
    check(found, run(4096, 1024), nodes)
    began = time.process_time()
    with pytest.raises(DoesNotFit, match="6,144 GPUs"):
        assign(run(4096, 1024, 2), PlacementConfig(strategy=strategy), nodes)
    refused = time.process_time() - began
    print(f"placed {placed:.3f} s, refused {refused:.3f} s")
    assert placed < 1 and refused < 2


def test_shared_gpus_count_once() -> None:
    wanted = run(8, 4, width=2)
    assert total_gpus(wanted, PlacementConfig(colocate=["policy", "rollout"])) == 8
    assert total_gpus(wanted, PlacementConfig()) == 16
    assert total_gpus(run(4, 2, gpus=False), PlacementConfig()) == 0


def test_fewer_ranks_of_another_trained_role_are_suggested() -> None:
    critics = [ProcessRequest(f"critic-{rank}", "critic", rank, 1.0, 1) for rank in range(8)]
    with pytest.raises(DoesNotFit) as caught:
        assign([*run(4), *critics], PlacementConfig(), [node(0)])
    assert "critic.trainer.ranks=4" in caught.value.alternatives
    placement = PlacementConfig.model_validate({"critic": {"nodes": 2}})
    with pytest.raises(DoesNotFit) as caught:
        assign([*run(1), *critics[:4]], placement, [node(0)])
    assert "without placement.critic.nodes" in caught.value.alternatives


def roles(**counts: int) -> list[ProcessRequest]:
    """Ranks of the given roles on a GPU each."""
    return [ProcessRequest(f"{role}-{n}", role, n, 1.0, 1) for role, count in counts.items() for n in range(count)]


@pytest.mark.parametrize(
    ("colocate", "gpus", "would"),
    [
        ([["critic", "reward_model"]], 4, "placement.colocate=[[policy,rollout],[critic,reward_model]]"),
        ([["critic", "reward_model"]], 2, "placement.colocate=all"),
        ([["reference", "policy"]], 6, "placement.colocate=[reference,policy,rollout]"),
        ([], 2, "placement.colocate=all"),
    ],
)
def test_engines_are_added_to_the_sets_that_share_devices(colocate: Any, gpus: int, would: str) -> None:
    """Roles that share devices now do so in what is suggested, which is an override that fits."""
    wanted = roles(policy=2, critic=2, reward_model=2, reference=2 * ("reference" in str(colocate)), rollout=2)
    nodes = [node(0, gpus=gpus)]
    with pytest.raises(DoesNotFit) as caught:
        assign(wanted, PlacementConfig(colocate=colocate), nodes)
    assert caught.value.alternatives[0] == would
    given = yaml.safe_load(would.partition("=")[2])
    check(assign(wanted, PlacementConfig(colocate=given), nodes), wanted, nodes)


def test_fewer_processes_are_suggested_by_the_fields_of_their_roles() -> None:
    """Two reward models have a field each."""
    wanted = [
        ProcessRequest(f"{role}-{n}", role, n, 1.0, 1, count_field=f"reward.terms.{number}.ranks")
        for number, role in enumerate(("reward_model", "reward_model_2"))
        for n in range(2)
    ]
    with pytest.raises(DoesNotFit) as caught:
        assign(wanted, PlacementConfig(), [node(0, gpus=2)])
    assert list(caught.value.alternatives) == ["reward.terms.0.ranks=1 with reward.terms.1.ranks=1"]
