"""What the recorder reads from NCCL's flight recorder about messages."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.recorder.c10d_status import C10dStatusReader, FlightRecorder, unfinished_messages
from lockstep.watch.recorder.communicator import CommunicatorMember
from lockstep.watch.recorder.transfers import Message

sys.path.insert(0, str(Path(__file__).parents[1] / "dumps"))

from cluster_dumps import Recorder, dump_bytes
from cluster_simulator import Cluster, Group, faulty_cluster


def in_simulation(cluster: Cluster, rank: int, group: Group) -> dict[Message, list[bool]]:
    """Whether the device of a rank runs each of its unfinished messages on a communicator."""
    found: defaultdict[Message, list[bool]] = defaultdict(list)
    for operation in cluster.issued[rank]:
        if operation.group is group and not operation.ended:
            for source, target in operation.transfers:
                sends = source == rank
                found[Message(sends, group.ranks.index(target if sends else source))].append(operation.running)
    return dict(found)


@pytest.mark.parametrize("seed", range(8))
def test_the_states_of_messages_are_those_of_the_device(seed: int) -> None:
    cluster = faulty_cluster(seed, ("host", "device"), 1)
    messages = 0
    for rank in range(cluster.world):
        dump = dump_bytes(cluster, rank, Recorder(ring=10**6, timing=True, json=True))
        flight = FlightRecorder("nccl", lambda dump=dump, **_: dump)
        for number, group in enumerate(cluster.groups_of(rank)):
            expected = in_simulation(cluster, rank, group)
            assert unfinished_messages(flight.operations(str(number))) == expected
            messages += len(expected)
    assert messages or cluster.pipeline == 1


def entry(name: str, state: str, collective: int, message: int, p2p: bool = True) -> dict[str, object]:
    return {"pg_id": 0, "profiling_name": f"nccl:{name}", "state": state, "collective_seq_id": collective,
            "p2p_seq_id": message, "is_p2p": p2p}  # fmt: skip


@pytest.mark.parametrize("p2p", [True, False])
def test_the_messages_of_a_batch_have_the_state_of_the_entry_after_them(p2p: bool) -> None:
    """Some versions of torch record that entry as a point-to-point operation."""
    entries = []
    for number, state in enumerate(("completed", "started", "scheduled"), 1):
        entries += [entry(name, "scheduled", number, number) for name in ("send 0->1", "recv 0<-2")]
        entries.append(entry("coalesced", state, number, number, p2p))
    entries.append(entry("send 0->1", "scheduled", 4, 4))  # of a batch that is being issued
    found = unfinished_messages(entries)
    assert found == {Message(True, 1): [True, False, False], Message(False, 2): [True, False]}


def test_an_old_torch_dumps_all_entries() -> None:
    def dump(includeCollectives: bool) -> str:  # noqa: N803 - torch's name
        return json.dumps({"entries": [entry("send 0->1", "completed", 0, 1), entry("send 0->1", "started", 0, 2)]})

    operations = FlightRecorder("nccl", dump).operations("0", only_active=True)
    assert unfinished_messages(operations) == {Message(True, 1): [True]}


class Nccl:
    """NCCL's flight recorder and the sequence numbers of communicators, which all have the name 0."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def _dump_nccl_trace_json(self, includeCollectives: bool, onlyActive: bool = False) -> str:  # noqa: N803
        status = {
            number: {"last_enqueued_collective": count, "last_completed_collective": count}
            for number, count in self.counts.items()
        }
        entries = [{"pg_id": int(number), "process_group": ["0", "default_pg"]} for number in self.counts]
        return json.dumps({"pg_status": status, "entries": entries if includeCollectives else []})

    def group(self, number: str) -> SimpleNamespace:
        return SimpleNamespace(_get_sequence_number_for_group=lambda: self.counts.get(number, 0))


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("polled", [False, True])
def test_a_new_communicator_has_no_counts_of_a_destroyed_one_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: bool, polled: bool
) -> None:
    """Also if the old one was destroyed before its number was known. NCCL's recorder keeps its counts."""
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    beacon, nccl = open_beacon("run-1", "policy-0", "policy", 0), Nccl()
    rings, reader = beacon.call_rings(), C10dStatusReader(nccl)
    assert rings is not None

    def member(number: str) -> CommunicatorMember:
        slot = rings.open_slot(int(number), 2, "0", "default_pg", "nccl", 2, 0, on_device=True)
        return CommunicatorMember(nccl.group(number), slot, "0", "default_pg", [0, 1], 0)

    old = member("0")
    if used:
        nccl.counts["0"] = 7
    if polled:
        reader.update([old])
    reader.forget(old)
    new = member("1")
    reader.update([new])
    assert max(new.written_counts[:2]) <= 0  # its own number is 0
    nccl.counts["1"] = 2
    reader.update([new])
    state = read_beacon(beacon.path)
    assert state is not None
    assert [(each.entered, each.completed) for each in state.communicators[1:]] == [(2, 2)]
    close_beacon()


def test_a_communicator_with_unrecorded_calls_only_leaves_its_name_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c10d's sequence number counts `monitored_barrier`, which its flight recorder does not record."""
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    beacon, nccl = open_beacon("run-1", "policy-0", "policy", 0), Nccl()
    rings, reader = beacon.call_rings(), C10dStatusReader(nccl)
    assert rings is not None
    members = []
    for number, sequence in ((0, lambda: 1), (1, lambda: 2)):
        slot = rings.open_slot(number, 2, "0", "default_pg", "nccl", 2, 0, on_device=True)
        group = SimpleNamespace(_get_sequence_number_for_group=sequence)
        members.append(CommunicatorMember(group, slot, "0", "default_pg", [0, 1], 0))
    old, new = members
    old.offsets.begin(0)
    old.offsets.skip(1, 1)
    reader.forget(old)
    nccl.counts["0"] = 2  # the first communicator of which there is an entry
    reader.update([new])
    assert new.written_counts[:2] == (2, 2)
    close_beacon()
