"""How long `lockstep explain --html` takes for a folder with a log per rank: `python -m benchmarks.rank_logs [RANKS]`.

Each log has 192 lines; one rank raises an exception and the others time out in a collective. Printed are CPU seconds,
peak memory of the process and size of the page; the time by the clock depends on what else the machine does.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

RANKS, STEPS = 1000, 190


@dataclass(frozen=True, slots=True)
class RankLogsCost:
    """What one command took.

    Attributes:
        printed: Its standard output.
    """

    cpu_s: float
    peak_mib: float
    log_bytes: int
    page_bytes: int
    printed: str


def write_rank_logs(folder: Path, ranks: int, raising: int) -> int:
    """Writes a log per rank, of which rank `raising` raises an exception; returns the bytes written."""
    folder.mkdir(parents=True)
    total = 0
    for rank in range(ranks):
        lines = [f"2026-11-21 14:00:{rank % 60:02d},000 [rank {rank}] INFO host node-{rank // 8} ready"]
        lines += [
            f"2026-11-21 14:{10 + step // 60:02d}:{step % 60:02d},{rank % 1000:03d} [rank {rank}] INFO step {step} "
            "loss 0.5 grad 1.2 tokens 4096"
            for step in range(STEPS)
        ]
        if rank == raising:
            frames = [
                "Traceback (most recent call last):",
                '  File "/home/u/train.py", line 88, in step',
                "    x = t[k]",
            ]
            lines += [f"[rank{rank}]: {line}" for line in [*frames, "KeyError: 'answer'"]]
        else:
            lines.append(
                f"[rank{rank}]:[E1121 14:23:30.000000000 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught "
                "collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=1000, NumelOut=1000, "
                "Timeout(ms)=600000) ran for 600021 milliseconds before timing out."
            )
        text = "\n".join(lines) + "\n"
        total += len(text)
        (folder / f"rank_{rank}.log").write_text(text, encoding="utf-8")
    return total


_COMMAND = """
import pathlib, resource, sys
from lockstep.cli import app
try:
    app(sys.argv[2:])
finally:
    own = resource.getrusage(resource.RUSAGE_SELF)
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    pathlib.Path(sys.argv[1]).write_text(f"{own.ru_utime + own.ru_stime} {peak}")
"""
"""The command, which notes its CPU seconds and peak memory itself: `ru_maxrss` would include that of the process which
started it."""


def measure(ranks: int) -> RankLogsCost:
    """Runs the command on a new folder, in its own process."""
    with tempfile.TemporaryDirectory() as name:
        folder, page, noted = Path(name) / "logs", Path(name) / "answer.html", Path(name) / "noted"
        size = write_rank_logs(folder, ranks, raising=ranks // 2)
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, str(noted), "explain", str(folder), "--html", str(page)],
            capture_output=True, text=True, timeout=580, check=True,
        )  # fmt: skip
        cpu_s, peak_kib = map(float, noted.read_text().split())
        return RankLogsCost(cpu_s, peak_kib / 1024, size, page.stat().st_size, done.stdout)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else RANKS
    cost = measure(count)
    sys.stdout.write(
        f"{count} logs, {cost.log_bytes / 1e6:.1f} MB: {cost.cpu_s:.1f} CPU seconds, "
        f"peak memory {cost.peak_mib:.0f} MiB, page {cost.page_bytes / 1e6:.1f} MB\n"
    )
