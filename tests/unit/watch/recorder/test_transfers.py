"""Messages are tracked until they have completed; that the device has started them is known only if it is certain."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.watch.beacon.beacon_records import CommunicatorRecord
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon
from lockstep.watch.recorder.transfers import Message, TransferTracker

SEND, RECEIVE = Message(True, 1), Message(False, 1)


class Handle:
    """The handle of an operation on a device."""

    done = False

    def is_completed(self) -> bool:
        return self.done


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferTracker]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    yield new_tracker()
    close_beacon()


def new_tracker() -> TransferTracker:
    rings = open_beacon("run-1", "policy-0", "policy", 0).call_rings()
    assert rings is not None
    slot = rings.open_slot(11, 22, "0", "pipeline", "nccl", 2, 0, on_device=True)
    assert slot is not None
    return TransferTracker(slot, [0, 1], 0, blocks_host=False)


def issue(tracker: TransferTracker, *messages: Message) -> Handle:
    handle = Handle()
    tracker.returned(tracker.issue(messages, 0), [handle])
    return handle


def lane(sends: bool) -> CommunicatorRecord:
    state = read_beacon(current_beacon().path)
    assert state is not None
    return next(each for each in state.communicators if each.pair and (each.rank == 0) == sends)


def test_a_start_is_known_until_the_next_completion(tracker: TransferTracker) -> None:
    first, _ = issue(tracker, SEND), issue(tracker, SEND)
    assert (lane(True).entered, lane(True).completed, lane(True).started) == (2, 0, -1)
    tracker.update_starts({SEND: [True, False]}, tracker.counts())
    assert lane(True).started == 1
    first.done = True
    tracker.poll()
    assert (lane(True).completed, lane(True).started) == (1, -1)
    tracker.update_starts({SEND: [False]}, tracker.counts())
    assert lane(True).started == 1


def test_a_batch_starts_as_a_whole_and_each_direction_has_its_own_count(tracker: TransferTracker) -> None:
    issue(tracker, SEND).done = True
    issue(tracker, SEND, RECEIVE)
    tracker.poll()
    tracker.update_starts({SEND: [True], RECEIVE: [True]}, tracker.counts())
    assert [(lane(sends).completed, lane(sends).started) for sends in (True, False)] == [(1, 2), (0, 1)]


def test_a_state_that_does_not_fit_the_counts_is_left_out(tracker: TransferTracker) -> None:
    """An entry has been overwritten, or belongs to a message that was issued later or not through torch.distributed."""
    issue(tracker, SEND)
    for states in ([], [True, True]):
        tracker.update_starts({SEND: states, RECEIVE: [True]}, tracker.counts())
        assert lane(True).started == -1
    before = tracker.counts()
    issue(tracker, SEND)
    tracker.update_starts({SEND: [True, False]}, before)
    assert lane(True).started == -1


def test_only_late_messages_are_looked_up(tracker: TransferTracker) -> None:
    assert not tracker.waits_since(2**62)
    handle = issue(tracker, SEND)
    assert tracker.waits_since(2**62) and not tracker.waits_since(0)
    handle.done = True
    tracker.poll()
    assert not tracker.waits_since(2**62)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["issue", "start", "complete", "look"]), max_size=40))
def test_a_known_start_is_the_one_of_the_device(tmp_path_factory: pytest.TempPathFactory, events: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_BEACONS", str(tmp_path_factory.mktemp("lanes")))
        tracker, handles, started, completed = new_tracker(), [], 0, 0
        for event in events:
            if event == "issue":
                handles.append(issue(tracker, SEND))
            elif event == "start":
                started = min(started + 1, len(handles))
            elif event == "complete" and completed < started:
                handles[completed].done = True
                completed += 1
                tracker.poll()
            elif event == "look":
                states = [number < started for number in range(completed, len(handles))]
                tracker.update_starts({SEND: states}, tracker.counts())
            if handles:
                found = lane(True)
                assert (found.entered, found.completed) == (len(handles), completed)
                assert found.started == -1 or completed <= found.started <= started
        close_beacon()
