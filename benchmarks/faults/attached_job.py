"""A training job without Lockstep, one rank of which fails: `torchrun attached_job.py LOOP FAULT RANK FOLDER`."""

import os
import re
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

FOREVER_S = 1000.0
FAULT_STEP = 30
STEP_S = 0.02


class Rows(Dataset[torch.Tensor]):
    """Endless rows; with the fault `loader`, the worker process of the culprit's loader stops giving them."""

    def __init__(self, fault: str, folder: Path, rank: int) -> None:
        self.fault, self.folder, self.rank = fault, folder, rank

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, row: int) -> torch.Tensor:
        if self.fault == "loader" and row == 8 * FAULT_STEP:
            strike(self.folder, self.rank)
            time.sleep(FOREVER_S)
        return torch.full((64,), float(row % 7))


def strike(folder: Path, rank: int) -> None:
    """Writes the time at which the fault happens."""
    draft = folder / f".struck-{rank}"
    draft.write_text(repr(time.time()))
    draft.rename(folder / f"struck-{rank}")


def fail(fault: str) -> None:
    """Does what a fault does."""
    match fault:
        case "sleep":
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
        case "pipe":
            os.read(os.pipe()[0], 1)
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


def batches(loop: str, fault: str, folder: Path, rank: int) -> Iterator[torch.Tensor]:
    """Batches of 8 rows; with `ddp`, from the worker process of a loader."""
    rows = Rows(fault, folder, rank)
    if loop == "ddp":
        yield from DataLoader(rows, batch_size=8, num_workers=1)
    while True:
        yield torch.randn(8, 64)


def main() -> None:
    loop, fault, culprit, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = fault if rank == culprit else ""
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    layer = torch.nn.Linear(64, 64)
    model = DistributedDataParallel(layer) if loop == "ddp" else layer
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    for step, batch in enumerate(batches(loop, mine, folder, rank)):
        if step == FAULT_STEP and mine not in ("", "loader"):
            strike(folder, rank)
            fail(mine)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if loop == "plain":
            dist.all_reduce(layer.weight.grad)
        optimizer.step()
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
