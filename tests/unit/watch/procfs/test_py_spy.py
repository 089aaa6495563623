"""Stacks as py-spy tells them, and which line of them is the user's."""

import json
import os

from lockstep.watch.procfs import py_spy
from lockstep.watch.procfs.py_spy import SampledThread, StackFrame, main_thread, parse_stacks, user_code_line

USER = StackFrame("score", "/home/me/reward.py", 31)
TORCH = StackFrame("all_reduce", "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", 7)
STDLIB = StackFrame("wait", "/usr/lib/python3.12/threading.py", 320)
OURS = StackFrame("step", f"{py_spy._PACKAGE}/train/fsdp.py", 120)


def test_where_is_the_innermost_line_of_the_users_code() -> None:
    assert (
        user_code_line([STDLIB, TORCH, USER, StackFrame("main", "/home/me/train.py", 2), OURS])
        == "score() at reward.py:31"
    )
    assert user_code_line([StackFrame("<module>", "/home/me/train.py", 2)]) == "<module> at train.py:2"


def test_without_user_code_it_is_ours_then_anybodys() -> None:
    assert user_code_line([STDLIB, TORCH, OURS]) == "step() at fsdp.py:120"
    assert user_code_line([StackFrame("f", "<string>", 1), STDLIB, TORCH]) == "wait() at threading.py:320"
    assert user_code_line([]) == ""


def test_native_frames_are_no_ones_code() -> None:
    assert user_code_line([StackFrame("c10d::Work::wait", "libtorch_cpu.so", 0), USER]) == "score() at reward.py:31"


def test_what_py_spy_says_is_read_and_garbage_is_nothing() -> None:
    told = [
        {
            "pid": 5, "thread_id": 1, "thread_name": None, "os_thread_id": 5, "active": True, "owns_gil": False,
            "frames": [{"name": "score", "filename": "/home/me/reward.py", "line": 31}],
        }
    ]  # fmt: skip
    assert parse_stacks(json.dumps(told).encode()) == (SampledThread(5, "", (USER,), active=True),)
    for garbage in (b"", b"[", b"{}", b'[{"frames": 1}]', b"Error: no such process"):
        assert parse_stacks(garbage) == ()


def test_the_main_thread_has_the_processes_id() -> None:
    other, main = SampledThread(9, "t", (STDLIB,)), SampledThread(5, "", (USER,))
    assert main_thread([other, main], 5) == main
    assert main_thread([other], 5) == other
    assert main_thread([], 5) is None


def test_the_text_names_frames_and_marks() -> None:
    text = py_spy.format_stacks([SampledThread(5, "MainThread", (USER,), active=True, holds_gil=True)])
    assert text == "thread 5 MainThread active holds the GIL\n    score (/home/me/reward.py:31)"


def test_py_spy_is_there() -> None:
    command = py_spy.py_spy_command(os.getpid(), native=True)
    assert command is not None and "--native" in command and "--nonblocking" not in command
