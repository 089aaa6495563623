"""Commands from the monitoring processes to the ranks."""

import pickle
import threading

import pytest

from lockstep.base.errors import CollectiveRefused, CollectiveStalled
from lockstep.watch.recorder import commands


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))


def test_commands_reach_their_ranks_once_and_in_order():
    own, other = commands.CommandInbox("run-1", "policy-0"), commands.CommandInbox("run-1", "policy-1")
    assert not own.watched and own.take() == []
    assert commands.send_command("run-1", "dump", ["policy-0"], folder="/x") == 1
    assert commands.send_command("run-1", "verdict", None, text="why", verdict={"kind": "dead"}) == 2
    found = own.take()
    assert [(each.number, each.op, each.body.get("folder")) for each in found] == [
        (1, "dump", "/x"),
        (2, "verdict", None),
    ]
    assert own.verdict is not None and own.verdict.body["verdict"] == {"kind": "dead"}
    assert [each.number for each in other.take()] == [2]
    assert own.take() == [] and own.watched


def test_commands_from_before_a_rank_started_are_ignored():
    commands.send_command("run-1", "verdict", None, text="of the previous process")
    late = commands.CommandInbox("run-1", "policy-0")
    assert late.take() == [] and late.verdict is None and late.watched


def test_incomplete_and_invalid_lines_are_ignored():
    inbox = commands.CommandInbox("run-1", "policy-0")
    path = commands.open_command_file("run-1")
    with path.open("a") as file:
        file.write('nonsense\n{"n": 1}\n[]\n{"n": 5, "op": "dump", "names": null, "wall": 1.0}\n{"n": 6, "op": "du')
    assert [each.number for each in inbox.take()] == [5]
    with path.open("a") as file:
        file.write('mp", "names": null, "wall": 1.0}\n')
    assert [each.number for each in inbox.take()] == [6]
    path.write_text("")
    assert inbox.take() == []
    with pytest.raises(ValueError, match="limit"):
        commands.send_command("run-1", "verdict", None, text="x" * commands.MAX_LINE_BYTES)


def test_many_processes_may_send_commands_at_once():
    inbox = commands.CommandInbox("run-1", "policy-0")
    threads = [
        threading.Thread(target=lambda: [commands.send_command("run-1", "dump", None) for _ in range(20)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [each.number for each in inbox.take()] == list(range(1, 81))


def test_errors_are_picklable():
    stalled = pickle.loads(pickle.dumps(CollectiveStalled("why", {"kind": "dead"}, "closed by peer")))
    assert (str(stalled), stalled.verdict, stalled.backend_message) == ("why", {"kind": "dead"}, "closed by peer")
    refused = pickle.loads(
        pickle.dumps(CollectiveRefused("fsdp", 3, "barrier at a.py:1", "all_reduce at a.py:2", 1, 0))
    )
    assert (refused.communicator, refused.number, refused.rank, refused.peer) == ("fsdp", 3, 1, 0)
    assert "rank 1 is about to enter barrier at a.py:1, but rank 0 has entered all_reduce at a.py:2" in str(refused)


def test_a_broken_connection_becomes_the_verdict():
    inbox = commands.CommandInbox("run-1", "policy-0")
    broken = RuntimeError("Connection closed by peer [127.0.0.1]:5")
    assert inbox.translate(broken) is broken  # not a watched run: no wait
    commands.send_command("run-1", "dump", None, folder="/x")
    commands.send_command("run-1", "verdict", None, text="rank 1 is dead", verdict={"kind": "dead"})
    again = RuntimeError("Connection closed by peer [127.0.0.1]:5")
    found = inbox.translate(again)
    assert isinstance(found, CollectiveStalled) and (str(found), found.verdict) == ("rank 1 is dead", {"kind": "dead"})
    assert found.backend_message == str(again) and inbox.translate(found) is found
    for other in (ValueError("closed"), RuntimeError("shape '[3]' is invalid")):
        assert inbox.translate(other) is other
    assert [each.op for each in inbox.take()] == ["dump", "verdict"]  # translate() leaves them in the inbox


def test_an_old_verdict_explains_nothing(monkeypatch):
    inbox = commands.CommandInbox("run-1", "policy-0")
    commands.send_command("run-1", "verdict", None, text="long ago")
    monkeypatch.setattr(commands, "VERDICT_MAX_AGE_S", -1.0)
    monkeypatch.setattr(commands, "VERDICT_WAIT_S", 0.05)
    broken = RuntimeError("Connection reset by peer")
    assert inbox.translate(broken) is broken


@pytest.mark.parametrize(
    "text",
    ["NCCL backend needs CUDA tensors", "peer rank 7 is not in the group", "cannot connect to the judge: no route",
     "Tensors for gloo must be dense", "the file is closed", "ncclInvalidUsage: the tensors differ"],
)  # fmt: skip
def test_errors_that_only_mention_a_backend_are_raised_at_once(text, monkeypatch):
    monkeypatch.setattr(commands.time, "sleep", lambda _: pytest.fail("waits for a verdict"))
    inbox = commands.CommandInbox("run-1", "policy-0")
    commands.send_command("run-1", "verdict", None, text="rank 1 is dead")
    error = RuntimeError(text)
    assert inbox.translate(error) is error


def test_a_verdict_on_an_incident_that_is_over_explains_nothing(monkeypatch):
    monkeypatch.setattr(commands, "VERDICT_WAIT_S", 0.05)
    inbox = commands.CommandInbox("run-1", "policy-0")
    commands.send_command("run-1", "verdict", None, text="rank 1 is late", freed=False)
    after = commands.time.time() + 1.0
    broken = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4242")
    assert inbox.translate(broken, recovered_at=after) is broken
    commands.send_command("run-1", "verdict", None, text="rank 1 is dead", freed=True)
    released = RuntimeError("NCCL communicator was aborted on rank 0.")
    assert str(inbox.translate(released, recovered_at=after)) == "rank 1 is dead"
