"""Which nodes share a call relay: each has one group, small enough, whatever comes and goes beside it."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lockstep.cluster.relay_groups import WORKERS_PER_RELAY, RelayGroup, RelayGroups


class Growing(RuleBasedStateMachine):
    """A run that gains and loses nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: RelayGroups[int] = RelayGroups()
        self.of: dict[int, RelayGroup[int]] = {}
        self.shared: dict[int, bool] = {}
        self.names = iter(range(1 << 30))

    @rule(workers=st.integers(0, 70), shared=st.booleans())
    def add(self, workers: int, shared: bool) -> None:
        node = next(self.names)
        room = [each for each in set(self.of.values()) if each.has_room(max(1, workers))]
        group = self.groups.place(node, workers, shared)
        self.of[node], self.shared[node] = group, shared
        assert (group in room) == (shared and bool(room)), "a group that has room is filled before another one begins"

    @rule(data=st.data())
    def place_again(self, data: Any) -> None:
        if self.of:
            node = data.draw(st.sampled_from(sorted(self.of)))
            assert self.groups.place(node, data.draw(st.integers(0, 70)), data.draw(st.booleans())) is self.of[node]

    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        if self.of:
            node = data.draw(st.sampled_from(sorted(self.of)))
            group = self.of.pop(node)
            self.groups.remove(node)
            self.groups.remove(node)
            assert node not in group.nodes and node not in self.groups

    @invariant()
    def each_node_is_in_its_group_only(self) -> None:
        for node, group in self.of.items():
            assert self.groups[node] is group
            assert [each for each in set(self.of.values()) if node in each.nodes] == [group]

    @invariant()
    def groups_are_small(self) -> None:
        for group in self.of.values():
            assert len(group.nodes) == 1 or sum(group.workers.values()) <= WORKERS_PER_RELAY
            assert all(self.shared[node] for node in group.nodes) if group.shared else len(group.nodes) == 1


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_nodes_of_eight_workers_share_relays_four_by_four_in_their_order() -> None:
    groups: RelayGroups[int] = RelayGroups()
    for node in range(640):
        groups.place(node, 8, True)
    assert [groups[node].nodes for node in range(0, 640, 4)] == [list(range(at, at + 4)) for at in range(0, 640, 4)]
    assert len({id(groups[node].calls) for node in range(640)}) == 160
