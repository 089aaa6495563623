"""Tracebacks, and stacks of live processes."""

from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.stack_traces import UNREADABLE, parse_stacks, parse_traceback

_LINES = """Traceback (most recent call last):
  File "/home/u/train.py", line 12, in step
    x = f(y)
        ^^^^
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9, in forward
    raise ValueError(
ValueError: The shapes do not fit:
  expected [4, 4]
  found [4, 5]

During handling of the above exception, another exception occurred:
"""


def _read(text: str) -> list[tuple[int, str]]:
    return list(enumerate(text.splitlines(), 10))


def test_a_traceback_gives_type_message_and_user_frame() -> None:
    found = parse_traceback(_read(_LINES))
    assert found is not None
    assert (found.type, found.number, found.first) == ("ValueError", 16, 10)
    assert found.message.splitlines() == ["The shapes do not fit:", "  expected [4, 4]", "  found [4, 5]"]
    assert found.where == "step() at train.py:12"
    assert found.frames[0].source == "x = f(y)"


def test_the_traceback_of_a_remote_task_gives_the_exception_of_the_task() -> None:
    found = parse_traceback(_read("""Traceback (most recent call last):
  File "/home/u/main.py", line 1, in <module>
    ray.get(x)
ray.exceptions.RayTaskError(KeyError): ray::Worker.step() (pid=4, ip=10.0.0.7, actor_id=1)
  File "/home/u/worker.py", line 3, in step
    batch["x"]
KeyError: 'x'"""))  # fmt: skip
    assert found is not None
    assert (found.type, found.ip, found.where) == ("KeyError", "10.0.0.7", "step() at worker.py:3")


def test_the_traceback_of_a_failed_actor_gives_the_exception_of_its_constructor() -> None:
    found = parse_traceback(_read("""Traceback (most recent call last):
  File "/home/u/main.py", line 1, in <module>
    ray.get(x)
ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task, \
ray::W.__init__() (pid=4, ip=10.0.0.7)
  File "/home/u/worker.py", line 3, in __init__
    config.rollout.n
AttributeError: 'NoneType' object has no attribute 'n'"""))  # fmt: skip
    assert found is not None
    assert (found.type, found.ip, found.where) == ("AttributeError", "10.0.0.7", "__init__() at worker.py:3")


def test_a_constructors_exception_needs_no_heading() -> None:
    message = "Exception raised in creation task: The actor died because of an error raised in its creation task, "
    found = parse_traceback(_read(f"""{message}ray::LLMRayActor.__init__() (pid=4, ip=10.0.0.7, actor_id=1, repr=<x>)
  File "/home/u/vllm_engine.py", line 3, in __init__
    self.llm = vllm.LLM(*args)
  File "/venv/lib/python3.11/site-packages/vllm/config.py", line 9, in verify
    raise ValueError(
ValueError: heads (28) must be divisible by tensor parallel size (8)"""))  # fmt: skip
    assert found is not None
    assert (found.type, found.ip, found.where) == ("ValueError", "10.0.0.7", "__init__() at vllm_engine.py:3")


def test_a_truncated_remote_traceback_is_kept() -> None:
    found = parse_traceback(_read("""Traceback (most recent call last):
  File "/home/u/main.py", line 1, in <module>
ray.exceptions.RayTaskError(KeyError): ray::Worker.step() (pid=4, ip=10.0.0.7)"""))  # fmt: skip
    assert found is not None and found.type.startswith("ray.exceptions.RayTaskError")


def test_an_exception_of_a_module_may_have_a_name_in_lower_case() -> None:
    lines = ["Traceback (most recent call last):", '  File "/home/u/reward.py", line 3, in score', "    re.compile(x)"]
    found = parse_traceback(_read("\n".join([*lines, "re.error: unbalanced parenthesis at position 0"])))
    assert found is not None and (found.type, found.where) == ("re.error", "score() at reward.py:3")
    assert parse_traceback(_read("\n".join([*lines, "note: error in the pattern"]))) is None


def test_a_traceback_without_an_exception_is_none() -> None:
    assert parse_traceback(_read('Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()')) is None


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
    assert found[0].is_main_thread and not found[1].is_main_thread and found[0].origin.rank == 3


def test_faulthandler() -> None:
    found = list(parse_stacks(iter(enumerate(_FAULT.splitlines(), 1)), LineOrigin(), "stack.txt"))
    assert [frame.function for frame in found[1].frames] == ["<module>", "step"]
    assert found[1].frames[1].line == 12
