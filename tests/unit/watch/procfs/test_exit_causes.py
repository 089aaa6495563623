"""Why processes ended, from the kernel's counters and the last lines of logs."""

import signal
from pathlib import Path

import pytest

from lockstep.watch.procfs import exit_causes
from lockstep.watch.procfs.exit_causes import ExitCause, explain_exit, last_exception

TRACEBACK = """step 3
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
  File "train.py", line 5, in main
    raise ValueError("first")
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    save()
{last}
leaving
"""


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ("OSError: [Errno 28] No space left on device: 'x'", "storage_fault"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "rank_oom"),
        ("MemoryError", "host_oom"),
        ("OSError: [Errno 98] Address already in use", "port_in_use"),
        ("KeyError: 'answer'", "rank_exception_masked"),
    ],
)
def test_the_last_exception_names_the_class(last: str, cause: str) -> None:
    text = TRACEBACK.format(last=last)
    assert last_exception(text) == last
    assert explain_exit(1, text, None, on_purpose=False) == ExitCause(cause, last)


def test_text_without_a_traceback_has_no_exception() -> None:
    assert last_exception("OSError: [Errno 28] No space left on device\n") == ""
    assert explain_exit(3, "nothing", None, on_purpose=False) == ExitCause()


def test_a_kill_is_attributed_to_the_kernel_only_with_proof() -> None:
    kill = -signal.SIGKILL
    assert explain_exit(kill, "", True, on_purpose=False).cause == "host_oom"
    assert explain_exit(kill, "", None, on_purpose=False) == ExitCause("", "killed by SIGKILL")
    assert explain_exit(kill, "", False, on_purpose=False).cause == "external_kill"
    assert explain_exit(kill, "", False, on_purpose=True) == ExitCause()
    assert explain_exit(-signal.SIGTERM, "", None, on_purpose=False).cause == "external_kill"
    assert explain_exit(-signal.SIGSEGV, "", None, on_purpose=False) == ExitCause("", "ended by SIGSEGV")


def test_a_counter_that_rose_beats_an_older_traceback_but_not_an_exit_code() -> None:
    text = TRACEBACK.format(last="KeyError: 'answer'")
    assert explain_exit(-signal.SIGKILL, text, True, on_purpose=False).cause == "host_oom"
    assert explain_exit(1, text, True, on_purpose=False).cause == "rank_exception_masked"


def test_exit_code_0_needs_no_cause() -> None:
    assert explain_exit(0, TRACEBACK.format(last="KeyError: 'answer'"), True, on_purpose=False) == ExitCause()


def test_counters_of_both_kinds_of_cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_causes, "_CGROUP_ROOT", tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\n")
    assert exit_causes._read_field(tmp_path, "memory.events", "oom_kill") == 2
    assert exit_causes.oom_kill_count() in (2, 3)


def test_kernel_log_lines_name_the_pid() -> None:
    for line in (
        b"3,1,2,-;Out of memory: Killed process 4711 (python) total-vm:1kB",
        b"3,1,2,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB",
        b"6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=4711,uid=0",
    ):
        match = exit_causes._OOM_KILL.search(line)
        assert match is not None and match[1] == b"4711"
    assert exit_causes._OOM_KILL.search(b"6,1,2,-;process 4711 exited") is None


def test_the_tail_of_a_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("a" * 1000 + "end")
    assert exit_causes.read_tail(log, 10) == "a" * 7 + "end"
    assert exit_causes.read_tail(tmp_path / "none.log") == ""
