"""Stacks in py-spy's output, and the user's line in them."""

import json
import os

from lockstep.watch.procfs import py_spy
from lockstep.watch.procfs.py_spy import (
    SampledThread,
    StackFrame,
    main_thread,
    parse_stacks,
    user_code_line,
    waits_for_device,
)

USER = StackFrame("score", "/home/me/reward.py", 31)
TORCH = StackFrame("all_reduce", "/venv/lib/python3.11/site-packages/torch/distributed/c10d.py", 7)
STDLIB = StackFrame("wait", "/usr/lib/python3.12/threading.py", 320)
LOCKSTEP = StackFrame("step", f"{py_spy._PACKAGE}/train/fsdp.py", 120)


def test_the_innermost_line_of_the_users_code_is_chosen() -> None:
    assert (
        user_code_line([STDLIB, TORCH, USER, StackFrame("main", "/home/me/train.py", 2), LOCKSTEP])
        == "score() at reward.py:31"
    )
    assert user_code_line([StackFrame("<module>", "/home/me/train.py", 2)]) == "<module> at train.py:2"


def test_without_user_code_it_is_lockstep_s_line_then_any() -> None:
    assert user_code_line([STDLIB, TORCH, LOCKSTEP]) == "step() at fsdp.py:120"
    assert user_code_line([StackFrame("f", "<string>", 1), STDLIB, TORCH]) == "wait() at threading.py:320"
    assert user_code_line([]) == ""


def test_native_frames_are_skipped() -> None:
    assert user_code_line([StackFrame("c10d::Work::wait", "libtorch_cpu.so", 0), USER]) == "score() at reward.py:31"


def test_output_of_py_spy_is_parsed_and_garbage_is_ignored() -> None:
    output = [
        {
            "pid": 5, "thread_id": 1, "thread_name": None, "os_thread_id": 5, "active": True, "owns_gil": False,
            "frames": [{"name": "score", "filename": "/home/me/reward.py", "line": 31}],
        }
    ]  # fmt: skip
    assert parse_stacks(json.dumps(output).encode()) == (SampledThread(5, "", (USER,), active=True),)
    for garbage in (b"", b"[", b"{}", b'[{"frames": 1}]', b"Error: no such process"):
        assert parse_stacks(garbage) == ()


def test_the_main_thread_has_the_id_of_the_process() -> None:
    other, main = SampledThread(9, "t", (STDLIB,)), SampledThread(5, "", (USER,))
    assert main_thread([other, main], 5) == main
    assert main_thread([other], 5) == other
    assert main_thread([], 5) is None


def test_the_text_names_frames_and_marks() -> None:
    text = py_spy.format_stacks([SampledThread(5, "MainThread", (USER,), active=True, holds_gil=True)])
    assert text == "thread 5 MainThread active holds the GIL\n    score (/home/me/reward.py:31)"


def test_py_spy_is_installed() -> None:
    command = py_spy.py_spy_command(os.getpid(), native=True)
    assert command is not None and "--native" in command and "--nonblocking" not in command


def test_a_wait_for_a_device_is_known_from_python_or_native_frames() -> None:
    synchronize = StackFrame("synchronize", "/venv/lib/python3.11/site-packages/torch/cuda/__init__.py", 900)
    handle = StackFrame("wait", f"{py_spy._PACKAGE}/watch/recorder/wrappers.py", 150)
    stream = StackFrame("Stream.synchronize", "/venv/lib/python3.12/site-packages/torch/cuda/streams.py", 105)
    inner = StackFrame("Recorder._patch_wait.<locals>.wait", handle.file, 150)
    assert all(waits_for_device([each, USER]) for each in (synchronize, stream, handle, inner))
    for name in ("cudaStreamSynchronize", "cuEventSynchronize", "ncclGroupEnd", "c10d::Work::wait",
                 "c10d::ProcessGroupNCCL::WorkNCCL::synchronizeInternal", "hipStreamSynchronize"):  # fmt: skip
        native = [StackFrame("sched_yield", "libc.so.6", 0), StackFrame(name, "libcuda.so.1", 0), USER]
        assert waits_for_device(native), name
    assert not waits_for_device([USER, synchronize]), "the callback of a synchronisation computes"
    assert not waits_for_device([USER, StackFrame("cudaStreamSynchronize", "libcudart.so", 0)])
    assert not waits_for_device([STDLIB, USER]) and not waits_for_device([])
    assert not waits_for_device([StackFrame("cudaLaunchKernel", "libcudart.so", 0), USER])
