"""A training job without Lockstep, some ranks of which fail: `torchrun attached_job.py LOOP FAULT CULPRITS FOLDER`.

Every rank trains until a file `go` appears in FOLDER. In the step after that, or at once for `never joins`, the
CULPRITS (comma-separated ranks) do what FAULT says.
"""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).parents[2]
FOREVER_S = 1000.0
READY_STEP = 30
STEP_S = 0.02
HEALTHY_S = 25.0
"""How long a healthy activity takes, on a quiet machine."""
FUNCTIONS = 2000
CALLS = ("skips", "extra", "operation", "shape", "dtype", "uneven", "order")
"""Faults that are wrong calls: of an all_reduce of the loss, or of the end of the loop."""
FUNCTION = """int f{0}(int* a, int n) {{
  int s = {0};
  for (int j = 0; j < n; ++j) {{ s += a[j] * {1} ^ (a[n - j - 1] >> (j & 7)); if (s & {2}) a[j] -= s; }}
  return s;
}}
"""
"""A compiler needs about 10 ms for it."""


class Rows(Dataset[torch.Tensor]):
    """Endless rows; with the fault `loader`, the worker process of the culprit's loader stops giving them."""

    def __init__(self, fault: str, folder: Path, rank: int) -> None:
        self.fault, self.folder, self.rank = fault, folder, rank

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, row: int) -> torch.Tensor:
        if self.fault == "loader" and (self.folder / "go").exists():
            strike(self.folder, self.rank)
            time.sleep(FOREVER_S)
        return torch.full((64,), float(row % 7))


def strike(folder: Path, rank: int) -> None:
    """Writes the time at which the fault happens."""
    _write(folder, f"struck-{rank}", repr(time.time()))


def _write(folder: Path, name: str, text: str) -> None:
    draft = folder / f".{name}"
    draft.write_text(text)
    draft.rename(folder / name)


def fail(fault: str, folder: Path) -> None:
    """Does what a fault does. Returns only from healthy activities."""
    match fault:
        case "sleep" | "two" | "never joins":
            time.sleep(FOREVER_S)
        case "subprocess":
            subprocess.run(["sleep", str(FOREVER_S)], check=True)
        case "lock":
            lock = threading.Lock()
            with lock:
                lock.acquire()
        case "socket":
            server = socket.create_server(("127.0.0.1", 0))
            with socket.create_connection(server.getsockname()) as client:
                client.recv(1)
        case "fifo":
            os.mkfifo(folder / "fifo")
            (folder / "fifo").read_bytes()
        case "hung compiler":
            _build(folder, _program(folder, "c++", f"#!/bin/sh\nexec sleep {FOREVER_S:.0f}\n"))
        case "hung import":
            (folder / "waits_forever.py").write_text(f"import time\ntime.sleep({FOREVER_S})\n")
            sys.path.insert(0, str(folder))
            __import__("waits_forever")
        case "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "spin":
            while True:
                pass
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exits":
            os._exit(0)
        case "raises":
            raise KeyError("advantages")
        case "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
            torch.zeros(1 << 28)
        case "compiles":
            _compile(folder)
        case "builds":
            _build(folder, "g++")
        case _:
            sys.path.insert(0, str(ROOT))
            from benchmarks.soak.activities import ACTS

            ACTS[fault](HEALTHY_S)


def _program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def _compile(folder: Path) -> None:
    """Compiles models with `torch.compile`, in this process and its compiler's processes."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    end = time.monotonic() + HEALTHY_S
    for layers in range(4, 40, 4):
        parts = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(layers)]
        torch.compile(torch.nn.Sequential(*parts))(torch.randn(8, 64)).sum().backward()
        if time.monotonic() > end:
            break


def _build(folder: Path, compiler: str) -> None:
    """Builds an extension: the main thread waits in one line for a compiler that works for tens of seconds."""
    source = folder / "kernels.cpp"
    source.write_text("".join(FUNCTION.format(number, number + 3, number % 7 + 1) for number in range(FUNCTIONS)))
    end = time.monotonic() + HEALTHY_S
    while time.monotonic() < end:
        subprocess.run([compiler, "-O3", "-c", str(source), "-o", str(folder / "kernels.o")], check=True)


def rows(loop: str, fault: str, folder: Path, rank: int) -> Iterator[torch.Tensor]:
    """Batches of 8 rows; with `ddp`, from the worker process of a loader."""
    if loop == "ddp":
        yield from DataLoader(Rows(fault, folder, rank), batch_size=8, num_workers=1)
    while True:
        yield torch.randn(8, 64)


class Communication:
    """The collectives of a step besides the gradients'."""

    def __init__(self) -> None:
        self.pair = [dist.new_group(), dist.new_group()]

    def agree(self, go: bool) -> bool:
        """Whether the fault happens in this step, as rank 0 says."""
        flag = torch.tensor([float(go)] * 2)
        dist.broadcast(flag, 0)
        return bool(flag[0])

    def losses(self, wrong: str) -> None:
        """Reduces the loss, or makes another call than the other ranks."""
        loss = torch.ones(12 if wrong == "shape" else 4, dtype=torch.float64 if wrong == "dtype" else torch.float32)
        if wrong == "operation":
            dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size())], loss)
        elif wrong != "skips":
            dist.all_reduce(loss)
        if wrong == "extra":
            dist.all_reduce(loss)
        for group in reversed(self.pair) if wrong == "order" else self.pair:
            dist.all_reduce(torch.ones(2), group=group)


def main() -> None:
    loop, fault, folder = sys.argv[1], sys.argv[2], Path(sys.argv[4])
    culprits = [int(rank) for rank in sys.argv[3].split(",")]
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    mine = fault if rank in culprits else ""
    _write(folder, f"pid-{rank}", str(os.getpid()))
    if mine == "never joins":
        strike(folder, rank)
        fail(mine, folder)
    elif fault == "never joins":
        _write(folder, f"ready-{rank}", "")
    dist.init_process_group("gloo")
    communication = Communication()
    layer = torch.nn.Linear(64, 64)
    model = DistributedDataParallel(layer) if loop == "ddp" else layer
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    happened = fault == "loader"  # its worker process fails by itself
    for step, batch in enumerate(rows(loop, mine, folder, rank)):
        if step == READY_STEP:
            _write(folder, f"ready-{rank}", "")
        now = not happened and communication.agree((folder / "go").exists())
        happened |= now
        if now and mine:
            strike(folder, rank)
            if mine == "uneven":
                break
            if mine not in CALLS:
                fail(mine, folder)
                _write(folder, f"over-{rank}", "")
        wrong = mine if now else ""
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if loop == "plain":
            dist.all_reduce(layer.weight.grad)
        communication.losses(wrong)
        optimizer.step()
        time.sleep(STEP_S)
    dist.barrier()


if __name__ == "__main__":
    main()
