import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.base.wait_state import track_wait
from lockstep.watch.beacon.beacon_records import (
    COUNTER_STRUCT,
    COUNTERS_AT,
    FIXED_SIZE,
    MAX_COUNTERS,
    MAX_EVENTS,
    MAX_WAITS,
    VERSION,
    BeaconState,
)
from lockstep.watch.beacon.reader import other_versions, read_beacons
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon
from lockstep.watch.procfs import processes

WRITER = """
from lockstep.base.wait_state import track_wait
import itertools, sys, time
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon
from lockstep.base import waits
b = open_beacon(sys.argv[1], "writer", "policy", 1)
b.stage("train")
for n in itertools.count(1):
    b.progress("tokens", n, 10 * n)
    b.event("tick", str(n))
    with track_wait("collective", f"group {n}", f"why {n}", timeout_s=100):
        if n == 1:
            print("up", flush=True)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "beacons"))
    yield new_run_id("test run!")
    close_beacon()


@pytest.fixture
def writer(run: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, run], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def only(run: str) -> BeaconState:
    (state,) = read_beacons(run)
    return state


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
values = st.integers(-(2**62), 2**62)
totals = st.none() | st.integers(0, 2**62)


@settings(max_examples=40, deadline=None)
@given(
    stage=names,
    role=names,
    rank=st.integers(-1, 2**31 - 1),
    counters=st.dictionaries(names, st.tuples(values, totals), max_size=MAX_COUNTERS),
    events=st.lists(st.tuples(names, names), max_size=300),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    stage: str,
    role: str,
    rank: int,
    counters: dict[str, tuple[int, int | None]],
    events: list[tuple[str, str]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_BEACONS", str(tmp_path_factory.mktemp("beacons")))
        writing = open_beacon("r", "p-1", role[:8], rank)
        writing.stage(stage)
        for name, (value, total) in counters.items():
            writing.progress(name, value, total)
        for kind, text in events:
            writing.event(kind, text)
        state = only("r")
        close_beacon()
    assert (state.run, state.name, state.role, state.rank, state.stage) == ("r", "p-1", role[:8], rank, stage)
    assert {name: (c.value, c.total) for name, c in state.counters.items()} == counters
    assert [(e.kind, e.text) for e in state.events] == events[-MAX_EVENTS:]
    assert [e.number for e in state.events] == list(range(1, len(events) + 1))[-MAX_EVENTS:]
    assert state.progress_count == 1 + len(counters)
    assert (state.pid, state.start_ticks, state.torn) == (os.getpid(), processes.start_ticks(os.getpid()), 0)


def test_long_texts_are_cut_at_a_character(run: str) -> None:
    open_beacon(run, "me", "r" * 99, 0).stage("é" * 200)
    state = only(run)
    assert state.stage == "é" * 48
    assert state.role == "r" * 32


def test_moves_count_changes_only(run: str) -> None:
    own = open_beacon(run, "me", "policy", 0)
    for _ in range(3):
        own.progress("tokens", 5, 10)
    own.add("tokens", 2)
    own.add("tokens", 0)
    own.add("fresh")
    assert own.progress_count == only(run).progress_count == 3
    counters = only(run).counters
    assert (counters["tokens"].value, counters["tokens"].total, counters["fresh"].value) == (7, 10, 1)


def test_more_counters_than_fit_still_move(run: str) -> None:
    own = open_beacon(run, "me", "policy", 0)
    for i in range(MAX_COUNTERS + 5):
        own.progress(f"c{i}", 1)
    assert own.progress_count == MAX_COUNTERS + 5
    assert len(only(run).counters) == MAX_COUNTERS


def test_folder_and_file_are_private(run: str) -> None:
    own = open_beacon(run, "me", "policy", 0)
    assert stat.S_IMODE(own.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o600
    assert [path.name for path in own.path.parent.iterdir()] == ["me.beacon"]


@pytest.mark.parametrize("bad", ["", "..", "a/b", ".hidden", "x" * 80, "a b"])
def test_refuses_names_that_are_no_names(bad: str, run: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        run_shm_dir(bad)
    if len(bad) != 80:
        with pytest.raises(ValueError, match="expected"):
            open_beacon(run, bad, "policy", 0)


def test_run_ids_are_unique_names_of_folders(run: str) -> None:
    made = {new_run_id(name) for name in ["a b/c", "", "é", "x" * 200, "-", "a b/c"]}
    assert len(made) == 6
    for name in made:
        run_shm_dir(name)


def test_the_wait_for_another_process_is_ahead_of_sleeps_and_of_the_wait_for_work(run: str) -> None:
    """However long each has lasted."""
    began, end = threading.Barrier(4), threading.Event()

    def hold(kind: str, target: str, why: str) -> None:
        with track_wait(kind, target, why):
            began.wait(10)
            end.wait(10)

    held = [("sleep", "the clock", "the next status update"), ("condition", "controller", "the next call")]
    threads = [threading.Thread(target=hold, args=each) for each in (*held, ("read", "agent", "its answer"))]
    open_beacon(run, "policy-0", "policy", 0)
    for thread in threads:
        thread.start()
    began.wait(10)
    with track_wait("future", "reward-0", "scores"):
        shown = [wait.waits_for for wait in only(run).waits]
    with track_wait("sleep", "the clock", "a pause"):
        asleep = [wait.why for wait in only(run).waits]
    end.set()
    for thread in threads:
        thread.join(10)
    assert shown == ["reward-0", "agent", "controller", "the clock"]
    assert asleep == ["its answer", "the next call", "a pause", "the next status update"]


def test_waits_are_shown_innermost_per_thread(run: str) -> None:
    open_beacon(run, "me", "policy", 0)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with track_wait("queue.get", "reward-0", "scores", stall_s=5):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other, name="scorer")
    thread.start()
    inside.wait(10)
    with track_wait("call", "outer", "o", timeout_s=7), track_wait("collective", "inner", "i", timeout_s=9):
        shown = {w.thread_name: w for w in only(run).waits}
        assert set(shown) == {"scorer", "MainThread"}
        assert shown["MainThread"].waits_for == "inner"
        deadline = shown["MainThread"].deadline_ns
        assert deadline is not None
        assert deadline - shown["MainThread"].since_ns == 9_000_000_000
        own, others = (current_beacon().innermost_wait(id or 0) for id in (threading.get_native_id(), thread.native_id))
        assert own is not None and others is not None
        assert (own.waits_for, others.waits_for) == ("inner", "reward-0"), "without a look at the file"
        assert shown["scorer"].kind == "queue.get"
        assert shown["scorer"].thread == thread.native_id
    leave.set()
    thread.join(10)
    assert only(run).waits == () and current_beacon().innermost_wait(threading.get_native_id()) is None


def test_an_outer_wait_comes_back(run: str) -> None:
    open_beacon(run, "me", "policy", 0)
    with track_wait("call", "outer", "o", timeout_s=7):
        with track_wait("call", "inner", "i", timeout_s=7):
            pass
        assert [w.waits_for for w in only(run).waits] == ["outer"]


def test_more_threads_than_slots_wait_unseen_and_unharmed(run: str) -> None:
    open_beacon(run, "me", "policy", 0)
    go, here = threading.Event(), threading.Barrier(31)

    def one(i: int) -> None:
        with track_wait("event", f"w{i}", "y", timeout_s=9):
            here.wait(10)
            go.wait(10)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    here.wait(10)
    assert len(only(run).waits) == MAX_WAITS
    go.set()
    for thread in threads:
        thread.join(10)
    assert only(run).waits == ()
    with track_wait("event", "again", "y", timeout_s=9):
        assert len(only(run).waits) == 1


def test_a_forked_child_does_not_write_into_its_parents_beacon(run: str) -> None:
    open_beacon(run, "me", "policy", 0).stage("parent")
    with track_wait("call", "x", "y", timeout_s=9):
        child = os.fork()
        if child == 0:
            with track_wait("call", "child", "y", timeout_s=9):
                current_beacon().stage("child")
                os._exit(0)
        os.waitpid(child, 0)
        assert (only(run).stage, [w.waits_for for w in only(run).waits]) == ("parent", ["x"])


def consistent(state: BeaconState) -> None:
    counter = state.counters["tokens"]
    assert counter.total == 10 * counter.value
    for wait in state.waits:
        assert wait.waits_for.removeprefix("group ") == wait.why.removeprefix("why ")
        assert wait.deadline_ns == wait.since_ns + 100_000_000_000
    assert all(event.text == str(event.number) for event in state.events)


def test_readable_and_whole_while_the_writer_writes(run: str, writer: subprocess.Popen[str]) -> None:
    states = [only(run) for _ in range(300)]
    whole = [state for state in states if not state.torn]
    assert len(whole) >= 290  # the writer may lose its CPU in the middle of a record for longer than we wait
    for state in whole:
        consistent(state)
    seen = [state.counters["tokens"].value for state in whole]
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_readable_when_the_writer_is_stopped_or_dead(
    run: str, writer: subprocess.Popen[str], number: signal.Signals
) -> None:
    pid, start = only(run).pid, only(run).start_ticks
    for _ in range(20 if number == signal.SIGSTOP else 1):
        writer.send_signal(number)
        deadline = time.monotonic() + 10
        while processes.process_state(pid, start) not in ("T", "Z"):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        first, second = only(run), only(run)
        if not first.torn:
            consistent(first)
        assert first == second
        assert (first.role, first.stage) == ("policy", "train")
        assert first.torn <= 1  # the record it was writing
        assert processes.is_alive(pid, start) == (number == signal.SIGSTOP)
        if number == signal.SIGSTOP:
            writer.send_signal(signal.SIGCONT)
            time.sleep(0.01)


def test_a_record_torn_for_good_is_left_out_and_counted(run: str) -> None:
    own = open_beacon(run, "me", "policy", 0)
    own.stage("train")
    own.progress("a", 1)
    own.progress("b", 2)
    with own.path.open("r+b") as file:  # as if the writer had died before it wrote the number at the end
        file.seek(COUNTERS_AT + COUNTER_STRUCT.size - 8)
        file.write(bytes(8))
    state = only(run)
    assert (set(state.counters), state.stage, state.torn) == ({"b"}, "train", 1)


@settings(max_examples=60, deadline=None)
@given(garbage=st.binary(max_size=600), at=st.integers(0, FIXED_SIZE))
def test_garbage_is_tolerated(tmp_path_factory: pytest.TempPathFactory, garbage: bytes, at: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_BEACONS", str(tmp_path_factory.mktemp("beacons")))
        own = open_beacon("r", "me", "policy", 0)
        own.stage("train")
        own.progress("a", 1)
        folder = own.path.parent
        (folder / "junk.beacon").write_bytes(garbage)
        (folder / "dir.beacon").mkdir()
        os.mkfifo(folder / "fifo.beacon")
        (folder / "link.beacon").symlink_to(folder / "nowhere")
        with own.path.open("r+b") as file:
            file.seek(at)
            file.write(garbage[: FIXED_SIZE - at])
        assert len(read_beacons("r")) <= 2
        close_beacon()
        with own.path.open("r+b") as file:
            file.truncate(at)
        read_beacons("r")


def test_a_run_that_was_never_started_has_no_beacons(run: str) -> None:
    assert read_beacons(run) == []


def test_reopening_replaces_the_file_and_closing_keeps_it_as_evidence(run: str) -> None:
    open_beacon(run, "me", "policy", 0).stage("old")
    own = open_beacon(run, "me", "policy", 0)
    assert only(run).stage == ""
    own.stage("new")
    close_beacon()
    own.stage("after the end")
    current_beacon().add("nothing")
    assert only(run).stage == "new"
    open_beacon(run, "me", "policy", 0)
    close_beacon(remove=True)
    assert read_beacons(run) == []


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_beacon_of_another_version_is_left_out(run: str, version: int) -> None:
    beacon = open_beacon(run, "policy-0", "policy", 0)
    assert [each.name for each in read_beacons(run)] == ["policy-0"]
    with beacon.path.open("r+b") as file:
        file.seek(8)
        file.write(version.to_bytes(4, "little"))
    assert read_beacons(run) == [] and other_versions(run) == {version}
