"""The fork server: a process that imports the modules of workers once, and forks workers in milliseconds.

Importing torch and transformers takes 5 to 7 CPU seconds per process. The agent keeps one fork server per set of
modules, and of variables that affect their import. The fork server imports the modules, reports that it is ready, and
then forks a worker per request. It forks twice, and the process in the middle ends immediately, so that the worker
becomes a child of the agent (a PR_SET_CHILD_SUBREAPER), which can wait for it and gets its exit status.

A worker is like a new process: it has its own session, environment, arguments, working directory and `sys.path[0]`,
default signal handling, a new random state, stdout and stderr in its log, an empty stdin, and none of the fork server's
sockets. It ignores SIGINT, because the controller handles Ctrl-C. When the agent dies, the kernel kills the worker.

The agent and the fork server exchange JSON lines over a socket pair. Requests: {"name", "argv", "env", "log", "cwd",
"warm"}. Messages of the fork server: {"ready": true} or {"failed": why}, and per request {"pid": n} or {"error": why}.
"""

import argparse
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.base.folders import make_folder, open_file

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: Any) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Makes this process the new parent of its descendants whose parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def can_fork(argv: Sequence[str]) -> bool:
    """Whether a fork server can run this command: `python [-P] -m module ...` or `python [-P] file.py ...`, same
    interpreter."""
    if not argv or argv[0] not in (sys.executable, "python", "python3"):
        return False
    words = argv[2:] if argv[1:2] == ["-P"] else argv[1:]
    return (words[:1] == ["-m"] and len(words) >= 2) or (bool(words) and words[0].endswith(".py"))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--socket", type=int, required=True)
    options.add_argument("--agent", type=int, required=True, help="the agent's pid")
    options.add_argument("--preload", default="")
    chosen = options.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != chosen.agent:
        sys.exit("the agent is gone")
    control = socket.socket(fileno=chosen.socket)
    control.set_inheritable(False)
    request = serve_requests(control, chosen.agent, [name for name in chosen.preload.split(",") if name])
    if request is not None:  # now a worker, with nothing of the fork server on its stack
        control.close()
        end_process(lambda: run_as_worker(request, chosen.agent))


def serve_requests(control: socket.socket, agent: int, preload: list[str]) -> dict[str, Any] | None:
    """Serves requests until the agent closes the socket, and then returns None. In each forked worker, returns the
    request."""
    try:
        for name in preload:
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - whatever an import raises, SystemExit included, is reported
        _send_message(control, {"failed": "".join(traceback.format_exception(error))})
        return None
    gc.collect()
    gc.freeze()  # so that workers' garbage collectors do not write to shared pages
    _send_message(control, {"ready": True})
    with control.makefile("r", encoding="utf-8") as requests:
        for line in requests:
            request = json.loads(line)
            if request["warm"] and threading.active_count() > 1:
                threads = ", ".join(thread.name for thread in threading.enumerate()[1:])
                _send_message(control, {"error": f"cannot fork: the preloaded modules run threads ({threads})"})
                continue
            try:
                pid = _double_fork()
            except OSError as error:
                _send_message(control, {"error": f"cannot fork: {error}"})
                continue
            if pid == 0:
                return dict(request)
            _send_message(control, {"pid": pid})
    return None


def _send_message(control: socket.socket, message: Mapping[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the agent has ended
        control.sendall(json.dumps(message).encode() + b"\n")


def _double_fork() -> int:
    """Forks twice. Returns the grandchild's pid, and 0 in the grandchild. On return in the fork server, the process in
    the middle has ended, so the grandchild is a child of the agent."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid == 0:
            os.close(reading)
            os.close(writing)
            return 0
        os.write(writing, pid.to_bytes(8, "little"))
        os._exit(0)
    os.close(writing)
    try:
        raw = os.read(reading, 8)
    finally:
        os.close(reading)
        os.waitpid(middle, 0)
    if len(raw) != 8:
        raise ChildProcessError("the child in the middle failed")
    return int.from_bytes(raw, "little")


def end_process(program: Callable[[], None]) -> None:
    """Runs a program, and ends the process, after its threads and exit functions.

    Like the children of multiprocessing, a worker that has done its work leaves the modules as they are: to tear them
    down would write to every page that is shared with the fork server, of which there are some hundred megabytes.
    Exceptions and other exit codes propagate, and take the interpreter's way.
    """
    try:
        program()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(0)


def run_as_worker(request: Mapping[str, Any], agent: int) -> None:
    """Turns the forked process into the requested worker, and runs the worker's program to its end."""
    os.setsid()
    _redirect_output(Path(request["log"]))
    _bind_to_agent(agent)
    _reset_signals()
    os.chdir(request["cwd"])
    _prctl(_PR_SET_NAME, ctypes.c_char_p(request["name"].encode()[:15]))
    argv: list[str] = request["argv"]
    env: dict[str, str] = request["env"]
    if not request["warm"]:
        _close_above_stderr()
        if argv[0] == sys.executable:  # so that a killed worker's log has all output, and a crash its stacks
            env = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **env}
        _exec(argv, env)
    _close_inherited()
    os.environ.clear()
    os.environ.update(env)
    _reseed()
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _run_python(argv[1:])


def _redirect_output(log: Path) -> None:
    make_folder(log.parent)
    out = open_file(log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    for descriptor in (out, nothing):
        if descriptor > 2:
            os.close(descriptor)


def _bind_to_agent(agent: int) -> None:
    """Has the kernel kill this process when the agent dies, once the agent is this process's parent.

    Before that, the process in the middle is the parent, and its end would kill this process.
    """
    for _ in range(10_000):
        if os.getppid() == agent:
            die_with_parent()
            break
        time.sleep(0.001)
    with contextlib.suppress(OSError):  # without Yama, this is always allowed
        _prctl(_PR_SET_PTRACER, agent)  # the agent's py-spy may read this process's stacks
    if os.getppid() != agent:  # the agent never became the parent, or ended before the prctl call
        sys.exit("the agent ended while this worker started")


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # some signals are reserved for the C library
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python starts
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _close_above_stderr() -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 20 else 1 << 20)


def _close_inherited() -> None:
    """Closes inherited sockets and pipes, but not the files that preloaded modules keep open."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        if descriptor > 2:
            with contextlib.suppress(OSError):
                kind = os.fstat(descriptor).st_mode
                if stat.S_ISSOCK(kind) or stat.S_ISFIFO(kind):
                    os.close(descriptor)


def _exec(argv: list[str], env: dict[str, str]) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for programs that are not Python
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(126 if isinstance(error, PermissionError) else 127)


def _reseed() -> None:
    """Reseeds all random generators from the system's entropy, as in a new process."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


def _run_python(words: list[str]) -> None:
    """Runs `[-P] -m module ...` or `[-P] file.py ...` as the interpreter does. Exceptions and SystemExit propagate."""
    sys.orig_argv = [sys.executable, *words]
    # The fork server itself runs with -P, so that sys.path has no entry for it.
    safe_path = words[0] == "-P" or bool(os.environ.get("PYTHONSAFEPATH"))
    words = words[1:] if words[0] == "-P" else words
    if words[0] == "-m":
        sys.argv = words[1:]
        if not safe_path:
            sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        if not safe_path:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
