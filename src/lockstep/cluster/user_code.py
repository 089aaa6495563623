"""Finds and imports users' Python code, and waits for the worker processes that run it.

The controller only parses the source of a module; the code runs in workers, which can be killed.
"""

import ast
import difflib
import faulthandler
import importlib
import importlib.util
import logging
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from lockstep.base.errors import PicklableError
from lockstep.base.secrets import redact_text, secret_values
from lockstep.base.text import first_line
from lockstep.base.wait_state import Stalled, WaitTimeout
from lockstep.cluster.protocol import PendingResult, RemoteError, WorkerDied

PACKAGE = str(Path(__file__).parents[1])


class UserCodeError(PicklableError, ValueError):
    """User code cannot be used. Says which code, what is wrong, and a fix."""

    noun = "user code"
    expected = "function"

    def __init__(self, path: str, problem: str, remedy: str = "", trace: str | None = None) -> None:
        super().__init__(f"{self.noun} {path}: {problem}" + (f"; {remedy}" if remedy else ""))
        self.path, self.problem, self.remedy, self.traceback = path, problem, remedy, trace


UserCodeErrorType = type[UserCodeError]


def load_object(path: str, base: Path = Path(), refusal: UserCodeErrorType = UserCodeError) -> Any:
    """Loads the object at `file.py:name` (relative to `base`) or `package.module:name`. Raises `refusal`."""
    source, name = split_path(path, refusal)
    module = (
        _from_file(path, base / source, refusal) if source.endswith(".py") else _package(path, source, base, refusal)
    )
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            candidates = [each for each, value in vars(found).items() if callable(value)]
            raise refusal(path, f"{module.__file__} has no {part!r}", suggest_name(part, candidates))
        found = getattr(found, part)
    return found


def split_path(path: str, refusal: UserCodeErrorType = UserCodeError) -> tuple[str, str]:
    """Splits a path into module or file, and name. Raises `refusal`."""
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise refusal(path, f"it does not name a {refusal.expected}", "write `file.py:name` or `package.module:name`")
    return source, name


def source_file(path: str, base: Path = Path(), refusal: UserCodeErrorType = UserCodeError) -> Path | None:
    """Returns the file that defines the name, found without running code; None if only an import could find it.

    Raises:
        refusal: no such file or package.
    """
    source, _ = split_path(path, refusal)
    if source.endswith(".py"):
        file = (base / source).expanduser()
        if not file.is_file():
            siblings = [each.name for each in file.parent.glob("*.py")] if file.parent.is_dir() else []
            close = difflib.get_close_matches(file.name, siblings, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise refusal(path, f"there is no file {file}", f"{hint}paths are relative to the current folder")
        return file
    # Only the top-level package is located: finding a submodule would import its parents.
    top, *inner = source.split(".")
    here = [base, *(Path(each) for each in _search_locations(top))]
    for folder in here:
        stem = folder.joinpath(*([top] if folder == base else []), *inner)
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                return file
    if not (base / top).exists() and not (base / f"{top}.py").exists() and importlib.util.find_spec(top) is None:
        raise refusal(path, f"there is no package {top!r}", "install it, or give a path to a file.py")
    return None


def _search_locations(top: str) -> list[str]:
    spec = importlib.util.find_spec(top)
    return [] if spec is None else list(spec.submodule_search_locations or [])


def check_source(path: str, base: Path = Path(), refusal: UserCodeErrorType = UserCodeError) -> ast.Module | None:
    """Looks the name up in the source of its module; returns the syntax tree if there is a source file.

    Raises:
        refusal: no such file or package, invalid Python, or no such name.
    """
    file = source_file(path, base, refusal)
    if file is None:
        return None
    try:
        module = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise refusal(path, f"{file} is not valid Python: {error}") from error
    names = defined_names(module)
    source, name = split_path(path, refusal)
    top = name.partition(".")[0]
    if source.endswith(".py") and "*" not in names and top not in names:  # a package may create names dynamically
        listed = f"it defines {', '.join(sorted(names)) or 'nothing'}"
        close = difflib.get_close_matches(top, sorted(names), n=1)
        remedy = f"did you mean {close[0]!r}? {listed[0].upper()}{listed[1:]}" if close else listed
        raise refusal(path, f"{file} defines no {top!r}", remedy)
    return module


def defined_names(module: ast.Module) -> set[str]:
    """The names that a module binds; contains `*` if it has a star import."""
    found: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found.update(alias.asname or alias.name for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
    return found


def _from_file(path: str, file: Path, refusal: UserCodeErrorType) -> ModuleType:
    file = file.expanduser().resolve()
    if not file.is_file():
        siblings = [each.name for each in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise refusal(path, f"there is no file {file}", suggest_name(file.name, siblings))
    name = f"lockstep_user_{zlib.crc32(str(file).encode()):08x}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise refusal(path, f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module of a class
    _add_to_path(file.parent)  # the file may import its neighbours
    loader = spec.loader
    try:
        _run_import(path, lambda: loader.exec_module(module), refusal)
    except refusal:
        del sys.modules[name]
        raise
    return module


def _package(path: str, source: str, base: Path, refusal: UserCodeErrorType) -> ModuleType:
    _add_to_path(base.resolve())
    module = _run_import(path, lambda: importlib.import_module(source), refusal)
    assert isinstance(module, ModuleType)
    return module


def _add_to_path(folder: Path) -> None:
    """Makes the modules of a folder importable: before installed packages, but after the standard library, so that a
    user's `tty.py` or `queue.py` does not take the place of Python's in a worker."""
    if str(folder) not in sys.path:
        installed = (at for at, entry in enumerate(sys.path) if entry.endswith(("site-packages", "dist-packages")))
        sys.path.insert(next(installed, len(sys.path)), str(folder))


def _run_import(path: str, run: Callable[[], object], refusal: UserCodeErrorType) -> object:
    """Runs a user's module and converts any error to `refusal`."""
    try:
        return run()
    except (Exception, SystemExit) as error:  # user code may raise anything
        trace = user_traceback(error)
        raise refusal(path, f"importing it raised {type(error).__name__}: {error}", trace=trace) from error


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on, without frames of Lockstep and of the import machinery."""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if (
            not file.startswith((PACKAGE, "<frozen importlib"))
            and "/importlib/" not in file
            and "/asyncio/" not in file
        ):
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def suggest_name(name: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there are: {', '.join(sorted(candidates)[:20])}" if candidates else ""


class Watchdog:
    """Writes the stacks of all threads to the log when nothing has finished for a while, shortly before the process is
    killed. It uses a C thread, which runs even if a function never releases the interpreter."""

    def __init__(self, after_s: float) -> None:
        self._after_s, self._since = after_s, 0.0

    def start(self) -> None:
        self._since = time.monotonic()
        faulthandler.dump_traceback_later(self._after_s, repeat=False, file=sys.__stderr__ or sys.stderr)

    def pat(self) -> None:
        """Resets the timer, if a tenth of the time has passed: resetting starts a thread, which costs time."""
        if not self._since or time.monotonic() - self._since > self._after_s / 10:
            self.start()

    def stop(self) -> None:
        self._since = 0.0
        faulthandler.cancel_dump_traceback_later()


log = logging.getLogger(__name__)

R = TypeVar("R")

LOAD_STALL_S = 300.0
"""Longest time without progress while users' modules are imported, which may import anything."""
DEATH_LOG_S = 5.0
"""Within this time the cluster notices that a killed process is dead."""
MAX_LOST_NODES = 4
"""How often a call is repeated because the node of its process was lost, which is not the fault of user code."""


class UserCodeNotLoaded(PicklableError):
    """The process ended, or was killed, while it loaded user code."""

    def __init__(self, problem: str, log_tail: str) -> None:
        super().__init__(problem)
        self.problem, self.log_tail = problem, log_tail


def wait_until_loaded(pending: PendingResult[R], what: str, name: str, kill: Callable[[], None]) -> R:
    """Waits until the process `name` has loaded `what`, and returns the result.

    Args:
        kill: kills the process; called if it makes no progress.

    Raises:
        UserCodeNotLoaded: the process has ended.
        WorkerDied: its node was lost.
    """
    try:
        return pending.result(why=f"loading {what}", stall_s=LOAD_STALL_S)
    except Stalled as error:
        kill()
        problem = f"could not be loaded within {error.waited_s:.0f} s"
        raise UserCodeNotLoaded(problem, killed_process_log(pending, name)) from error
    except WorkerDied as error:
        if error.with_node:
            raise
        raise UserCodeNotLoaded(f"its process {error.how} while loading", error.last_words) from error


def retry_lost_nodes(work: Callable[[], R], does: str) -> R:
    """Runs `work`, and repeats it with another process if the node of the process was lost.

    Args:
        does: what the new process does, for the log.

    Raises:
        WorkerDied: the process ended by itself, or lost too many nodes.
    """
    for _ in range(MAX_LOST_NODES - 1):
        try:
            return work()
        except WorkerDied as error:
            if not error.with_node:
                raise
            log.warning("%s; a new process %s in its place", first_line(error), does)
    return work()


class NoteRecovery(Protocol):
    """Adds an action of recovery to the run's history; implemented by its recovery manager. Any thread may call."""

    def __call__(self, action: str, **fields: Any) -> None: ...


def note_nothing(action: str, **fields: Any) -> None:
    """For pools outside of a run."""


@contextmanager
def recorded_loss(note: NoteRecovery, worker: str, role: str, problem: str) -> Iterator[None]:
    """Records that a process of user code was lost, and whether the wrapped work made up for it.

    Args:
        problem: what happened, as the user reads it: `its process exited with 3`, `did not answer within 5 s`.
    """
    began = time.monotonic()
    facts = {"worker": worker, "role": role, "what": problem.removeprefix("its process ")}
    note("failed", **facts)
    try:
        yield
    except BaseException as error:
        note("gave up", **facts, reason=redact_text(first_line(error), secret_values(os.environ)))
        raise
    note("restarted", **facts, seconds=round(time.monotonic() - began, 3))


def killed_process_log(pending: PendingResult[object], name: str) -> str:
    """The end of the log of a process that was killed during a call, with its last stack. Empty if there is no log."""
    try:
        pending.result(why=f"the end of the log of {name}", stall_s=DEATH_LOG_S)
    except WorkerDied as error:
        return error.last_words
    except (WaitTimeout, RemoteError):
        log.warning("%s left no log", name)
    return ""
