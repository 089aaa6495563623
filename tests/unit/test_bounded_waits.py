"""Outside `watch/` and `base/` nothing blocks without a bound: every blocking call goes through `lockstep.base.waits`.

The checker reads the syntax tree. It resolves imported names, and follows what a name was assigned from or annotated
with in the same file, so that `dict.get`, `str.join` and `os.path.join` pass while `queue.get`, `thread.join` do not.
"""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "lockstep"

FUNCTIONS = {
    "time.sleep": "waits.sleep",
    **dict.fromkeys(
        [f"subprocess.{n}" for n in ("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput")],
        "waits.run",
    ),
    "os.system": "waits.run",
    "os.popen": "waits.run",
    **dict.fromkeys([f"os.{n}" for n in ("wait", "waitpid", "waitid", "wait3", "wait4")], "waits.process"),
    **dict.fromkeys(["select.select", "select.poll", "select.epoll"], "waits.readable"),
    "socket.create_connection": "base.transport",
    "ray.get": "waits.poll",
    "ray.wait": "waits.poll",
    "concurrent.futures.wait": "waits.future",
    "concurrent.futures.as_completed": "waits.future",
    "multiprocessing.connection.wait": "waits.readable",
    **dict.fromkeys([f"signal.{n}" for n in ("pause", "sigwait", "sigwaitinfo")], "waits.event"),
    "input": "nothing: nobody may be there to answer",
}
HTTP = re.compile(
    r"(requests|httpx)\.(get|post|put|patch|delete|head|options|request|stream)|httpx\.(Async)?Client"
    r"|urllib\.request\.urlopen"
)
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_single", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "scatter",
}  # fmt: skip
BARE_COLLECTIVES = {
    "monitored_barrier", "send", "recv", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
QUEUE = re.compile(r"(^|\.)(Queue|SimpleQueue|LifoQueue|PriorityQueue|JoinableQueue)$")
STORE = re.compile(r"(^|\.)(TCPStore|FileStore|HashStore|PrefixStore|Store)$")
TASK = re.compile(r"(^|\.)(Thread|Timer|Process|Pool)$")
EXECUTOR = re.compile(r"(^|\.)(Thread|Process)PoolExecutor$")
SOCKET = re.compile(r"(^|\.)(socket|SocketType)$")
HARMLESS = re.compile(r"(^|\.)(dict|Dict|Mapping|Path|str|list|Tensor|ndarray)$")
LOOKS = {
    "queue": re.compile(r"(^|_)(queue|inbox|outbox|mailbox|q)s?$"),
    "store": re.compile(r"(^|_)store$"),
    "task": re.compile(r"(^|_)(thread|process|proc|popen|pool)$"),
    "socket": re.compile(r"(^|_)(sock|socket)$"),
    "bound": re.compile(r"(^|_)(s|S|seconds|timeout|deadline)$"),
}


def bare_waits(source: str) -> list[tuple[int, str]]:
    """Line and complaint of every blocking call that does not go through `waits`."""
    tree = ast.parse(source)
    names = _Names(tree)
    found = [(call.lineno, complaint) for call in _calls(tree) if (complaint := _complaint(call, names))]
    for node in _within(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if names.constructor(item.context_expr, EXECUTOR):
                    found.append((node.lineno, "`with` an executor joins its threads without a bound"))
    for call in _calls(tree):
        if names.dotted(call.func) == "asyncio.run" and call not in _published(tree, names):
            found.append((call.lineno, "asyncio.run: publish it with track_wait, and bound it from outside"))
    return sorted(found)


def _published(tree: ast.AST, names: "_Names") -> list[ast.Call]:
    """The calls inside `with track_wait(...)`."""
    blocks = [
        node
        for node in _within(tree)
        if isinstance(node, ast.With)
        and any(
            isinstance(item.context_expr, ast.Call)
            and names.dotted(item.context_expr.func) == "lockstep.base.wait_state.track_wait"
            for item in node.items
        )
    ]
    return [call for block in blocks for call in _calls(block)]


class _Names:
    """What the names of a file stand for."""

    def __init__(self, tree: ast.AST) -> None:
        self.imported: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self.unbounded: set[str] = set()
        self.nonblocking: set[str] = set()
        self.methods = {node.name for node in _within(tree) if isinstance(node, ast.FunctionDef)}
        self.classes = {node.name for node in _within(tree) if isinstance(node, ast.ClassDef)}
        for node in _within(tree):
            self._import(node)
        for node in _within(tree):
            self._bind(node)
        for call in _calls(tree):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "setblocking" and _is(call, 0, "flag", False):
                self.nonblocking.add(last(call.func.value))
        for loop in (node for node in _within(tree) if isinstance(node, ast.For)):
            if last(loop.target) in self.nonblocking and isinstance(loop.iter, ast.Tuple | ast.List):
                self.nonblocking.update(last(item) for item in loop.iter.elts)

    def _import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.imported[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _bind(self, node: ast.AST) -> None:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign):
            pairs = [(node.target, value) for value in (node.annotation, node.value) if value is not None]
        elif isinstance(node, ast.arg) and node.annotation is not None:
            pairs = [(ast.Name(node.arg), node.annotation)]
        elif isinstance(node, ast.NamedExpr):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            pairs = [(node.optional_vars, node.context_expr)]
        for target, value in pairs:
            name = last(target)
            if not name:
                continue
            made = isinstance(value, ast.Call)
            kind = self.dotted(value.func if isinstance(value, ast.Call) else _annotated(value))
            if kind:
                self.kinds[name] = kind
            if made and QUEUE.search(kind) and not value.args and not value.keywords:  # type: ignore[attr-defined]
                self.unbounded.add(name)

    def dotted(self, node: ast.expr | None) -> str:
        """`torch.distributed.barrier` for `dist.barrier`; empty for what is no plain dotted name."""
        if isinstance(node, ast.Attribute):
            head = self.dotted(node.value)
            return f"{head}.{node.attr}" if head else ""
        return self.imported.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def is_module(self, node: ast.expr) -> bool:
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        return isinstance(root, ast.Name) and root.id in self.imported

    def constructor(self, node: ast.expr, pattern: re.Pattern[str]) -> bool:
        return isinstance(node, ast.Call) and bool(pattern.search(self.dotted(node.func)))

    def of_kind(self, node: ast.expr, kind: re.Pattern[str], looks: str) -> bool:
        """Whether an expression is of that kind by assignment or annotation, or where nothing is known by name."""
        if self.constructor(node, kind):
            return True
        name = last(node)
        known = self.kinds.get(name, "")
        return bool(kind.search(known)) or (bool(LOOKS[looks].search(name)) and not HARMLESS.search(known))

    def ours(self, node: ast.expr, method: str) -> bool:
        """Whether a method is one of lockstep's own, whose body this test reads as well."""
        if isinstance(node, ast.Name) and node.id == "self":
            return method in self.methods
        kind = self.kinds.get(last(node), "")
        return kind.startswith("lockstep.") or (kind in self.classes and method in self.methods)


def last(node: ast.expr) -> str:
    """`_queue` for `self._queue`, `workers` for `workers[0]`."""
    if isinstance(node, ast.Subscript | ast.Starred):
        return last(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _annotated(node: ast.expr) -> ast.expr | None:
    """The class in `Queue[int]`, `"Queue[int]"`, `Queue | None`, `Queue() if x else None`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return _annotated(ast.parse(node.value, mode="eval").body)
        except (SyntaxError, ValueError):  # early versions of 3.11 raise it for null bytes
            return None
    if isinstance(node, ast.BinOp):
        return _annotated(node.left)
    if isinstance(node, ast.IfExp):
        return _annotated(node.body)
    if isinstance(node, ast.Call):
        return node.func
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice
        plain = _annotated(node.value)
        holds = isinstance(plain, ast.Name) and plain.id in ("list", "dict", "tuple", "Sequence", "Mapping", "deque")
        return _annotated(inner) if holds else plain
    return node if isinstance(node, ast.Name | ast.Attribute) else None


@lru_cache(maxsize=4)
def _within(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, which each of the checks looks through again."""
    return tuple(ast.walk(tree))


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in _within(tree) if isinstance(node, ast.Call))


def _complaint(call: ast.Call, names: _Names) -> str | None:
    dotted = names.dotted(call.func)
    if dotted.startswith(("lockstep.watch.", "lockstep.base.")):
        return None
    if dotted in FUNCTIONS:
        return f"{dotted}: use {FUNCTIONS[dotted]}"
    if HTTP.fullmatch(dotted) and not _given(call, "timeout"):
        return f"{dotted} without a timeout"
    if (
        dotted in ("fcntl.flock", "fcntl.lockf")
        and "LOCK_NB" not in ast.unparse(call)
        and "UN" not in ast.unparse(call)
    ):
        return f"{dotted} blocks: use LOCK_NB and waits.poll"
    if dotted.startswith("torch.distributed."):
        return _collective(call, dotted.rpartition(".")[2])
    return _method(call, call.func, names) if isinstance(call.func, ast.Attribute) else None


def _collective(call: ast.Call, name: str) -> str | None:
    if name in BARE_COLLECTIVES:
        return f"{name} has no bound: use async collectives of tensors and waits.work"
    asynchronous = any(
        k.arg == "async_op" and isinstance(k.value, ast.Constant) and k.value.value for k in call.keywords
    )
    return f"{name} without async_op=True: use waits.work" if name in COLLECTIVES and not asynchronous else None


def _method(call: ast.Call, func: ast.Attribute, names: _Names) -> str | None:
    owner, method = func.value, func.attr
    check = _METHODS.get(method)
    return check(call, owner, names) if check is not None and not names.ours(owner, method) else None


def _get(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    if names.of_kind(owner, STORE, "store") and len(call.args) == 1:
        return "store.get: use waits.store_get"
    if _is(call, 0, "block", False) or re.search(r"ContextVar$", names.kinds.get(last(owner), "")):
        return None
    only_bounds = not call.args and all(k.arg in ("block", "timeout") for k in call.keywords)
    positional = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value is True
    return "queue.get: use waits.queue_get" if only_bounds or positional else None


def _put(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    if (
        _is(call, 1, "block", False)
        or last(owner) in names.unbounded
        or "SimpleQueue" in names.kinds.get(last(owner), "")
    ):
        return None
    bounded = any(k.arg in ("block", "timeout") for k in call.keywords)
    return "queue.put: use waits.queue_put" if bounded or names.of_kind(owner, QUEUE, "queue") else None


def _join(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    if isinstance(owner, ast.Constant | ast.JoinedStr) or names.is_module(owner):
        return None
    only_bound = not call.args and all(k.arg == "timeout" for k in call.keywords)
    number = len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and not isinstance(call.args[0].value, str)
    return "join: use waits.join" if only_bound or number or names.of_kind(owner, TASK, "task") else None


def _result(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    if _given(call, "why") or _is(call, 0, "timeout", 0):
        return None
    first = call.args[0] if call.args else None
    says_why = isinstance(first, ast.JoinedStr) or (isinstance(first, ast.Constant) and isinstance(first.value, str))
    says_why = says_why or (isinstance(first, ast.Name) and first.id.endswith("why"))
    return None if says_why else "result: use waits.future, result(0) for one that is done, or say why to a Pending"


def _wait(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    if names.dotted(call.func) == "asyncio.wait" and _given(call, "timeout"):
        return None  # keeps no thread
    return "wait: use waits.event, waits.condition, waits.process or waits.work"


def _receive(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    if last(owner) in names.nonblocking:
        return None
    if _given(call, "timeout_s") and not names.of_kind(owner, SOCKET, "socket"):
        return None
    first = call.args[0] if call.args else None
    seconds = isinstance(first, ast.Constant) and (first.value == 0 or isinstance(first.value, float))
    seconds = seconds or (first is not None and bool(LOOKS["bound"].search(last(first))))
    return None if seconds else "recv/accept: use base.transport, or waits.readable first"


def _connect(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    address = bool(call.args) and isinstance(call.args[0], ast.Tuple)
    return "connect: use base.transport" if address or names.of_kind(owner, SOCKET, "socket") else None


def _acquire(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    bounded = _given(call, "timeout") or _is(call, 0, "blocking", False)
    return None if bounded else "acquire without a timeout: use `with` for a short section, or a bound"


def _select(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    selector = re.search(r"^selectors\.\w+Selector$", names.kinds.get(last(owner), "")) is not None
    endless = not call.args and not call.keywords
    return "select without a timeout" if endless and (selector or "select" in last(owner)) else None


def _shutdown(call: ast.Call, owner: ast.expr, names: _Names) -> str | None:
    executor = EXECUTOR.search(names.kinds.get(last(owner), "")) is not None
    return "shutdown joins threads: give wait=False" if executor and not _is(call, 0, "wait", False) else None


_METHODS = {
    "get": _get, "put": _put, "join": _join, "result": _result, "wait": _wait, "wait_for": _wait,
    "recv": _receive, "recv_into": _receive, "recvfrom": _receive, "recv_bytes": _receive, "accept": _receive,
    "connect": _connect, "sendall": lambda *_: "sendall: use base.transport",
    "communicate": lambda *_: "communicate: use waits.run", "acquire": _acquire, "shutdown": _shutdown,
    "select": _select, "run_until_complete": lambda *_: "use asyncio.run inside waits.waiting",
    "run_forever": lambda *_: "use asyncio.run inside waits.waiting",
}  # fmt: skip


def _given(call: ast.Call, keyword: str) -> bool:
    return any(k.arg == keyword for k in call.keywords)


def _is(call: ast.Call, position: int, keyword: str, value: object) -> bool:
    """Whether an argument is that constant."""
    given = [k.value for k in call.keywords if k.arg == keyword] or call.args[position : position + 1]
    return bool(given) and isinstance(given[0], ast.Constant) and given[0].value == value and given[0].value is not None


def _files() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] not in ("watch", "base")]


def test_every_blocking_call_goes_through_waits() -> None:
    found = [
        f"{path.relative_to(SOURCE.parents[1])}:{line}: {complaint}"
        for path in _files()
        for line, complaint in bare_waits(path.read_text())
    ]
    assert not found, "bare waits (rule 1):\n" + "\n".join(found)


def test_the_checker_sees_the_whole_house() -> None:
    rooms = {path.relative_to(SOURCE).parts[0] for path in _files()}
    assert {"cli", "recipes", "run", "rollout", "train", "rewards", "weights", "data", "cluster", "ledger"} <= rooms


CAUGHT = [
    "import time; time.sleep(1)",
    "from time import sleep as nap; nap(1)",
    "import subprocess; subprocess.run(['x'], timeout=5)",
    "from subprocess import check_output; check_output(['x'])",
    "import subprocess as sp; sp.Popen(['x']).communicate()",
    "popen.wait()",
    "self._popen.wait(timeout=3)",
    "import os; os.waitpid(4, 0)",
    "import queue; q = queue.Queue(); q.get()",
    "self._inbox.get(timeout=1)",
    "self._inbox.get(True, 5)",
    "things.get(block=True)",
    "import queue; jobs = queue.Queue(4); jobs.put(1)",
    "def f(jobs: 'queue.Queue[int] | None'): jobs.put(1)",
    "self.queue.put(item)",
    "queues[3].put(item, timeout=2)",
    "import threading; t = threading.Thread(target=f); t.join()",
    "import threading; t = threading.Thread(target=f); t.join(limit)",
    "worker.join(timeout=5)",
    "worker.join(5)",
    "self._thread.join(limit)",
    "event.wait()",
    "with cond: cond.wait_for(lambda: x, 5)",
    "future.result()",
    "future.result(timeout=10)",
    "future.result(30)",
    "import concurrent.futures as cf; cf.wait([f])",
    "from concurrent.futures import as_completed\nfor f in as_completed(fs): pass",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor() as pool: pass",
    "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor()\npool.shutdown()",
    "sock.recv(4096)",
    "server.accept()",
    "sock.connect(address)",
    "import socket; s = socket.socket(); s.connect(a)",
    "client.connect(('h', 1))",
    "sock.sendall(b'x')",
    "import select; select.select([a], [], [])",
    "import selectors; s = selectors.DefaultSelector(); s.select()",
    "self._selector.select()",
    "loop.run_until_complete(f())",
    "class A:\n  def run(self): self.writer.wait()",
    "import torch.distributed as dist; dist.barrier()",
    "import torch; torch.distributed.all_reduce(x)",
    "from torch import distributed; distributed.broadcast(x, 0, async_op=False)",
    "from torch.distributed import all_gather_object; all_gather_object(a, b)",
    "import torch.distributed as dist; dist.all_reduce(x, async_op=True).wait()",
    "import torch.distributed as dist; dist.monitored_barrier(timeout=t)",
    "store.get('key')",
    "self._store.wait(['key'])",
    "from torch.distributed import TCPStore; s = TCPStore('h', 1); s.get('k')",
    "import requests; requests.get(url)",
    "import httpx; httpx.post(url, json=x)",
    "import httpx; httpx.AsyncClient()",
    "from urllib.request import urlopen; urlopen(url)",
    "import ray; ray.get(ref)",
    "import ray; ray.get(ref, timeout=5)",
    "import asyncio; asyncio.run(main())",
    "import asyncio\nasync def f():\n    await asyncio.wait(futures)",
    "import fcntl; fcntl.flock(fd, fcntl.LOCK_EX)",
    "lock.acquire()",
    "pool.apply_async(f).get()",
    "input('sure?')",
]

PASSES = [
    "import asyncio\nasync def f():\n    await asyncio.wait(futures, timeout=3.0)",
    "d.get('key')",
    "d.get('key', None)",
    "os.environ.get('X', True)",
    "cache.get(key)",
    "self._inbox.get_nowait()",
    "self._inbox.get(block=False)",
    "self._inbox.get(False)",
    "from contextvars import ContextVar; c = ContextVar('c'); c.get()",
    "import queue; q = queue.SimpleQueue(); q.put(1)",
    "import queue; q: queue.Queue[int] = queue.Queue(); q.put(1)",
    "self.queue.put(item, block=False)",
    "buffer.put(key, value)",
    "','.join(parts)",
    "sep.join(parts)",
    "f'{x}'.join(parts)",
    "import os; os.path.join(a, b)",
    "from os.path import join; join('a', 'b')",
    "path.joinpath('x')",
    "pending.result(why='train step 3')",
    "pending.result(f'step {n}')",
    "pending.result(why, stall_s=3)",
    "future.result(0)",
    "future.result(timeout=0)",
    "from lockstep.base import waits; waits.future(f, waits_for='w', why='y', timeout_s=3)",
    "from lockstep.base import waits; waits.process(p, waits_for='w', why='y', timeout_s=3)",
    "from lockstep.base.waits import sleep; sleep(1, 'why')",
    "from lockstep.base.transport import auth_handshake as wire; wire.connect('h', 1, token=t, run=r, generation=1)",
    "connection.recv(0)",
    "a.setblocking(False); a.recv(4096)",
    "for end in (self._a, b): end.setblocking(False)\nself._a.recv(4096)",
    "class W:\n  def wait(self): pass\nw = W()\nw.wait()",
    "import selectors; s = selectors.DefaultSelector(); s.select(0.1)",
    "from lockstep.base.wait_state import track_wait\nimport asyncio\n"
    "with track_wait('a', 'b', 'c', 5): asyncio.run(f())",
    "async def f(): await g()",
    "class A:\n  def wait(self): pass\n  def run(self): self.wait()",
    "from lockstep.train.checkpoints.checkpoint import CheckpointWriter\nw = CheckpointWriter()\nw.wait()",
    "query.select()",
    "connection.recv(1.0)",
    "connection.recv(timeout_s)",
    "listener.accept(0)",
    "listener.accept(self._poll_s)",
    "import sqlite3; sqlite3.connect(path)",
    "import torch.distributed as dist; work = dist.all_reduce(x, async_op=True)",
    "import torch.distributed as dist; dist.get_rank()",
    "import torch; torch.gather(x, 0, i)",
    "x.scatter(0, i, y)",
    "import functools; functools.reduce(f, xs)",
    "import requests; requests.get(url, timeout=5)",
    "import httpx; httpx.AsyncClient(timeout=5)",
    "from urllib.request import urlopen; urlopen(url, timeout=5)",
    "import fcntl; fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "import fcntl; fcntl.flock(fd, fcntl.LOCK_UN)",
    "lock.acquire(blocking=False)",
    "with lock: pass",
    "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor()\npool.shutdown(wait=False)",
    "import os; os.waitstatus_to_exitcode(3)",
    "time_sleep(1)",
    "run.resume(why)",
]


@pytest.mark.parametrize("snippet", CAUGHT)
def test_catches(snippet: str) -> None:
    assert bare_waits(snippet)


@pytest.mark.parametrize("snippet", PASSES)
def test_lets_pass(snippet: str) -> None:
    assert bare_waits(snippet) == []
