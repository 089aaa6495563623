"""Stacks of live processes."""

from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.stack_traces import UNREADABLE, parse_stacks

_PYSPY = """Process 77: python -u train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 77 (active+gil): "MainThread"
    write (torch/serialization.py:828)
    save_checkpoint (main.py:148)
    <module> (main.py:187)
Thread 90 (idle): "Thread-3"
    wait (threading.py:633)

Process 78: python -u train.py
Error: Failed to suspend process
Reason: EPERM: Operation not permitted
"""
_FAULT = """Thread 0x00007f5 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
Current thread 0x00007f6 (most recent call first):
  File "/home/u/train.py", line 12 in step
  File "/home/u/train.py", line 80 in <module>
"""


def test_py_spy() -> None:
    found = list(parse_stacks(iter(enumerate(_PYSPY.splitlines(), 1)), LineOrigin(3), "pyspy.txt"))
    assert [(each.pid, each.thread, each.state, each.number) for each in found] == [
        (77, "MainThread", "active+gil", 4),
        (77, "Thread-3", "idle", 8),
        (78, "", UNREADABLE, 12),
    ]
    assert [frame.function for frame in found[0].frames] == ["<module>", "save_checkpoint", "write"]
    assert found[0].main and not found[1].main and found[0].origin.rank == 3


def test_faulthandler() -> None:
    found = list(parse_stacks(iter(enumerate(_FAULT.splitlines(), 1)), LineOrigin(), "stack.txt"))
    assert [frame.function for frame in found[1].frames] == ["<module>", "step"]
    assert found[1].frames[1].line == 12
