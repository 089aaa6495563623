"""The recorder with real ranks: it records what they do, and the record survives them. What it promises for every
backend is tested on gloo, whose calls block the host, and on the emulation of NCCL, whose calls return when they are
enqueued."""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.base.folders import run_shm_dir
from lockstep.watch.beacon.beacon_records import CallRecord
from lockstep.watch.beacon.reader import read_beacon, read_calls
from lockstep.watch.procfs import processes
from lockstep.watch.recorder import abort, commands
from lockstep.watch.recorder.abort import release_ranks
from tests.faults import recorded_ranks
from tests.faults.ranks import BACKENDS, BOUND_S, RUN, ranks, run_ranks, watched

NCCL = BACKENDS[1]
TIMING = {"TORCH_NCCL_ENABLE_TIMING": "1"}
both_backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def beacons(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "beacons"))


def calls(rank: int, slot: int = 0) -> list[CallRecord]:
    return list(read_calls(run_shm_dir(RUN) / f"policy-{rank}.beacon", slot))


def waits_for_a_message(found) -> bool:
    """Whether the rank of `receiving` has completed its collectives and issued its receive."""
    return "default_pg 0->1" in found and found["default_pg 0->1"].entered == 1 and found["default_pg"].completed == 3


def good(outcomes):
    assert [(each.error, each.text) for each in outcomes] == [("", "")] * len(outcomes)
    return [each.value for each in outcomes]


BACKEND_OF = {"gloo": ("cpu:gloo,cuda:gloo", False), NCCL: (f"cpu:{NCCL}", True)}
"""c10d's backends of a communicator, and whether its operations run on a device."""
GLOO_ONLY = ("monitored_barrier", "", None)
WORLD = [
    ("all_reduce", "[4]", None), ("broadcast", "[4]", 1), ("barrier", "", None), GLOO_ONLY,
    ("all_gather_object", "", None), ("broadcast_object_list", "", 0), ("gather_object", "", 0),
    ("all_gather", "[4], [4]", None), ("all_gather_into_tensor", "[4]", None), ("reduce_scatter_tensor", "[8]", None),
    ("gather", "[4]", 1), ("scatter", "[4]", 0), ("all_to_all_single", "", None), ("all_reduce", "[4]", None),
]  # fmt: skip


@both_backends
def test_calls_and_counts_are_what_the_ranks_did(tmp_path, backend):
    with ranks(tmp_path, recorded_ranks.everything, backend=backend) as both:
        values = good(both.end())
        assert [value["troubles"] for value in values] == [0, 0]
        states = [both.communicators(rank) for rank in (0, 1)]
    expected = [each for each in WORLD if backend == "gloo" or each is not GLOO_ONLY]
    for rank, state in enumerate(states):
        world, second = state["default_pg"], state["second"]
        collectives = [call for call in calls(rank) if not call.p2p]
        assert [(call.operation, call.shapes, call.root) for call in collectives] == expected
        assert [call.issued for call in collectives] == list(range(1, len(expected) + 1))
        assert all(call.where.startswith("recorded_ranks.py:") and call.stage == "train" for call in collectives)
        # two messages per object collective, three for gather_object's sizes and payload; no point-to-point call
        assert world.entered == world.completed == collectives[-1].seq
        assert (world.rank, world.size) == (rank, 2)
        assert (world.backend, world.on_device) == BACKEND_OF[backend]
        assert world.blind == (rank == 1 and backend == "gloo")  # it has received from any source
        assert [(c.operation, c.dtype, c.root) for c in calls(rank, second.slot)] == [
            ("reduce", "float32", 0), ("all_reduce", "float64", None),
        ]  # fmt: skip
        assert (second.entered, second.completed, second.blind, second.inside) == (2, 2, False, None)
        # 0, not unknown: otherwise a rank that stops might wait in it, and is never confirmed
        assert (state["unused"].entered, state["unused"].completed) == (0, 0)
    passed = [[(call.operation, call.peer) for call in calls(rank) if call.p2p] for rank in (0, 1)]
    batch, sender = ("batch_isend_irecv", None), 0 if backend == NCCL else None
    assert passed == [[("send", 1), ("isend", 1), batch], [("recv", 0), ("irecv", sender), batch]]
    for pair, rank, messages in (("0->1", 0, 3), ("0->1", 1, 3), ("1->0", 0, 1), ("1->0", 1, 1)):
        lane = states[rank][f"default_pg {pair}"]
        known = messages if backend == NCCL or rank == 0 or pair == "1->0" else messages - 1
        assert (lane.entered, lane.completed) == (known, known)
    for label in ("default_pg", "second"):
        mine, theirs = (state[label] for state in states)
        assert (mine.identity, mine.members, mine.issued) == (theirs.identity, theirs.members, theirs.issued)
        # sequence numbers agree although point-to-point calls move c10d's own differently
        assert (mine.entered, mine.completed) == (theirs.entered, theirs.completed)
        assert [(c.seq, c.signature) for c in calls(0, mine.slot) if not c.p2p] == [
            (c.seq, c.signature) for c in calls(1, theirs.slot) if not c.p2p
        ]


@pytest.mark.parametrize(
    ("body", "backend"),
    [(recorded_ranks.fsdp, "gloo")] + [
        pytest.param(body, backend, marks=pytest.mark.slow)
        for body, backend in [
            (recorded_ranks.ddp, "gloo"), (recorded_ranks.tensor_parallel, "gloo"), (recorded_ranks.ddp, NCCL),
            (recorded_ranks.fsdp, NCCL), (recorded_ranks.tensor_parallel, NCCL),
        ]
    ],
)  # fmt: skip
def test_counts_include_collectives_of_libraries(tmp_path, body, backend):
    with ranks(tmp_path, body, backend=backend, environment={"TORCH_NCCL_BLOCKING_WAIT": "1"}) as both:
        sequences = good(both.end())
        states = [both.communicators(rank) for rank in (0, 1)]
    for state, sequence in zip(states, sequences, strict=True):
        counted = max(state.values(), key=lambda each: each.entered)
        assert counted.counted and counted.entered == counted.completed == sequence
        noted = sum(not call.p2p for call in calls(counted.rank, counted.slot))
        modules = {
            call.module for call in calls(counted.rank, counted.slot) if call.operation == "reduce_scatter_tensor"
        }
        assert modules == ({"0", "1"} if body is recorded_ranks.fsdp else set())
        assert noted == {"ddp": 1, "fsdp": sequence, "tensor_parallel": sequence}[body.__name__]


@pytest.mark.slow
def test_a_collective_in_a_compiled_graph_is_left_to_the_compiler(tmp_path):
    assert good(run_ranks(tmp_path, recorded_ranks.compiled)) == [[5.0, 5.0, 5.0]] * 2


REFUSED = {
    "skip": ("broadcast [4] float32 root 0", "all_reduce [4] float32"),
    "extra": ("all_reduce [4] float32", "all_reduce [4] float32"),
    "operation": ("barrier", "all_reduce [4] float32"),
    "shape": ("all_reduce [400] float32", "all_reduce [4] float32"),
    "dtype": ("all_reduce [4] float64", "all_reduce [4] float32"),
}


@both_backends
@pytest.mark.parametrize("how", REFUSED)
def test_a_mismatched_call_is_refused_on_the_later_rank(tmp_path, how, backend):
    (tmp_path / "how").write_text(how)
    mine, theirs = REFUSED[how]
    with ranks(tmp_path, recorded_ranks.diverging, backend=backend) as both:
        if backend == NCCL:  # it is ahead of its device, by a call that the other has not refused
            both.until(0, lambda found: "fsdp" in found and found["fsdp"].entered == 4)
        both.until_inside(0, "all_reduce", "fsdp", 3)
        both.go()
        late = both.end_of(1)
        assert (late.error, late.exit_code) == ("CollectiveRefused", 0)
        assert late.text.startswith(
            f"collective #3 on 'fsdp' does not match: rank 1 is about to enter {mine} at recorded_ranks.py:"
        )
        assert f"but rank 0 has entered {theirs} at recorded_ranks.py:" in late.text
        state = both.communicators(1)["fsdp"]
        assert state.newest.refused and state.issued in (2, 3) and state.entered == 2
        if backend == "gloo":
            first = both.end_of(0)
            assert first.error == "RuntimeError" and "onnection" in first.text  # an error, and no abort
        else:  # which does not notice the other's end
            state = both.communicators(0)["fsdp"]
            assert (state.entered, state.completed) == (4, 2)


@both_backends
def test_another_root_is_refused(tmp_path, backend):
    with ranks(tmp_path, recorded_ranks.other_root, backend=backend) as both:
        both.until_inside(0, "broadcast")
        both.go()
        assert both.end_of(1).error == "CollectiveRefused"


@both_backends
def test_matching_calls_are_never_refused(tmp_path, backend):
    assert good(run_ranks(tmp_path, recorded_ranks.in_step, 3, backend)) == [0, 0, 0]


@both_backends
def test_a_receive_that_blocks_is_no_collective(tmp_path, backend):
    """Its communicator would look as if this rank had entered a collective that the other has not."""
    with ranks(tmp_path, recorded_ranks.receiving, backend=backend) as both:
        both.until(1, waits_for_a_message)
        ends = time.monotonic() + 0.5
        while time.monotonic() < ends:
            state = both.communicators(1)["default_pg"]
            assert state.entered <= 3 and state.completed <= 3 and not state.blind
        both.go()
        assert good(both.end()) == [None, None]
        for state in (both.communicators(rank)["default_pg"] for rank in (0, 1)):
            assert (state.entered, state.completed, state.blind) == (4, 4, False)


def test_a_deadlock_on_two_communicators_is_visible_on_both(tmp_path):
    with ranks(tmp_path, recorded_ranks.crossed) as both:
        for rank, label in ((0, "one"), (1, "two")):
            state = both.until_inside(rank, "all_reduce", label)
            assert (state.entered, state.inside.seq) == (1, 1)
        for rank, label in ((0, "two"), (1, "one")):
            assert both.until(rank, lambda found, label=label: label in found)[label].entered in (-1, 0)


def test_a_deadlock_on_devices_is_visible_by_what_they_have_started(tmp_path):
    """Both hosts have issued both collectives; each device has started the other one."""
    with ranks(tmp_path, recorded_ranks.crossed, backend=NCCL, environment=TIMING) as both:
        for rank, started in ((0, {"one": 1, "two": 0}), (1, {"one": 0, "two": 1})):
            found = both.until(
                rank, lambda found, first=started: all(
                    label in found and found[label].started == count for label, count in first.items()
                )
            )  # fmt: skip
            for label in started:
                assert (found[label].entered, found[label].completed) == (1, 0)
                assert (found[label].inside.seq, found[label].inside.asynchronous) == (1, True)


@both_backends
@pytest.mark.parametrize("how", ["kill", "stop", "gil"])
def test_evidence_outlives_the_rank(tmp_path, how, backend):
    (tmp_path / "how").write_text(how)
    with ranks(tmp_path, recorded_ranks.stuck, backend=backend) as both:
        both.until_inside(0, "all_reduce", number=3)
        wait_for(tmp_path / "absent")
        if how != "gil":
            os.kill(both.pid(1), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            wait_until(lambda: processes.process_state(both.pid(1)) in ("Z", None, "T"))
        absent = both.communicators(1)["default_pg"]
        assert (absent.entered, absent.completed, absent.inside) == (2, 2, None)
        assert [call.operation for call in calls(1)] == ["all_reduce"] * 2
        waiting = both.until_inside(0, "all_reduce", number=3) if how != "kill" else both.communicators(0)["default_pg"]
        assert (waiting.entered, waiting.newest.issued) == (3, 3)
        if how != "kill":
            then = read_beacon(both.path(1)).beat_ns
            now = read_beacon(both.path(0)).beat_ns
            wait_until(lambda: read_beacon(both.path(0)).beat_ns > now + 10**9)
            assert read_beacon(both.path(1)).beat_ns - then < 10**9  # frozen: no heartbeat


@both_backends
@pytest.mark.parametrize("way", ["outside", "inside"])
def test_innocent_ranks_get_the_verdict_within_a_second(tmp_path, way, backend):
    (tmp_path / "how").write_text("absent")
    watched()
    with ranks(tmp_path, recorded_ranks.stuck, 3, backend) as three:
        threads = [three.until_inside(rank, "all_reduce", number=3).loop_thread for rank in (0, 1)]
        assert all(threads)
        names = ["policy-0", "policy-1"]
        began = time.monotonic()
        text = "rank 2 has not entered all_reduce #3"
        if way == "outside":
            states = [read_beacon(three.path(rank)) for rank in (0, 1)]
            broken = release_ranks(RUN, states, text, {"kind": "absent"})
            assert set(broken) == set(names) and min(broken.values()) >= 1
        else:
            commands.send_command(RUN, "verdict", names, text=text, verdict={"kind": "absent"}, freed=True)
            commands.send_command(RUN, "free", names, communicator="default_pg")
        for rank in (0, 1):
            outcome = three.end_of(rank)
            assert (outcome.error, outcome.text) == ("CollectiveStalled", text)
            assert float((tmp_path / f"freed-{rank}").read_text()) - began < 1.0
        released = three.communicators(0)["default_pg"]
        assert (released.newest.failed, released.completed) == (backend == "gloo", 2)
        three.go()


@both_backends
def test_a_rank_that_waits_for_a_message_is_released(tmp_path, backend):
    watched()
    with ranks(tmp_path, recorded_ranks.receiving, backend=backend) as both:
        both.until(1, waits_for_a_message)
        release_ranks(RUN, [read_beacon(both.path(1))], "rank 0 has not sent")
        outcome = both.end_of(1)
        assert (outcome.error, outcome.text) == ("CollectiveStalled", "rank 0 has not sent")
        both.go()


def test_a_stopped_rank_is_released_from_outside(tmp_path):
    (tmp_path / "how").write_text("absent")
    watched()
    with ranks(tmp_path, recorded_ranks.stuck) as both:
        thread = both.until_inside(0, "all_reduce", number=3).loop_thread
        os.kill(both.pid(0), signal.SIGSTOP)
        wait_until(lambda: processes.process_state(both.pid(0)) == "T")
        commands.send_command(RUN, "verdict", ["policy-0"], text="why")
        assert abort.abort_gloo(both.pid(0), [thread]) >= 1
        os.kill(both.pid(0), signal.SIGCONT)
        assert both.end_of(0).error == "CollectiveStalled"


def test_the_verdict_is_awaited_and_replaces_the_backends_message(tmp_path):
    watched()
    with ranks(tmp_path, recorded_ranks.waits_on_work) as both:
        both.until(0, lambda found: found["default_pg"].inside)
        os.kill(both.pid(1), signal.SIGKILL)
        commands.send_command(RUN, "verdict", None, text="rank 1 was killed")
        outcome = both.end_of(0)
        assert (outcome.error, outcome.text) == ("CollectiveStalled", "rank 1 was killed")


def test_without_a_supervisor_errors_are_unchanged(tmp_path):
    with ranks(tmp_path, recorded_ranks.waits_on_work) as both:
        both.until(0, lambda found: found["default_pg"].inside)
        os.kill(both.pid(1), signal.SIGKILL)
        began = time.monotonic()
        outcome = both.end_of(0)
        assert outcome.error == "RuntimeError" and "onnection" in outcome.text
        assert time.monotonic() - began < 10


def test_keepalive_is_set_on_the_sockets(tmp_path):
    for options in good(run_ranks(tmp_path, recorded_ranks.hardened)):
        assert options and all(each == [1, 5000] for each in options)


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nsenter")), reason="needs network namespaces"
)
def test_a_dead_link_is_noticed_long_before_the_timeout(tmp_path):
    """Two ranks in network namespaces; the switch between them stops forwarding without an error."""
    with ranks(tmp_path, recorded_ranks.in_a_namespace) as both, switch() as middle:
        for rank in (0, 1):
            wait_for(tmp_path / f"apart-{rank}")
            pid = both.pid(rank)
            inside(middle, f"ip link add p{rank} type veth peer name eth0 netns {pid}")
            inside(middle, f"ip link set p{rank} master br0 up")
            inside(pid, f"ip addr add 10.77.0.{rank + 1}/24 dev eth0")
            inside(pid, "ip link set lo up")
            inside(pid, "ip link set eth0 up")
        (tmp_path / "connected").touch()
        wait_for(tmp_path / "met-1")
        both.until_inside(0, "all_reduce", number=2)
        inside(middle, "ip link set p1 nomaster")
        began = time.monotonic()
        outcome = both.end_of(0)
        assert outcome.error == "RuntimeError" and "onnection" in outcome.text
        assert time.monotonic() - began < 20  # five seconds by the kernel's clock; the collective's bound is sixty


@both_backends
def test_a_failure_of_the_recorder_does_not_fail_the_job(tmp_path, backend):
    for value in good(run_ranks(tmp_path, recorded_ranks.failing_recorder, backend=backend)):
        assert value["sum"] == 8.0 and value["troubles"] >= 3


@both_backends
def test_a_forked_child_does_not_write_for_its_parent(tmp_path, backend):
    for value in good(run_ranks(tmp_path, recorded_ranks.with_child, backend=backend)):
        assert value == {"child": 0, "calls": ["all_reduce", "all_reduce"]}


@both_backends
def test_communicators_of_one_name_are_distinguished(tmp_path, backend):
    values = good(run_ranks(tmp_path, recorded_ranks.again, backend=backend))
    assert values[0] == values[1]
    (old, new), loops = values[0]
    assert loops == 1  # the destroyed communicator is not referenced
    assert (old[:2], new[:2]) == ([True, 1], [False, 2]) and old[2] != new[2]


@pytest.mark.parametrize(
    ("backend", "file", "operation", "last"),
    [("gloo", "policy-0.json", "gloo:all_reduce", "scheduled"),
     (NCCL, "policy-0-nccl.json", "nccl:allreduce", "started")],
)  # fmt: skip
def test_a_dump_is_written_on_request(tmp_path, backend, file, operation, last):
    (tmp_path / "how").write_text("absent")
    folder = tmp_path / "dumps"
    folder.mkdir()
    with ranks(tmp_path, recorded_ranks.stuck, backend=backend, environment=TIMING) as both:
        both.until_inside(0, "all_reduce", number=3)
        commands.send_command(RUN, "dump", ["policy-0"], folder=str(folder))
        wait_for(folder / file)
        entries = json.loads((folder / file).read_text())["entries"]
        assert [entry["profiling_name"] for entry in entries] == [operation] * 3
        assert [entry["retired"] for entry in entries] == [True, True, False]
        assert entries[-1]["state"] == last
        assert not (folder / "policy-1.json").exists()
        both.go()


@contextmanager
def switch():
    """The pid of a process whose network namespace holds a bridge."""
    holder = subprocess.Popen(["unshare", "-n", "sleep", "300"])
    try:
        own = Path("/proc/self/ns/net").readlink()
        wait_until(lambda: Path(f"/proc/{holder.pid}/ns/net").readlink() != own)
        inside(holder.pid, "ip link add br0 type bridge")
        inside(holder.pid, "ip link set br0 up")
        yield holder.pid
    finally:
        holder.kill()
        holder.wait(BOUND_S)


def inside(pid: int, command: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", *command.split()], check=True, timeout=BOUND_S)


def wait_for(path: Path) -> None:
    wait_until(path.exists)


def wait_until(check) -> None:
    end = time.monotonic() + BOUND_S
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)
