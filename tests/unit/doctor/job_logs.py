"""Small synthetic logs of jobs, in the formats of launchers and frameworks."""

from collections.abc import Sequence
from pathlib import Path

TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"
)
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:31133."


def steps(rank: int, count: int, start: int = 0) -> list[str]:
    """Returns step counters of a rank, one per second."""
    return [f"2026-11-21 14:{10 + at // 60:02d}:{at % 60:02d},000 [rank {rank}] INFO step {at} loss 0.5"
            for at in range(start, start + count)]  # fmt: skip


def raised(rank: int, last: str, *frames: tuple[str, int, str, str]) -> list[str]:
    """Returns a traceback as a rank of torchrun prints it. A frame is file, line, function and source."""
    lines = ["Traceback (most recent call last):"]
    for file, line, function, source in frames or (("/home/u/train.py", 12, "step", "x = f(y)"),):
        lines += [f'  File "{file}", line {line}, in {function}', f"    {source}"]
    return [f"[rank{rank}]: {line}" for line in [*lines, last]]


def waited(rank: int, operation: str, *, line: int, function: str = "train", last: str = TIMED_OUT) -> list[str]:
    """Returns the traceback of a rank that waited in a collective."""
    return raised(
        rank, last, ("/home/u/train.py", 100, "<module>", "main()"),
        ("/home/u/train.py", 80 if function == "train" else line, "main", f"{function}()"),
        ("/home/u/train.py", line, function, f"dist.{operation}(x)"),
        ("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252, operation, "work.wait()"),
    )  # fmt: skip


def watchdog(rank: int, seq: int, operation: str = "ALLREDUCE", numel: int = 1000, at: str = "14:30:00") -> list[str]:
    """Returns the report of a watchdog about a timeout."""
    stamp = f"[rank{rank}]:[E1121 {at}.000000000 ProcessGroupNCCL.cpp:629]"
    message = (
        f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={operation}, NumelIn={numel}, "
        f"NumelOut={numel}, Timeout(ms)=600000) ran for 600021 milliseconds before timing out."
    )
    return [f"{stamp} [Rank {rank}] {message}"]


def state(rank: int, enqueued: int, completed: int, at: str = "14:30:01") -> list[str]:
    """Returns the report of a rank about its process group after another rank timed out."""
    return [
        f"[rank{rank}]:[E1121 {at}.000000000 ProcessGroupNCCL.cpp:1681] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        "Received a dump signal due to a collective timeout from rank 0 and we will try our best to dump the debug "
        f"info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    ]


def write(folder: Path, **files: Sequence[str]) -> str:
    """Writes files by name (`a__b` means `a/b.log`); returns the folder as `explain` expects it."""
    for name, lines in files.items():
        path = folder / (name.replace("__", "/") + ".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return str(folder)
