"""The ranks of a collective self-test on one host: `python -m lockstep.doctor.check.probe.selftest`.

The process reads its task from the first line of standard input and ends when standard input is closed. It writes
progress and results to standard output, one JSON object per line.

This is the only module of `doctor` that imports torch, in a process of its own. It imports torch once and forks the
ranks, because on few cores the import takes longer than all the collectives.

Task: `{"world", "ranks": [this host's], "host": of the store, "port": of it, "serve": true on one host, "address",
"device", "communicators": [...], "bound_s", "bytes", "names": [of all ranks]}`. A line is `{"rank", "at"}` when a rank
begins an operation, `{"rank", "communicator", "operation", "ok", ...}`, `{"rank", "pair", "mb_per_s"}` or
`{"rank", "failed"}`.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from lockstep.base import waits
from lockstep.base.limits import raise_descriptor_limit
from lockstep.base.network import listen
from lockstep.base.wait_state import WaitTimeout, track_wait
from lockstep.doctor.check.probe.round_robin import round_robin_rounds

SMALL = 1024
"""Number of elements of the first call, whose result is checked."""
REPEATS = 3
PAIR_BYTES = 1 << 20
_PERIOD = 1021
"""A prime, so that misplaced or torn chunks give wrong values."""

TaskDict = dict[str, Any]
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Newer versions of torch deprecate the older names."""


def main() -> int:
    """Runs the ranks of this host; returns 0 if all of them succeeded."""
    task: TaskDict = json.loads(sys.stdin.buffer.readline())
    raise_descriptor_limit()
    listening: socket.socket | None = None
    if task.get("serve"):
        # Bound before its port is announced and kept open: no other process can take the port in between.
        listening = listen(task["address"], backlog=4096)
        task["host"], task["port"] = task["address"], listening.getsockname()[1]
        _write_line({"port": task["port"]})
    fork = multiprocessing.get_context("fork")
    children = {rank: fork.Process(target=_run_rank_and_exit, args=(task, rank)) for rank in task["ranks"]}
    for child in children.values():
        child.start()
    threading.Thread(target=_end_with_probe, name="end-with-probe", daemon=True).start()
    bound = timedelta(seconds=task["bound_s"])
    store = None
    if listening is not None:
        store = TCPStore(
            task["host"], task["port"], None, True, bound, wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
    succeeded = _await_ranks(children, task["bound_s"] + 5.0)
    del store
    return 0 if succeeded else 1


def _end_with_probe() -> None:
    """Kills this process and its ranks when the probe has ended, in whatever way."""
    while os.read(0, 1):  # not through sys.stdin: the interpreter needs its lock at exit
        continue
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _await_ranks(children: "dict[int, ForkProcess]", bound_s: float) -> bool:
    """Waits for the ranks, and reports those that were killed or did not end; returns whether all succeeded."""
    left = dict(children)

    def ended() -> bool | None:
        for rank, child in list(left.items()):
            if child.exitcode is not None:
                del left[rank]
                if child.exitcode < 0:
                    _write_line({"rank": rank, "failed": f"killed by signal {-child.exitcode}"})
        return None if left else True

    try:
        waits.poll(
            ended, kind="process", waits_for="ranks of the self-test", why="their end", timeout_s=bound_s,
            notice_after_s=None,
        )  # fmt: skip
    except WaitTimeout:
        for rank, child in left.items():
            _write_line({"rank": rank, "failed": f"did not end within {bound_s:g} s"})
            child.kill()
    return all(child.exitcode == 0 for child in children.values())


def _run_rank_and_exit(task: TaskDict, rank: int) -> None:
    code = 1
    try:
        SelfTestRank(task, rank).run()
        code = 0
    except Exception as error:  # noqa: BLE001 - every error is reported to the head
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        _write_line({"rank": rank, "failed": f"{type(error).__name__}: {first[:400]}"})
    finally:
        sys.stdout.flush()
        # Skips the interpreter's exit, which torch's threads of a failed communicator may block.
        os._exit(code)


def _write_line(line: dict[str, Any]) -> None:
    """Writes in one call, so that lines of several ranks do not mix."""
    os.write(1, (json.dumps(line) + "\n").encode())


class SelfTestRank:
    """One rank: joins the others, then runs the collectives of all communicators in the same order as the others."""

    def __init__(self, task: TaskDict, rank: int) -> None:
        self._task, self._rank = task, rank
        self._bound_s = float(task["bound_s"])
        cuda = task["device"] == "cuda"
        local = task["ranks"].index(rank)
        self._waiter = ThreadPoolExecutor(1)
        self._device = torch.device("cuda", local % max(torch.cuda.device_count(), 1)) if cuda else torch.device("cpu")

    def run(self) -> None:
        """Runs the test. Raises the errors of torch, NCCL or gloo."""
        self._report_stage("rendezvous")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        task = self._task
        bound = timedelta(seconds=self._bound_s)
        with track_wait("rendezvous", f"{task['world']} ranks", "self-test", self._bound_s):
            store = TCPStore(task["host"], task["port"], is_master=False, timeout=bound)
            store.set(f"joined/{self._rank}", "1")
            backend = "cpu:gloo,cuda:nccl" if any(c["backend"] == "nccl" for c in task["communicators"]) else "gloo"
            self._report_stage("joined")
            self._await_all_ranks(store)
            dist.init_process_group(backend, store=store, rank=self._rank, world_size=task["world"], timeout=bound)
        groups = []
        for each in task["communicators"]:
            self._report_stage(f"creating {each['name']}")
            groups.append(dist.new_group(each["members"], timeout=bound, backend=each["backend"]))
        for each, group in zip(task["communicators"], groups, strict=True):
            if self._rank in each["members"]:
                self._test_communicator(each, group)
        self._report_stage("done")

    def _await_all_ranks(self, store: TCPStore) -> None:
        keys = [f"joined/{rank}" for rank in range(self._task["world"])]
        waits.poll(
            lambda: True if store.check(keys) else None, kind="rendezvous", waits_for=f"{len(keys)} ranks",
            why="all ranks to join", timeout_s=self._bound_s, notice_after_s=None,
        )  # fmt: skip

    def _report_stage(self, what: str) -> None:
        _write_line({"rank": self._rank, "at": what})

    def _test_communicator(self, communicator: dict[str, Any], group: dist.ProcessGroup) -> None:
        name, members = communicator["name"], communicator["members"]
        on_gpu = communicator["backend"] == "nccl" or self._device.type == "cpu"
        device = self._device if on_gpu else torch.device("cpu")
        for operation in communicator["operations"]:
            self._report_stage(f"{operation} on {name}")
            small = self._call(operation, name, group, members, SMALL, device)
            large = max(SMALL, int(self._task["bytes"]) // 8)
            self._call(operation, name, group, members, large, device)
            seconds = min(
                self._call(operation, name, group, members, large, device, check=False) for _ in range(REPEATS)
            )
            _write_line(
                {
                    "rank": self._rank, "communicator": name, "operation": operation, "ok": True,
                    "ms": round(1e3 * small, 3), "mb_per_s": round(bus_rate(operation, 8 * large, seconds, members), 1),
                }
            )  # fmt: skip
        self._measure_pairs(name, group, members, device)

    def _call(
        self, operation: str, name: str, group: dist.ProcessGroup, members: Sequence[int], size: int,
        device: torch.device, check: bool = True,
    ) -> float:  # fmt: skip
        """Runs a collective of about `size` int64 values; returns its seconds. Raises ValueError for a wrong result."""
        case = _CASES[operation](list(members), self._rank, size, device)
        self._synchronise(device)
        began = time.monotonic()
        self._finish(case.issue(group), name, operation)
        self._synchronise(device)
        seconds = time.monotonic() - began
        if check:
            wrong = (case.result != case.expected).nonzero()
            if len(wrong):
                first = wrong[0].tolist()
                actual, expected = case.result[tuple(first)].item(), case.expected[tuple(first)].item()
                raise ValueError(
                    f"checksum: {operation} on {name} is wrong in {len(wrong)} of {case.result.numel()} values, "
                    f"the first at {first}: {actual} instead of {expected}"
                )
        return seconds

    def _finish(self, work: Any, name: str, operation: str) -> None:
        if operation in ("all_reduce", "all_gather", "broadcast"):
            waits.work(
                work, communicator=name, operation=operation, why="self-test", timeout_s=self._bound_s,
                notice_after_s=None,
            )  # fmt: skip
            return
        # gloo completes other operations only inside `wait`, so a thread calls it; a thread that hangs is abandoned.
        done = self._waiter.submit(work.wait)
        waits.future(done, waits_for=name, why=f"{operation}: self-test", timeout_s=self._bound_s, notice_after_s=None)

    def _synchronise(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _measure_pairs(self, name: str, group: dist.ProcessGroup, members: Sequence[int], device: torch.device) -> None:
        """Measures the bandwidth of every pair, in rounds of disjoint pairs, in both directions at once."""
        if len(members) < 2:
            return
        self._report_stage(f"pairs of {name}")
        own_data = torch.ones(PAIR_BYTES, dtype=torch.uint8, device=device)
        peer_data = torch.empty_like(own_data)
        for pairs in round_robin_rounds(len(members)):
            both = next((pair for pair in pairs if self._rank in (members[pair[0]], members[pair[1]])), None)
            if both is None:
                continue
            peer = members[both[0]] if members[both[1]] == self._rank else members[both[1]]
            seconds = min(self._exchange(name, group, peer, own_data, peer_data) for _ in range(2))
            if self._rank < peer:
                rate = round(PAIR_BYTES / seconds / 1e6, 1)
                _write_line({"rank": self._rank, "communicator": name, "pair": [self._rank, peer], "mb_per_s": rate})

    def _exchange(self, name: str, group: dist.ProcessGroup, peer: int, own_data: Tensor, peer_data: Tensor) -> float:
        began = time.monotonic()
        operations = [dist.P2POp(dist.isend, own_data, peer, group), dist.P2POp(dist.irecv, peer_data, peer, group)]
        for work in dist.batch_isend_irecv(operations):
            self._finish(work, name, f"exchange with rank {peer}")
        self._synchronise(own_data.device)
        return time.monotonic() - began


def bus_rate(operation: str, size: int, seconds: float, members: Sequence[int]) -> float:
    """Megabytes per second of the busiest link: the "bus bandwidth" of nccl-tests, comparable between operations
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

    Args:
        size: bytes of the input (all_reduce, broadcast, reduce_scatter) or of the output (all_gather).
    """
    many = len(members)
    factor = {"all_reduce": 2 * (many - 1) / many, "broadcast": 1.0}.get(operation, (many - 1) / many)
    return factor * size / seconds / 1e6


class CollectiveCase:
    """A collective with its output tensor and the expected result. All values are integers, so sums are exact.

    Value i of member m's input is `(m + 1) * (i mod 1021 + 1)`.
    """

    result: Tensor
    expected: Tensor
    issue: Callable[[dist.ProcessGroup], Any]


def _pattern(size: int, device: torch.device, first: int = 0) -> Tensor:
    return torch.arange(first, first + size, device=device, dtype=torch.int64) % _PERIOD + 1


class AllReduceCase(CollectiveCase):
    def __init__(self, members: list[int], rank: int, size: int, device: torch.device) -> None:
        pattern = _pattern(size, device)
        self.result = pattern * (rank + 1)
        self.expected = pattern * sum(each + 1 for each in members)
        self.issue = lambda group: dist.all_reduce(self.result, group=group, async_op=True)


class AllGatherCase(CollectiveCase):
    def __init__(self, members: list[int], rank: int, size: int, device: torch.device) -> None:
        each = max(1, size // len(members))
        pattern = _pattern(each, device)
        self.result = torch.zeros(len(members) * each, dtype=torch.int64, device=device)
        self.expected = torch.cat([pattern * (member + 1) for member in members])
        own_data = pattern * (rank + 1)
        self.issue = lambda group: _ALL_GATHER(self.result, own_data, group=group, async_op=True)


class ReduceScatterCase(CollectiveCase):
    def __init__(self, members: list[int], rank: int, size: int, device: torch.device) -> None:
        each = max(1, size // len(members))
        index = members.index(rank)
        whole = _pattern(each * len(members), device) * (rank + 1)
        self.result = torch.zeros(each, dtype=torch.int64, device=device)
        self.expected = _pattern(each, device, index * each) * sum(member + 1 for member in members)
        self.issue = lambda group: _REDUCE_SCATTER(self.result, whole, group=group, async_op=True)


class BroadcastCase(CollectiveCase):
    def __init__(self, members: list[int], rank: int, size: int, device: torch.device) -> None:
        pattern = _pattern(size, device)
        root = members[0]
        self.result = pattern * (root + 1) if rank == root else torch.zeros_like(pattern)
        self.expected = pattern * (root + 1)
        self.issue = lambda group: dist.broadcast(self.result, root, group=group, async_op=True)


_CASES: dict[str, Callable[[list[int], int, int, torch.device], CollectiveCase]] = {
    "all_reduce": AllReduceCase,
    "all_gather": AllGatherCase,
    "reduce_scatter": ReduceScatterCase,
    "broadcast": BroadcastCase,
}


if __name__ == "__main__":
    sys.exit(main())
