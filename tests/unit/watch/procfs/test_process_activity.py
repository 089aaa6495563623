"""What counts as activity, observed from outside, and what does not, however loaded the machine is."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import pytest

from lockstep.watch.procfs import process_activity, processes
from lockstep.watch.procfs.process_activity import DISK_WAIT_SAMPLES, RUNNABLE_SAMPLES, HostCounters, ProcessActivity

EVERY_S = 0.1
BOUND_S = 30.0
POLLS = "import threading, time; threading.Thread(target=lambda: [time.sleep(0.1) for _ in range(9999)]).start();"


@contextmanager
def running(code: str, *words: str, **options: object) -> Iterator["subprocess.Popen[str]"]:
    """Starts Python with this code, and waits until it runs."""
    argv = [sys.executable, "-c", "print('up', flush=True)\n" + code, *words]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    try:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        yield child
    finally:
        child.kill()
        child.wait()


def samples(pid: int, count: int) -> Iterator[bool]:
    """The results of several samples, without the first, which has nothing to compare with."""
    activity, host = ProcessActivity(pid), HostCounters()
    for number in range(count + 1):
        usage, now = processes.process_usage(pid, with_bytes=True), time.monotonic_ns()
        assert usage is not None
        host.begin_sample(now)
        active = activity.sample(usage, now, host)
        if number:
            yield active
        time.sleep(EVERY_S)


def ever_active(pid: int, settle: int = 3) -> bool:
    """Whether the process is active in a sample after the first few; samples up to `BOUND_S`."""
    end = time.monotonic() + BOUND_S
    while time.monotonic() < end:
        if any(islice(samples(pid, settle + 2 * RUNNABLE_SAMPLES), settle, None)):
            return True
    return False


WORK: dict[str, str] = {
    "computes": "while True: pass",
    "in a thread": "import threading; t = threading.Thread(target=lambda: [sum(range(99999)) for _ in iter(int, 1)]);"
    "t.start(); t.join()",
    "in a child": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "in children that end": "import subprocess, time\n"
    "while True: subprocess.run(['/bin/sh', '-c', 'for i in 1 2 3 4 5 6 7 8; do /bin/true; done'])",
    "reads": "import time; f = open('/dev/zero', 'rb', 0)\nwhile True: f.read(65536); time.sleep(0.1)",
    "a child reads": "import subprocess, sys; subprocess.run([sys.executable, '-c', \"import time\\n"
    "f = open('/dev/zero', 'rb', 0)\\nwhile True: f.read(65536); time.sleep(0.1)\"])",
}


@pytest.mark.parametrize("kind", WORK)
def test_work_is_activity(kind: str) -> None:
    with running(f"import os; os.setpgid(0, 0)\n{WORK[kind]}") as child:
        try:
            assert ever_active(child.pid)
        finally:
            os.killpg(child.pid, 9)


BEGUN = "print('begun', flush=True)\n"
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
ALLOCATES = "import mmap\nwhile True: mmap.mmap(-1, 1 << 20).write(bytes(1 << 20))"
LOOPS = {
    "computes": (f"{BEGUN}while True: pass", False),
    "matches": (f"{BEGUN}import re; re.match('(a+)+$', 'a' * 60 + 'b')", False),
    "a child computes": (CHILD.format(f"{BEGUN}while True: pass"), False),
    "allocates": (BEGUN + ALLOCATES, True),
    "a child allocates": (CHILD.format(BEGUN + ALLOCATES), True),
    "children end": (BEGUN + WORK["in children that end"], True),
    "reads": (BEGUN + WORK["reads"], True),
    "a child reads": (CHILD.format(BEGUN + WORK["reads"]), True),
    "sleeps": (f"{BEGUN}import time; time.sleep(600)", False),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_only_work_that_transfers_data_or_touches_new_memory_moves(kind: str) -> None:
    code, moves = LOOPS[kind]
    with running(f"import os; os.setpgid(0, 0)\n{code}") as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "begun\n", "the interpreter has started"
            activity, host, found = ProcessActivity(child.pid), HostCounters(), list[bool]()
            while len(found) < 10 and not (moves and any(found[2:])):
                usage, now = processes.process_usage(child.pid, with_bytes=True), time.monotonic_ns()
                assert usage is not None
                host.begin_sample(now)
                activity.sample(usage, now, host)
                found.append(activity.moves)
                time.sleep(0.3)
        finally:
            os.killpg(child.pid, 9)
    assert any(found[2:]) is moves, found


def test_receiving_a_streamed_answer_is_activity() -> None:
    """128 bytes twenty times a second need hardly any CPU time, and Linux counts them for no process."""
    server = socket.create_server(("127.0.0.1", 0))
    with running("import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
                 "while s.recv(4096): pass", str(server.getsockname()[1])) as child:  # fmt: skip
        connection, _ = server.accept()
        end = threading.Event()

        def stream() -> None:
            while not end.wait(0.05):
                connection.send(bytes(128))

        thread = threading.Thread(target=stream)
        thread.start()
        try:
            assert ever_active(child.pid)
        finally:
            end.set()
            thread.join()
            connection.close()
            server.close()


def test_bytes_on_sockets_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            names = [os.fstat(each.fileno()).st_ino for each in (client, accepted)]
            assert {*names} <= process_activity.socket_inodes([os.getpid()])
            before = process_activity.tcp_bytes_by_inode()
            client.sendall(bytes(5000))
            time.sleep(0.1)  # until it is acknowledged
            unread = process_activity.tcp_bytes_by_inode()
            assert len(accepted.recv(5000, socket.MSG_WAITALL)) == 5000
            after = process_activity.tcp_bytes_by_inode()
    assert [unread[each] - before[each] for each in names] == [5000, 0], (
        "bytes that have not been read are not counted for the receiver"
    )
    assert [after[each] - before[each] for each in names] == [5000, 5000]


@contextmanager
def crowd(count: int) -> Iterator[Callable[[], None]]:
    """Runs busy loops on one core; yields a function that moves the calling process to this core."""
    core = {min(os.sched_getaffinity(0))}

    def join() -> None:
        os.sched_setaffinity(0, core)

    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(running("while True: pass", preexec_fn=join))
        yield join


def test_a_starved_process_counts_as_active() -> None:
    """It gets a hundredth of a core, which is less than polling threads use on an idle machine."""
    with crowd(2) as join, running("import os; os.nice(19)\nwhile True: pass", preexec_fn=join) as child:
        assert ever_active(child.pid, settle=6)


def test_short_bursts_of_work_are_activity_on_a_loaded_machine() -> None:
    """It gets a tenth of the CPU time that it needs, so its CPU time does not distinguish it from polling."""
    code = "import time\nwhile True:\n    time.sleep(0.6); end = time.monotonic() + 0.1\n"
    code += "    while time.monotonic() < end: pass"
    with crowd(4) as join, running(f"import os; os.nice(5)\n{code}", preexec_fn=join) as child:
        assert ever_active(child.pid)


def test_a_stuck_process_is_inactive_on_a_loaded_machine() -> None:
    """The main thread is stuck; another thread wakes up ten times a second, as the recorder does."""
    with crowd(2) as join, running(POLLS + "time.sleep(600)", preexec_fn=join) as child:
        time.sleep(1.0)
        found = list(samples(child.pid, 40))
    assert sum(found) <= 2, found


def test_an_uninterruptible_wait_is_activity_while_file_systems_transfer_data(tmp_path: Path) -> None:
    """posix_spawn waits uninterruptibly until the child runs its program; this child waits for a writer first."""
    os.mkfifo(tmp_path / "fifo")
    code = "import os, sys; os.posix_spawn('/bin/true', ['true'], {}, "
    code += "file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])"
    with running(code, str(tmp_path / "fifo")) as child:
        end = time.monotonic() + BOUND_S
        while processes.process_state(child.pid) != "D":
            assert time.monotonic() < end
            time.sleep(0.01)

        def last_samples(transferred: Callable[[float], tuple[int, int]], begin_s: int = 12) -> list[bool]:
            """Whether it is active in each of 30 samples, half a second apart, of a host observed for `begin_s`."""
            clock = [0.0]
            activity, host, found = ProcessActivity(child.pid), HostCounters(lambda: transferred(clock[0])), []
            for number in range(2 * begin_s + 30):
                clock[0] = number / 2
                host.begin_sample(int(clock[0] * 1e9))
                if number >= 2 * begin_s:
                    usage = processes.process_usage(child.pid, with_bytes=True)
                    assert usage is not None
                    found.append(activity.sample(usage, int(clock[0] * 1e9), host))
                    assert activity.moves <= found[-1]
            return found[DISK_WAIT_SAMPLES:]

        try:
            assert all(last_samples(lambda at_s: (int(at_s) << 20, 0))), "a disk transfers data"
            assert all(last_samples(lambda at_s: (int(at_s // 8) << 23, 0))), "8 MiB every eight seconds"
            assert all(last_samples(lambda at_s: (7 << 20, int(at_s) << 11))), "a network file system"
            assert not any(last_samples(lambda at_s: (7 << 20, 7 << 20))), "nothing"
            assert not any(last_samples(lambda at_s: (int(at_s) << 12, 0))), "a log"
            stops = last_samples(lambda at_s: (int(min(at_s, 14)) << 20, 0))
            assert stops == sorted(stops, reverse=True) and 18 <= sum(stops) <= 26, "nothing more after two seconds"
            unknown = last_samples(lambda at_s: (0, 0), begin_s=0)
            assert unknown == sorted(unknown, reverse=True) and 16 <= sum(unknown) <= 20, "nothing in its first seconds"
        finally:
            with (tmp_path / "fifo").open("wb"):
                pass


def test_a_sample_is_not_compared_with_one_before_a_skip() -> None:
    """After a skip, the next closer look starts anew."""
    with running("import time; time.sleep(600)") as child:
        before = None
        while (now := processes.process_usage(child.pid, with_bytes=True)) != before:  # until it sleeps
            before = now
            time.sleep(0.2)
        activity, usage = ProcessActivity(child.pid), processes.process_usage(child.pid, with_bytes=True)
        host = HostCounters()
        host.begin_sample(10**9)
        assert usage is not None and activity.sample(usage, 10**9, host)
        activity.skip(usage, 2 * 10**9)
        assert [activity.sample(usage, number * 10**9, host) for number in range(3, 7)] == [False] * 4
