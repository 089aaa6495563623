"""Reservations of processes, and their replacement when nodes are lost."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.placement.assignment import Assignment, DoesNotFit, NodesBusy
from lockstep.cluster.placement.bundles import NodeResources, PlacementError, ProcessRequest, make_bundles
from lockstep.cluster.placement.reservations import (
    AllocatorUnavailable,
    ProcessPlacement,
    Reservation,
    ReservationConflict,
    ReservationTable,
)
from lockstep.config.cluster import PlacementConfig


class FakeNodes:
    """Nodes with GPUs; a reservation takes some until it is released."""

    def __init__(self, **gpus: int) -> None:
        self.gpus, self.free = dict(gpus), {name: list(range(count)) for name, count in gpus.items()}
        self.groups: dict[str, tuple[str, list[int]]] = {}
        self.refused: list[Exception] = []

    def look(self) -> list[NodeResources]:
        return [
            NodeResources(name, name, name, 64, count, 64, len(self.free[name])) for name, count in self.gpus.items()
        ]  # fmt: skip

    def reserve(self, assignment: Assignment) -> list[Reservation]:
        if self.refused:
            raise self.refused.pop()
        found = []
        for share in assignment.shares:
            node, name = share.node.id, f"group-{len(self.groups)}"
            taken, self.free[node] = self.free[node][: share.gpus], self.free[node][share.gpus :]
            assert len(taken) == share.gpus
            self.groups[name] = node, taken
            gpus = {
                each: tuple(str(taken[slot]) for slot in assignment.slots.get(each, ())) for each in share.processes
            }
            found.append(Reservation(name, node, gpus))
        return found

    def give_back(self, group: str) -> None:
        node, taken = self.groups[group]
        if node in self.gpus:
            self.free[node] += taken

    def loses(self, node: str, table: ReservationTable) -> None:
        del self.gpus[node]
        for group in table.drop_node(node):
            self.give_back(group)


def run(ranks: int, engines: int = 0, width: int = 1) -> list[ProcessRequest]:
    found = [ProcessRequest(f"policy-{rank}", "policy", rank, 1, 1) for rank in range(ranks)]
    return found + [ProcessRequest(f"engine-{rank}", "rollout", rank, 1, width) for rank in range(engines)]


def settled(nodes: FakeNodes, wanted: list[ProcessRequest], **placement: Any) -> ReservationTable:
    table = ReservationTable(wanted, PlacementConfig(**placement))
    table.reserve_all(nodes.look, nodes.reserve, 5.0, 1.0)
    return table


def nodes_of(table: ReservationTable, wanted: list[ProcessRequest]) -> dict[str, str]:
    found = {each.name: table.placement_of(each.name) for each in wanted}
    return {name: place.node for name, place in found.items() if place is not None}


def test_one_group_for_each_node() -> None:
    nodes, wanted = FakeNodes(a=4, b=4), run(8)
    table = settled(nodes, wanted)
    assert [(each.node, len(each.gpus)) for each in table.held] == [("a", 4), ("b", 4)]
    assert table.placement_of("policy-5") == ProcessPlacement("b", ("1",)) and table.placement_of("scorer-0") is None
    assert "policy-5" in table and "scorer-0" not in table


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    with caplog.at_level(logging.INFO, "lockstep.cluster.placement.reservations"):
        yield lambda level: [record.message for record in caplog.records if record.levelno == level]


def test_conflicts_are_retried(told: Any) -> None:
    nodes = FakeNodes(a=4)
    nodes.refused = [ReservationConflict("others have taken it"), AllocatorUnavailable("nobody says")]
    table = settled(nodes, run(4))
    assert table.placement_of("policy-3") == ProcessPlacement("a", ("3",))
    assert told(logging.WARNING) == [
        "nobody says", "others have taken it",
        "reserved for policy-0..3 on a (a): 4 of 64 CPUs and 4 of 4 GPUs",
    ]  # fmt: skip


def test_immediate_reservations_are_logged(told: Any) -> None:
    settled(FakeNodes(a=4), run(1, 1))
    assert told(logging.INFO) == ["reserved for policy-0, engine-0 on a (a): 2 of 64 CPUs and 2 of 4 GPUs"]
    assert not told(logging.WARNING)


def test_waits_are_bounded_and_impossible_requests_refused(told: Any) -> None:
    nodes = FakeNodes(a=4)
    nodes.free["a"] = []
    with pytest.raises(WaitTimeout):
        ReservationTable(run(4), PlacementConfig()).reserve_all(nodes.look, nodes.reserve, 0.6, 1.0)
    assert told(logging.WARNING) == [
        "policy-0..3 wait for 4 GPUs and 4 CPUs (1 GPU and 1 CPU on one node): a has 4 of 4 GPUs in use"
    ]
    with pytest.raises(DoesNotFit):
        settled(nodes, run(5))


def test_only_processes_of_a_lost_node_move() -> None:
    nodes, wanted = FakeNodes(a=4, b=4), run(8)
    table = settled(nodes, wanted, policy={"nodes": 2, "gpus_per_node": 4})
    nodes.loses("b", table)
    assert set(nodes_of(table, wanted).values()) == {"a"} and len(nodes_of(table, wanted)) == 4
    nodes.gpus |= {"c": 2, "d": 2}
    nodes.free |= {"c": [0, 1], "d": [0, 1]}
    table.replace("policy-6", nodes.look(), nodes.reserve)
    assert [(each.node, sorted(each.gpus)) for each in table.held] == [
        ("a", ["policy-0", "policy-1", "policy-2", "policy-3"]),
        ("c", ["policy-4", "policy-5"]),
        ("d", ["policy-6", "policy-7"]),
    ]


def test_no_setting_is_suggested_to_a_run_that_has_lost_a_node() -> None:
    """It has its config, and what would fit beside the others says nothing about the lost processes alone."""
    nodes, wanted = FakeNodes(a=2, b=4), run(6)
    table = settled(nodes, wanted)
    nodes.loses("b", table)
    with pytest.raises(DoesNotFit) as caught:
        table.replace("policy-0", nodes.look(), nodes.reserve)
    assert str(caught.value) == (
        "policy-2 (1 GPU and 1 CPU) does not fit beside the others: they need 4 GPUs and 4 CPUs in all, and 1 node "
        "has 2 GPUs and 64 CPUs, the largest (a) 2 GPUs and 64 CPUs"
    )


def test_a_recovered_node_is_free_again() -> None:
    nodes, wanted = FakeNodes(a=4, b=4), run(8)
    table = settled(nodes, wanted)
    nodes.loses("b", table)
    with pytest.raises(NodesBusy):
        table.replace("policy-4", nodes.look(), nodes.reserve)
    nodes.gpus["b"], nodes.free["b"] = 4, [0, 1, 2, 3]
    table.replace("policy-4", nodes.look(), nodes.reserve)
    assert sorted(nodes_of(table, wanted).values()) == ["a"] * 4 + ["b"] * 4


def test_ranks_have_priority() -> None:
    nodes, wanted = FakeNodes(a=4, b=4), run(4, 4)
    table = settled(nodes, wanted)
    assert nodes_of(table, wanted)["policy-0"] == "a"
    nodes.gpus["c"], nodes.free["c"] = 4, [0, 1]
    nodes.loses("a", table)
    with pytest.raises(NodesBusy):
        table.replace("policy-0", nodes.look(), nodes.reserve)
    nodes.free["c"] = [0, 1, 2, 3]
    table.replace("policy-0", nodes.look(), nodes.reserve)
    nodes.loses("b", table)
    with pytest.raises(PlacementError):
        table.replace("engine-0", nodes.look(), nodes.reserve)
    nodes.gpus["d"], nodes.free["d"] = 1, [0]
    table.replace("engine-2", nodes.look(), nodes.reserve)
    assert table.placement_of("engine-2") == ProcessPlacement("d", ("0",)) and table.placement_of("engine-0") is None


def test_an_engine_leaves_resources_to_ranks() -> None:
    nodes, wanted = FakeNodes(a=4), run(3, 1)
    table = settled(nodes, wanted)
    nodes.gpus["b"], nodes.free["b"] = 3, [0, 1, 2]
    nodes.loses("a", table)
    with pytest.raises(PlacementError):
        table.replace("engine-0", nodes.look(), nodes.reserve)
    table.replace("policy-1", nodes.look(), nodes.reserve)
    assert nodes_of(table, wanted) == {f"policy-{rank}": "b" for rank in range(3)}


def test_fewer_ranks_use_the_places_of_dropped_ones() -> None:
    nodes, wanted = FakeNodes(a=2, b=2), run(4)
    table = settled(nodes, wanted)
    nodes.loses("a", table)
    table.set_ranks(["policy-0", "policy-1"], {"b"})
    assert nodes_of(table, wanted) == {"policy-0": "b", "policy-1": "b"}
    assert table.placement_of("policy-0") == ProcessPlacement("b", ("0",)) and table.placement_of(
        "policy-1"
    ) == ProcessPlacement("b", ("1",))
    table.set_ranks([f"policy-{rank}" for rank in range(4)], {"b"})
    assert nodes_of(table, wanted) == {"policy-0": "b", "policy-1": "b"}, "who has a place keeps it"


def test_dropped_ranks_get_no_place() -> None:
    nodes, wanted = FakeNodes(a=2, b=2), run(4)
    table = settled(nodes, wanted)
    nodes.loses("a", table)
    table.set_ranks(["policy-0", "policy-1", "policy-2"], {"b"})
    nodes.gpus["c"], nodes.free["c"] = 2, [0, 1]
    table.replace("policy-1", nodes.look(), nodes.reserve)
    assert len(nodes_of(table, wanted)) == 3 and len(nodes.free["c"]) == 1


def test_colocated_processes_move_together() -> None:
    nodes, wanted = FakeNodes(a=2, b=2), run(4, 2, 2)
    table = settled(nodes, wanted, colocate="all")
    assert table.placement_of("engine-0") == ProcessPlacement("a", ("0", "1"))
    nodes.gpus["c"], nodes.free["c"] = 2, [0, 1]
    nodes.loses("b", table)
    table.replace("engine-1", nodes.look(), nodes.reserve)
    assert table.placement_of("engine-1") == ProcessPlacement("c", ("0", "1")) and table.placement_of(
        "policy-3"
    ) == ProcessPlacement("c", ("1",))
    nodes.loses("c", table)
    table.set_ranks(["policy-0", "policy-1"], {"a"})
    nodes.gpus["d"], nodes.free["d"] = 2, [0, 1]
    table.replace("engine-1", nodes.look(), nodes.reserve)
    assert table.placement_of("engine-1") == ProcessPlacement("d", ("0", "1"))


def test_roles_of_a_set_share_gpus_after_one_of_them_has_fewer_ranks() -> None:
    """The policy continues with three ranks, so that one number of the critic's has no rank beside it."""
    critics = [ProcessRequest(f"critic-{rank}", "critic", rank, 1, 1) for rank in range(4)]
    wanted = [*run(4), *critics]
    nodes = FakeNodes(a=2, b=2)
    table = settled(nodes, wanted, colocate=["policy", "critic"])
    table.set_ranks(["policy-0", "policy-1", "policy-2"], ["a", "b"])
    nodes.loses("b", table)
    nodes.gpus["c"], nodes.free["c"] = 2, [0, 1]
    table.replace("critic-3", nodes.look(), nodes.reserve)
    places = {each.name: table.placement_of(each.name) for each in wanted}
    assert places["policy-2"] == places["critic-2"] == ProcessPlacement("c", ("0",)), "rank beside rank"
    assert places["critic-3"] == ProcessPlacement("c", ("1",)) and places["policy-3"] is None


@pytest.mark.parametrize("lost", [["policy-3"], ["policy-2", "policy-3"], []])
def test_an_engine_shares_the_gpus_of_those_of_its_ranks_that_lost_theirs(lost: list[str]) -> None:
    wanted = [each for each in run(4, 2, 2) if each.name in lost or each.name == "engine-1"]
    (bundle,) = make_bundles(wanted, PlacementConfig(colocate="all"), complete=False)
    assert set(bundle.processes) == {*lost, "engine-1"}
    assert bundle.gpus == 2 and bundle.slots["engine-1"] == (0, 1)


def test_a_reason_to_wait_is_logged_once(told: Any) -> None:
    table = ReservationTable(run(1), PlacementConfig())
    for text in ("one", "one", "another", "one"):
        table.notify(text)
    assert told(logging.WARNING) == ["one", "another", "one"]


def test_reservations_round_trip() -> None:
    nodes, wanted = FakeNodes(a=4, b=4), run(8)
    first = settled(nodes, wanted)
    from dataclasses import asdict

    again = ReservationTable(wanted, PlacementConfig(), [Reservation.from_json(asdict(each)) for each in first.held])
    assert nodes_of(again, wanted) == nodes_of(first, wanted) and again.placement_of("policy-7") == first.placement_of(
        "policy-7"
    )
