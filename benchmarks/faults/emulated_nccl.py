"""A backend of torch.distributed that behaves like NCCL, on the CPU: `init_process_group("emulated_nccl", ...)`.

It keeps the semantics of torch's CUDA streams:

- A **stream** runs what was launched on it in order, on a thread of its own. The process has one compute stream (the
  current stream of CUDA); each communicator has a stream for its operations, as ProcessGroupNCCL has.
- A **call** returns when its operation is enqueued. The operation begins after everything that was on the compute
  stream at the time of the call, and after the earlier operations of its communicator.
- **`Work.wait()`** does not block the host: it makes the compute stream wait for the operation. A call without
  `async_op` waits in this way. So operations of different communicators that are issued without `async_op` run in the
  order of their calls, and asynchronous ones overlap.
- **`is_completed()`** of a handle queries the device. `synchronize()` blocks the host until all streams are empty, like
  CUDA with `cudaDeviceScheduleBlockingSync`; with EMULATED_NCCL_SPIN=1 it uses a core, as CUDA does by default. Only
  after it may the host read a result; torch's CUDA tensors do this by themselves, the CPU tensors here do not.
- An operation **starts** when it is first in its stream, and **completes** when all members have started it. Members
  with different calls hang, as with NCCL, and so do those whose peer has died: most transports of NCCL do not notice
  it. The i-th send from a to b meets the i-th receive of b from a. The operations of a batch start together.
- **`abort()`** ends the operations of a communicator without a result and without an error; `synchronize()` then
  returns, and the next call on the communicator raises `DistBackendError`.
- **Faults of the device**: a kernel on the compute stream that takes long, or does not end; and `never_end()`, after
  which an operation transfers its data and is not completed on this member.
- The **flight recorder** (`_dump_nccl_trace_json`) has entries with the states scheduled, started and completed, and
  the status of each communicator. As with ProcessGroupNCCL, the status has the number of the last operation of either
  sort, although collectives and point-to-point operations are counted separately. A batch takes a number of both
  counts; its parts are recorded without a state, and the entry `coalesced` after them has the state of all. `started`
  is reported only with TORCH_NCCL_ENABLE_TIMING=1.

- The **future** of a handle, which DDP waits for in C++, is done when the operation is enqueued.

With TORCH_NCCL_BLOCKING_WAIT=1, `wait()` and the future block the host until the operation has completed; libraries
that read results on the host, as DDP does with gradients, need it here. What differs from NCCL: every collective needs
all members (a broadcast's root does not leave early), a send is never buffered, the status also counts with blocking
waits, and waiting for a future does not make the compute stream wait.
"""

import ctypes
import functools
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lockstep.watch.recorder import abort as aborting

NAME = "emulated_nccl"
FOREVER_S = 3600.0
SPIN_VARIABLE = "EMULATED_NCCL_SPIN"
_LIBC = ctypes.CDLL(None)
Kernel = Callable[[], object]


class Stream:
    """Runs kernels in order on a thread."""

    def __init__(self, name: str) -> None:
        self._kernels: SimpleQueue[tuple[Kernel, threading.Event]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            kernel, done = self._kernels.get()
            kernel()
            done.set()

    def launch(self, kernel: Kernel) -> threading.Event:
        """Enqueues a kernel; the event is set when it has ended."""
        done = threading.Event()
        self._kernels.put((kernel, done))
        return done

    def wait_event(self, event: threading.Event) -> None:
        self.launch(functools.partial(event.wait, FOREVER_S))

    def record_event(self) -> threading.Event:
        return self.launch(lambda: None)


def _held_spinlock() -> tuple[Callable[[], object], Callable[[], object]]:
    """Functions that wait for a lock and release it. Like cudaStreamSynchronize, the wait is one native call that uses
    a core and lets other threads run."""
    lock = ctypes.byref(ctypes.c_int())
    _LIBC.pthread_spin_init(lock, 0)
    _LIBC.pthread_spin_lock(lock)
    return functools.partial(_LIBC.pthread_spin_lock, lock), functools.partial(_LIBC.pthread_spin_unlock, lock)


class Device:
    """The streams of this process and its flight recorder."""

    def __init__(self) -> None:
        self.compute = Stream("compute")
        self.streams = [self.compute]
        self.trace = Trace()

    def synchronize(self, timeout_s: float = FOREVER_S) -> None:
        """Blocks the host until all streams are empty."""
        if os.environ.get(SPIN_VARIABLE) == "1":
            for each in self.streams:
                wait, release = _held_spinlock()
                each.launch(release)
                wait()
            return
        until = time.monotonic() + timeout_s
        for done in [each.record_event() for each in self.streams]:
            while not done.is_set():
                if time.monotonic() > until:
                    raise TimeoutError(f"the device is still busy after {timeout_s} s")
                done.wait(0.01)

    def drain(self, limit_s: float) -> None:
        """Lets the streams complete what they can, as the device of a stopped process does; here they are threads of
        the process, which stop with it."""
        with suppress(TimeoutError):
            self.synchronize(limit_s)


class Trace:
    """The entries and the status of NCCL's flight recorder."""

    def __init__(self) -> None:
        self.entries: deque[dict[str, Any]] = deque(maxlen=2000)
        self.status: dict[str, dict[str, int]] = {}
        self._recorded = 0
        self.timing = os.environ.get("TORCH_NCCL_ENABLE_TIMING") == "1"

    def enqueued(self, group: "EmulatedNccl", name: str, tensors: list[torch.Tensor], p2p: bool) -> dict[str, Any]:
        number = group.p2p_calls if p2p else group.collectives
        entry = {
            "record_id": self._recorded, "pg_id": group.number, "process_group": [group.group_name, group.group_desc],
            "collective_seq_id": group.collectives, "p2p_seq_id": group.p2p_calls, "op_id": self._recorded,
            "profiling_name": f"nccl:{name}", "time_created_ns": time.time_ns(), "is_p2p": p2p, "state": "scheduled",
            "input_sizes": [list(each.shape) for each in tensors], "timeout_ms": 600000, "retired": False,
            "input_dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors],
            "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        }  # fmt: skip
        self._recorded += 1
        self.entries.append(entry)
        self._status(group)["last_enqueued_collective"] = number
        return entry

    def started(self, group: "EmulatedNccl", entry: dict[str, Any]) -> None:
        if self.timing:
            entry.update(state="started", time_discovered_started_ns=time.time_ns())
            self._status(group)["last_started_collective"] = _number(entry)

    def completed(self, group: "EmulatedNccl", entry: dict[str, Any]) -> None:
        entry.update(state="completed", retired=True, time_discovered_completed_ns=time.time_ns())
        self._status(group)["last_completed_collective"] = _number(entry)

    def _status(self, group: "EmulatedNccl") -> dict[str, int]:
        names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
        return self.status.setdefault(str(group.number), dict.fromkeys(names, -1))

    def dump(self, includeCollectives: bool = True, onlyActive: bool = False) -> str:  # noqa: N803 - torch's names
        found: dict[str, Any] = {"version": "2.10", "pg_config": {}, "pg_status": self.status}
        if includeCollectives:
            found["entries"] = [each for each in list(self.entries) if not (onlyActive and each["retired"])]
        return json.dumps(found)


def _number(entry: dict[str, Any]) -> int:
    return int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"])


class DeviceWork(torch._C._distributed_c10d.PythonCallbackWork):  # type: ignore[misc]
    """The handle of an operation."""

    def __init__(self, done: threading.Event, results: list[torch.Tensor]) -> None:
        super().__init__(self._wait)
        self.done, self._results = done, results
        if not _wait_blocks():
            self.complete_future()

    def complete_future(self) -> None:
        """Gives the future its value; torch itself gives it an empty tensor, and only in `wait()`."""
        future = self.get_future()
        if not future.done():
            future.set_result(self._results)

    def _wait(self, _timeout: timedelta) -> bool:
        if _wait_blocks():
            return self.done.wait(FOREVER_S)
        device().compute.wait_event(self.done)
        return True

    def __getattribute__(self, name: str) -> Any:
        if name == "wait":  # NCCL's handles are of the class Work itself
            return functools.partial(dist.Work.wait, self)
        return super().__getattribute__(name)

    def is_completed(self) -> bool:
        return self.done.is_set()


def _wait_blocks() -> bool:
    return os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"


class EmulatedNccl(dist.ProcessGroup):  # type: ignore[misc]
    """A communicator. gloo transfers the data, on the thread of the communicator's stream."""

    _count = 0

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        before = aborting.list_threads()
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._loop = aborting.find_gloo_thread(aborting.list_threads() - before)
        self.number, EmulatedNccl._count = EmulatedNccl._count, EmulatedNccl._count + 1
        self.collectives = self.p2p_calls = 0
        self.stream = Stream(f"communicator {self.number}")
        device().streams.append(self.stream)
        self._aborted = threading.Event()
        self._never_ends = False
        self._batch: list[Callable[[], dist.Work]] | None = None
        self._name, self._description = "", ""

    # --- what c10d asks

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def name(self) -> str:
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        return self.collectives

    def abort(self) -> None:
        self._aborted.set()
        if self._loop:
            aborting.abort_gloo(None, [self._loop])

    shutdown = abort

    # --- operations

    def _enqueue(self, operation: Kernel, entry: dict[str, Any], results: list[torch.Tensor]) -> DeviceWork:
        earlier = device().compute.record_event()
        work = DeviceWork(threading.Event(), results)
        self.stream.launch(functools.partial(self._operate, earlier, operation, entry, work))
        return work

    def _operate(self, earlier: threading.Event, operation: Kernel, entry: dict[str, Any], work: DeviceWork) -> None:
        while not (earlier.wait(0.05) or self._aborted.is_set()):
            pass
        device().trace.started(self, entry)
        try:
            operation()
        except RuntimeError:  # a peer is gone, which most transports of NCCL do not notice
            self._aborted.wait(FOREVER_S)
        if self._never_ends:
            self._aborted.wait(FOREVER_S)
        if not self._aborted.is_set():
            device().trace.completed(self, entry)
        work.complete_future()
        work.done.set()

    def never_end(self) -> None:
        """From the operation on that is issued next, operations do not end on this member, a fault of its device."""
        self.stream.launch(lambda: setattr(self, "_never_ends", True))

    def _check_usable(self) -> None:
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")

    def collective(self, name: str, args: tuple[Any, ...]) -> DeviceWork:
        """Enqueues a collective of gloo with this name and these arguments."""
        self._check_usable()
        self.collectives += 1
        tensors = _tensors(args)
        entry = device().trace.enqueued(self, name.strip("_"), tensors, p2p=False)
        call = f"{name} {[(tuple(each.shape), each.dtype) for each in tensors]} {_root(args)}"
        return self._enqueue(functools.partial(self._run_collective, name, args, call), entry, _results(args))

    def _run_collective(self, name: str, args: tuple[Any, ...], call: str) -> None:
        own = torch.tensor([int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest())])
        everybody = torch.empty(self.size(), dtype=torch.int64)
        self._gloo._allgather_base(everybody, own).wait()
        if (everybody != own).any() and not name.startswith("alltoall"):
            self._aborted.wait(FOREVER_S)
        else:
            getattr(self._gloo, name)(*args).wait()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> DeviceWork | None:
        return self._transfer(f"send {self.rank()}->{peer}", tensors, lambda: self._gloo.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> DeviceWork | None:
        return self._transfer(f"recv {self.rank()}<-{peer}", tensors, lambda: self._gloo.recv(tensors, peer, tag))

    def _transfer(self, name: str, tensors: list[torch.Tensor], post: Callable[[], dist.Work]) -> DeviceWork | None:
        self._check_usable()
        if self._batch is None:
            self.p2p_calls += 1
        entry = device().trace.enqueued(self, name, tensors, p2p=True)
        if self._batch is not None:
            self._batch.append(post)
            return None
        return self._enqueue(lambda: post().wait(), entry, tensors)

    def start_batch(self) -> None:
        self.collectives += 1
        self.p2p_calls += 1
        self._batch = []

    def end_batch(self) -> DeviceWork:
        batch, self._batch = self._batch or [], None

        def run() -> None:
            for work in [post() for post in batch]:
                work.wait()

        return self._enqueue(run, device().trace.enqueued(self, "coalesced", [], p2p=False), [])


def _tensors(args: Any) -> list[torch.Tensor]:
    """The input tensors among the arguments of a collective: they follow the output tensors."""
    found: list[torch.Tensor] = []
    for each in args[:2]:
        flat = each if isinstance(each, list) else [each]
        if any(isinstance(tensor, torch.Tensor) for tensor in flat):
            found = [tensor for tensor in flat if isinstance(tensor, torch.Tensor)]
    return found


def _results(args: Any) -> list[torch.Tensor]:
    """The output tensors of a collective, its first argument."""
    flat = [each for some in args[:1] for each in (some if isinstance(some, list) else [some])]
    return [each for some in flat for each in (some if isinstance(some, list) else [some])]


def _root(args: tuple[Any, ...]) -> object:
    return next((each.rootRank for each in args if hasattr(each, "rootRank")), None)


_COLLECTIVES = {
    **{name: name for name in ("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter",
                               "alltoall_base", "allreduce_coalesced", "_allgather_base", "_reduce_scatter_base")},
    "all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}  # fmt: skip
for _own, _of_gloo in _COLLECTIVES.items():
    setattr(EmulatedNccl, _own, lambda self, *args, _name=_of_gloo: self.collective(_name, args))


def _barrier(self: EmulatedNccl, opts: object = None) -> DeviceWork:
    # NCCL's barrier is an all-reduce; its wait() blocks the host, which the recorder does not rely on
    return self.collective("allreduce", ([torch.zeros(1)],))


EmulatedNccl.barrier = _barrier  # type: ignore[method-assign]


def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
    """torch's function for communicators of this backend: it coalesces, which torch does for backends in C++ only."""
    group = p2p_op_list[0].group or c10d._get_default_group()
    if not isinstance(group, EmulatedNccl):
        return list(_batch_isend_irecv(p2p_op_list))
    group.start_batch()
    for each in p2p_op_list:
        key = "group_dst" if each.op.__name__ == "isend" else "group_src"
        each.op(each.tensor, group=each.group, **{key: each.group_peer})
    return [group.end_batch()]


_batch_isend_irecv = c10d.batch_isend_irecv
_device: Device | None = None


def device() -> Device:
    """The device of this process."""
    global _device
    if _device is None:
        _device = Device()
    return _device


def register() -> None:
    """Makes the backend and its flight recorder known to torch. Call it before the recorder is installed."""
    with suppress(RuntimeError):  # registered already
        dist.Backend.register_backend(NAME, EmulatedNccl, devices=["cpu"])
    torch._C._distributed_c10d._dump_nccl_trace_json = lambda **options: device().trace.dump(**options)
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv  # type: ignore[assignment]
