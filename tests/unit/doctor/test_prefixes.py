"""Who says a line."""

import pytest

from lockstep.doctor.prefixes import Who, of_file, read
from lockstep.doctor.times import Clock


@pytest.mark.parametrize(
    ("line", "who", "rest"),
    [
        ("[rank3]: RuntimeError: x", Who(3), " RuntimeError: x"),
        ("[default4]:[rank4]:   File", Who(4), "   File"),
        ("(WorkerDict pid=41, ip=10.0.0.3) words", Who(host="10.0.0.3", role="WorkerDict", pid=41), " words"),
        ("(Worker_TP1 pid=7) INFO x", Who(1, role="Worker_TP1", pid=7), " INFO x"),
        ("[1,3]<stderr>:words", Who(3), "words"),
        ("12: words", Who(12), "words"),
        ("gpu-node-07: words", Who(host="gpu-node-07"), "words"),
        ("[cn0029] + ray start", Who(host="cn0029"), " + ray start"),
        ("h100-54:1033461:1034250 [7] NCCL INFO x", Who(host="h100-54", pid=1033461, local=7), " NCCL INFO x"),
        ("Apr 13 14:01:40 lab-gpu10 kernel: [34.5] NVRM: x", Who(host="lab-gpu10"), " NVRM: x"),
        ("2026-11-21 14:43:14,513 words", Who(), " words"),
        ("[2026-11-21 14:43:14,513][pretrain][ERROR] - [stage 1] words", Who(1), " words"),
        ("epoch 1: words", Who(), "epoch 1: words"),
    ],
)
def test_prefixes_of_a_line(line: str, who: Who, rest: str) -> None:
    said = read(line, Clock())
    assert (said.who, line[said.at :]) == (who, rest)


def test_the_rank_of_a_process_group() -> None:
    line = "[rank3]:[E922 16:05:46.606167618 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught"
    assert read(line, Clock()).who.rank == 3
    assert read("[PG ID 0 PG GUID 0(default_pg) Rank 7] Timeout at", Clock()).who.rank == 7


@pytest.mark.parametrize(
    ("name", "who", "node"),
    [
        ("rank_3.log", Who(3), None),
        ("logs_rank3.txt", Who(3), None),
        ("none_x/attempt_0/3/stderr.log", Who(3), None),
        ("worker-2.out", Who(2, host="worker-2"), None),
        ("node_2.log", Who(), 2),
        ("mlnode-048.log", Who(host="mlnode-048"), None),
        ("slurm-4711.out", Who(), None),
        ("train.log", Who(), None),
        ("train-22-worker-4/raylet.out", Who(4, host="train-22-worker-4"), None),
    ],
)
def test_who_a_file_belongs_to(name: str, who: Who, node: int | None) -> None:
    found, number = of_file(name)
    assert (found.rank, number) == (who.rank, node)


@pytest.mark.parametrize(
    ("line", "clock"),
    [
        ("2026-11-21 14:43:14,513 x", "14:43:14"),
        ("2024-04-05T17:11:53.332630487Z x", "17:11:53"),
        ("[rank0]:[W611 18:08:04.172014489 x.cpp:1] y", "18:08:04"),
        ("W0414 08:43:38.294000 773414 torch/x.py:759] y", "08:43:38"),
        ("Apr 13 14:01:40 host kernel: y", "14:01:40"),
        ("Wed Apr 16 06:14:06 2025", "06:14:06"),
        ("INFO 06-11 18:06:24 [block_pool.py:263] y", "18:06:24"),
        ('{"t": 1795271409.576, "rank": 1}', "14:30:09"),
    ],
)
def test_times(line: str, clock: str) -> None:
    import time

    when = Clock().read(line)
    assert when is not None
    assert time.strftime("%H:%M:%S", time.gmtime(when)) == clock
