"""A rank of a small training job with the faults of a case: `python -m benchmarks.faults.rank FOLDER RUN RANK`."""

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.faults import emulated_nccl
from benchmarks.faults.attached_job import strike
from benchmarks.faults.cases import AT_BEGIN, Case
from benchmarks.faults.schedule import FINISH, PLACES, ROOTED, WORLD, Call, members, other
from lockstep.base.wait_state import track_wait
from lockstep.watch.beacon.writer import open_beacon
from lockstep.watch.recorder import recorder

BOUND_S = 120.0
FOREVER_S = 1000.0
DRAIN_S = 1.0
ELSEWHERE = ("checkpoint", "slow disk", "never", "members")
"""Faults that do not happen at a call."""
SILENCE_S = 7.5
"""Seconds of a healthy pause: three times the inactivity after which a verdict is confirmed."""


class Rank:
    def __init__(self, folder: Path, run: str, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.case = Case.of(json.loads((folder / "case.json").read_text()))
        self.fault = self.case.faults.get(rank, "")
        self.own = open_beacon(run, f"policy-{rank}", "policy", rank)
        self.own.stage("begin")
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.step = 0
        self.on_device = self.case.backend == emulated_nccl.NAME

    def run(self) -> None:
        self.join()
        self.own.stage("train")
        while True:
            self.step += 1
            self.own.progress("steps", self.step)
            if self.fault == "uneven" and self.now():
                self.strike()
                break
            self.load()
            self.score()
            for i, call in enumerate(self.case.schedule):
                if members(self.case.groups, call.group, self.rank):
                    self.call(i, call)
            self.synchronize()
            self.save()
        meet(torch.zeros(1), self.groups[WORLD], 0, self.case.world)
        self.synchronize()

    def synchronize(self) -> None:
        """Waits for the device, as reading the loss of a step does, and ends if Lockstep has released this rank."""
        if self.on_device:
            emulated_nccl.device().synchronize()
            recorder.raise_if_stalled()

    def join(self) -> None:
        if self.on_device:
            emulated_nccl.register()
        recorder.install(refuse=self.case.refuse)
        if self.fault == "never":
            self.strike()
            time.sleep(FOREVER_S)
        with track_wait("rendezvous", "the ranks", f"rank {self.rank} joins policy-1", BOUND_S):
            store = dist.FileStore(str(self.folder / "store"), self.case.world)
            bound = timedelta(seconds=BOUND_S)
            dist.init_process_group(
                self.case.backend, store=store, rank=self.rank, world_size=self.case.world, timeout=bound
            )
            for name, each in self.case.groups.items():
                for ranks in () if name == WORLD else each:
                    made = dist.new_group(list(ranks), timeout=bound, group_desc=name)
                    if self.rank in ranks:
                        self.groups[name] = made
        assert dist.group.WORLD is not None
        self.groups[WORLD] = dist.group.WORLD
        if self.case.fault == "members":
            self.later()

    def later(self) -> None:
        """Create a communicator of all ranks; the culprit passes itself as the only member."""
        dist.barrier()
        self.synchronize()
        ranks = list(range(self.case.world))
        if self.fault:
            self.strike()
            ranks = [self.rank, (self.rank + 1) % self.case.world] if self.case.world > 2 else [self.rank]
        with track_wait("rendezvous", "the ranks", f"rank {self.rank} joins late-1", BOUND_S):
            late = dist.new_group(ranks, timeout=timedelta(seconds=BOUND_S), group_desc="late")
        dist.all_reduce(torch.ones(4), group=late)
        self.synchronize()

    def now(self) -> bool:
        return bool(self.fault) and self.step == self.case.step

    def strike(self) -> None:
        """Write the time at which the fault happens."""
        strike(self.folder, self.rank)

    def load(self) -> None:
        """The data loader."""
        if self.now() and self.fault == "loader":
            self.strike()
            time.sleep(FOREVER_S)
        time.sleep(0.01)

    def score(self) -> None:
        """The reward."""
        self.own.progress("samples", 4 * self.step)
        if self.now() and self.fault in AT_BEGIN:
            self.reward()
        elif self.fault == "slow":
            until = time.monotonic() + 0.7
            while time.monotonic() < until:
                torch.ones(64, 64) @ torch.ones(64, 64)
        time.sleep(0.01)

    def reward(self) -> None:
        if self.fault == "loader":
            return
        self.strike()
        if self.fault == "reward":
            time.sleep(FOREVER_S)
        elif self.fault == "gil":
            re.match(r"(a+)+$", "a" * 60 + "b")
        elif self.fault == "spins":
            while True:
                pass
        elif self.fault == "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
            torch.zeros(1 << 28)
        elif self.fault.startswith("tail"):
            self.tail(self.fault.removeprefix("tail "))

    def tail(self, moves: str) -> None:
        """A long pause without collectives in which the process is active in one way: `moves` is cpu, io or counter."""
        until = time.monotonic() + SILENCE_S
        count = 0
        with (self.folder / f"scratch-{self.rank}").open("wb", buffering=0) as scratch:
            while time.monotonic() < until:
                count += 1
                if moves == "cpu":
                    torch.ones(128, 128) @ torch.ones(128, 128)
                elif moves == "io":
                    scratch.write(bytes(64 << 10))
                    time.sleep(0.1)
                else:
                    self.own.progress("tokens", count)
                    time.sleep(0.4)

    def save(self) -> None:
        """The checkpoint, in every step."""
        self.own.stage("checkpoint")
        if self.now() and self.fault == "checkpoint":
            self.strike()
            time.sleep(FOREVER_S)
        if self.now() and self.fault == "slow disk":
            self.strike()
            with (self.folder / f"checkpoint-{self.rank}").open("wb", buffering=0) as file:
                for _ in range(int(SILENCE_S / 0.25)):
                    file.write(bytes(128 << 10))
                    time.sleep(0.25)
        self.own.stage("train")

    def call(self, i: int, call: Call) -> None:
        """Make a call of the schedule, or the culprit's fault instead."""
        fault = self.fault if self.now() else ""
        if fault == "order" and i == self.case.at:
            self.strike()
            self.issue(self.case.schedule[i + 1])
            self.issue(call)
        elif fault == "order" and i == self.case.at + 1:
            return
        elif fault and i == self.case.at and fault not in AT_BEGIN:
            self.wrong(fault, call)
        else:
            self.issue(call)

    def wrong(self, fault: str, call: Call) -> None:
        if fault not in ELSEWHERE:
            self.strike()
        if fault == "stopped":
            if self.on_device:
                emulated_nccl.device().drain(DRAIN_S)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "exits":
            sys.exit(0)
        elif fault == "raises":
            raise KeyError("advantages")
        self.disturb_device(fault, call)
        if fault == "extra":
            self.issue(call)
        if fault == "branch" and self.rank == next(iter(self.case.faults)):
            self.issue(other(call, self.case.backend))
        if fault == "operation":
            self.issue(other(call, self.case.backend))
        elif fault == "shape":
            self.issue(call, times=3)
        elif fault == "dtype":
            self.issue(call, dtype=torch.float64)
        elif fault == "root":
            self.issue(call, root=1)
        elif fault != "skips":
            self.issue(call)

    def disturb_device(self, fault: str, call: Call) -> None:
        """Launches the kernel of a fault of the device, or makes the call's operation one that does not end."""
        if fault.endswith("kernel"):
            kernel = compute if fault == "slow kernel" else threading.Event().wait
            emulated_nccl.device().compute.launch(kernel)
        elif fault == "lag":
            group = self.groups[call.group]
            assert isinstance(group, emulated_nccl.EmulatedNccl)
            group.never_end()

    def issue(self, call: Call, times: int = 1, dtype: torch.dtype = torch.float32, root: int = 0) -> None:
        group, who = self.groups[call.group], members(self.case.groups, call.group, self.rank)
        size = PLACES[call.place].size * times
        LINES[call.place](torch.ones(size, dtype=dtype), group, who[root], len(who))


def compute() -> None:
    """A kernel that takes as long as a healthy pause."""
    until = time.monotonic() + SILENCE_S
    while time.monotonic() < until:
        torch.ones(128, 128) @ torch.ones(128, 128)


def gradients(tensor: torch.Tensor, group: dist.ProcessGroup, root: int, size: int) -> None:
    dist.all_reduce(tensor, group=group)


def norm(tensor: torch.Tensor, group: dist.ProcessGroup, root: int, size: int) -> None:
    dist.all_reduce(tensor, group=group)


def loss(tensor: torch.Tensor, group: dist.ProcessGroup, root: int, size: int) -> None:
    dist.all_reduce(tensor, group=group)


def weights(tensor: torch.Tensor, group: dist.ProcessGroup, root: int, size: int) -> None:
    dist.broadcast(tensor, root, group=group)


def tokens(tensor: torch.Tensor, group: dist.ProcessGroup, root: int, size: int) -> None:
    dist.all_gather_into_tensor(tensor.repeat(size), tensor, group=group)


def metrics(tensor: torch.Tensor, group: dist.ProcessGroup, root: int, size: int) -> None:
    dist.reduce(tensor, root, group=group)


def meet(tensor: torch.Tensor, group: dist.ProcessGroup, root: int, size: int) -> None:
    dist.barrier(group=group)


LINES = {each.__name__: each for each in (gradients, norm, loss, weights, tokens, metrics, meet)}
assert LINES.keys() == PLACES.keys() and FINISH in LINES and {*ROOTED} < LINES.keys()


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[3])
    torch.set_num_threads(1)
    try:
        Rank(folder, sys.argv[2], rank).run()
    except RuntimeError as error:
        draft = folder / f".ended-{rank}"
        draft.write_text(json.dumps({"at": time.time(), "type": type(error).__name__, "text": str(error)}))
        draft.rename(folder / f"ended-{rank}")
        raise


if __name__ == "__main__":
    main()
