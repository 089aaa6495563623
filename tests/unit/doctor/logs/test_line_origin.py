"""Origins of lines and files, launcher labels, and ranks by pid."""

from pathlib import Path

import pytest

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.doctor.logs.line_origin import (
    LineOrigin,
    label_resolver,
    origin_of_file,
    parse_prefixes,
    ranks_by_label,
    ranks_by_pid,
)
from lockstep.doctor.logs.timestamps import TimestampParser


@pytest.mark.parametrize(
    ("line", "origin", "rest"),
    [
        ("[rank3]: RuntimeError: x", LineOrigin(3), " RuntimeError: x"),
        ("[default4]:[rank12]:   File", LineOrigin(12, local_rank=4, label=4), "   File"),
        ("20251118-05:30:00 [rank 3] words", LineOrigin(3), " words"),
        ("[default4]:words", LineOrigin(4, local_rank=4, label=4, rank_is_label=True), "words"),
        ("0: [rank3]: words", LineOrigin(3, label=0), " words"),
        ("[1,0]<stderr>:[rank3]: words", LineOrigin(3, label=0), " words"),
        ("[1,mpirank:4,algo-1]<stderr>:words", LineOrigin(4, host="algo-1", label=4, rank_is_label=True), "words"),
        ("trainer-1  | [rank3]: words", LineOrigin(3, host="trainer-1"), " words"),
        ("trainer-1  | words", LineOrigin(host="trainer-1"), "words"),
        ("sft-worker-1 pytorch [rank3]: words", LineOrigin(3, host="sft-worker-1"), " words"),
        ("2025-06-11T10:00:00.123456789Z stderr F [rank3]: words", LineOrigin(3), " words"),
        ("> [rank3]: words", LineOrigin(3), " words"),
        ("[2024-04-18 15:55:06] CRITICAL [lib.util:158, rank=6] words", LineOrigin(6), " words"),
        (
            "(EngineCore pid=31) (RayWorkerWrapper pid=418, ip=10.7.1.21) [rank8]: words",
            LineOrigin(8, host="10.7.1.21", role="RayWorkerWrapper", pid=418),
            " words",
        ),
        ("(WorkerDict pid=41, ip=10.0.0.3) words", LineOrigin(host="10.0.0.3", role="WorkerDict", pid=41), " words"),
        ("(Worker_TP1 pid=7) INFO x", LineOrigin(1, role="Worker_TP1", pid=7), " x"),
        ("2026-11-21 14:43:14 ERROR Traceback", LineOrigin(), " Traceback"),
        ("2026-11-21 14:43:14 ERROR rank 3 Traceback", LineOrigin(3), " Traceback"),
        ("14:43:14 rank 3 words", LineOrigin(3), " words"),
        (
            "(PolicyActor pid=7, ip=10.0.0.3) INFO rank=3 local_rank=1 ready",
            LineOrigin(3, host="10.0.0.3", role="PolicyActor", pid=7),
            None,
        ),
        ("14:43:14 rank 3 timed out; the others wait", LineOrigin(), None),
        ("14:43:14 rank 3 of 8 is up", LineOrigin(), None),
        ("[1,3]<stderr>:words", LineOrigin(3, label=3, rank_is_label=True), "words"),
        ("12: words", LineOrigin(12, label=12, rank_is_label=True), "words"),
        ("gpu-node-07: words", LineOrigin(host="gpu-node-07"), "words"),
        ("[cn0029] + ray start", LineOrigin(host="cn0029"), " + ray start"),
        (
            "h100-54:1033461:1034250 [7] NCCL INFO x",
            LineOrigin(host="h100-54", pid=1033461, local_rank=7),
            " NCCL INFO x",
        ),
        ("Apr 13 14:01:40 lab-gpu10 kernel: [34.5] NVRM: x", LineOrigin(host="lab-gpu10"), " NVRM: x"),
        ("Apr 13 14:01:40 n4 fit[88]: [rank1]:   File", LineOrigin(1, host="n4"), "   File"),
        ("2026-11-21T14:43:14+0000 n4 fit[88]: words", LineOrigin(host="n4"), " words"),
        ("lab_fit.2.k7-f@node-4    | [rank1]: words", LineOrigin(1, host="node-4"), " words"),
        (
            'lab_fit.1.k7-f@node-3    | {"rank": 0, "event": "x"}',
            LineOrigin(0, host="node-3"),
            '{"rank": 0, "event": "x"}',
        ),
        ("2026-11-21 14:43:14,513 words", LineOrigin(), " words"),
        ("[2026-11-21 14:43:14,513][pretrain][ERROR] - [stage 1] words", LineOrigin(1), " words"),
        ("epoch 1: words", LineOrigin(), "epoch 1: words"),
        ("2024-08-18 05:00:00 - INFO - rank 5 - saving", LineOrigin(5), "saving"),
        ("2024-08-18 05:00:00 - trainer.loop - ERROR - [rank 5] words", LineOrigin(5), " words"),
        ("2025-08-18 05:30:00 | ERROR | rank=3 | words", LineOrigin(3), "words"),
        ("2025-08-18 05:30:00.123 | WARNING  | lib.trainer:run:42 - words", LineOrigin(), "words"),
        ("2024-11-30 03:01:10,402 ERROR worker.py:421 -- [rank3] words", LineOrigin(3), " words"),
        ("08/18/2025 05:30:00 - INFO - __main__ - words", LineOrigin(), "words"),
        ("[2024-08-18 05:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 6] words", LineOrigin(6), " words"),
        ("ERROR:__main__:rank 4: words", LineOrigin(4), " words"),
        ("Rank 3 | words", LineOrigin(3), "words"),
        ("{rank=3} words", LineOrigin(3), " words"),
        ("[R3] words", LineOrigin(3), " words"),
        ("(rank: 3) words", LineOrigin(3), " words"),
        ("<rank3> words", LineOrigin(3), " words"),
        ("[rank 3/8] words", LineOrigin(3), " words"),
        ("[gpu-n7/rank3] words", LineOrigin(3, host="gpu-n7"), " words"),
        ("trainer[2]: words", LineOrigin(2), " words"),
        ("[pod/sft-worker-1/pytorch] words", LineOrigin(host="sft-worker-1"), " words"),
        ("time=2025-08-18T05:30:00Z level=error rank=3 msg=words", LineOrigin(3), None),
        ('{"ts": 1755495000, "hostname": "gn7", "global_rank": 3, "msg": "words"}', LineOrigin(3, host="gn7"), None),
        ("ERROR:trainer.loop:rank3: words", LineOrigin(3), " words"),
        ("ERROR:2025-08-18 05:30:00,123:[Rank 3] words", LineOrigin(3), " words"),
        ("ERROR 2025-08-18 05:30:00,123 [R3] words", LineOrigin(3), " words"),
        ("E 2025-08-18 05:30:00 rank3: words", LineOrigin(3), " words"),
        ("E0818 05:30:00.123456 4711 trainer.py:42] [rank 3] words", LineOrigin(3, pid=4711), " words"),
        ("[NeMo E 2025-08-18 05:30:00 trainer:42] rank 3: words", LineOrigin(3), " words"),
        ("[titan] 2025-08-18 05:30:00,123 - root - ERROR - [rank 3] words", LineOrigin(3), " words"),
        ("[2025-08-18 05:30:00 DP1 TP3] words", LineOrigin(3), " words"),
        ("[2025-08-18 05:30:00 rank3] words", LineOrigin(3), " words"),
        ("gn1/rank3: words", LineOrigin(3, host="gn1"), " words"),
        ("[gn1 rank 3] words", LineOrigin(3, host="gn1"), " words"),
        ("[rank 3 pid 77] words", LineOrigin(3, pid=77), " words"),
        ("rank 3 (pid 77): words", LineOrigin(3, pid=77), " words"),
        ("Rank 3 failed to pass monitoredBarrier", LineOrigin(), None),
        ("Process 4120: python train.py", LineOrigin(), None),
        ("[local rank 3] words", LineOrigin(), None),
        ("(TP rank 3) words", LineOrigin(), None),
        ("[pipeline rank 1] words", LineOrigin(), None),
        ("rank 3 of 8 nodes have a rank", LineOrigin(), None),
    ],
)
def test_prefixes_of_a_line(line: str, origin: LineOrigin, rest: str | None) -> None:
    prefix = parse_prefixes(line, TimestampParser())
    assert prefix.origin == origin
    assert rest is None or line[prefix.at :] == rest


def test_the_rank_of_a_process_group() -> None:
    line = "[rank3]:[E922 16:05:46.606167618 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught"
    assert parse_prefixes(line, TimestampParser()).origin.rank == 3
    assert parse_prefixes("[PG ID 0 PG GUID 0(default_pg) Rank 7] Timeout at", TimestampParser()).origin.rank == 7


@pytest.mark.parametrize(
    ("name", "origin", "node"),
    [
        ("rank_3.log", LineOrigin(3), None),
        ("logs_rank3.txt", LineOrigin(3), None),
        ("none_x/attempt_0/3/stderr.log", LineOrigin(3), None),
        ("worker-2.out", LineOrigin(2, host="worker-2"), None),
        ("node_2.log", LineOrigin(), 2),
        ("mlnode-048.log", LineOrigin(host="mlnode-048"), None),
        ("slurm-4711.out", LineOrigin(), None),
        ("train.log", LineOrigin(), None),
        ("train-22-worker-4/raylet.out", LineOrigin(4, host="train-22-worker-4"), None),
        ("dmesg-worker-4.log", LineOrigin(host="worker-4"), None),
    ],
)
def test_origin_of_a_file(name: str, origin: LineOrigin, node: int | None) -> None:
    found, number = origin_of_file(name)
    assert (found.rank, number) == (origin.rank, node)


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

    when = TimestampParser().read(line)
    assert when is not None
    assert time.strftime("%H:%M:%S", time.gmtime(when)) == clock


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("dmesg_cn041.log", "cn041"),
        ("dmesg-cn041.log", "cn041"),
        ("cn041-dmesg.log", "cn041"),
        ("dmesg.node-c.txt", "node-c"),
        ("kern.log-gpu12.gz", "gpu12"),
        ("gpu12_syslog.1", "gpu12"),
        ("journal-train-7.txt", "train-7"),
        ("dmesg-10.4.0.7.log", "10.4.0.7"),
        ("10.4.0.7/rank.log", "10.4.0.7"),
        ("cn041/dmesg.log", "cn041"),
        ("nvidia-smi-cn041.txt", "cn041"),
        ("cn041_nvidia-smi.csv", "cn041"),
        ("dmesg_after.log", ""),
        ("dmesg-job4711.log", ""),
        ("dmesg.log.1", ""),
        ("dmesg_T_gn12.txt", "gn12"),
        ("gpu-12.log", "gpu-12"),
        ("gn12_rank3.log", "gn12"),
        ("gn12.rank3.log", "gn12"),
        ("rank-3-of-8.log", ""),
        ("rank.3/stdout", ""),
        ("raylet-0.log", ""),
        ("gn050/raylet-1.out", "gn050"),
        ("raylet-gn12.log", "gn12"),
        ("python-core-worker-12.log", ""),
        ("job-17/console.log", ""),
        ("node_gx-102.log", "gx-102"),
    ],
)
def test_the_host_in_the_name_of_a_file(name: str, host: str) -> None:
    assert origin_of_file(name)[0].host == host


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("08/18/2025 05:30:00 - INFO - words", 1755495000.0),
        ("08/18/2025, 05:30:00.250 words", 1755495000.25),
        ("Mon Aug 18 05:30:00 PM UTC 2025", 1755538200.0),
        ("Mon Aug 18 12:30:00 AM UTC 2025", 1755477000.0),
        ('{"ts": 1755495000, "msg": "words"}', 1755495000.0),
        ('{"ts": 1755495000250, "msg": "words"}', 1755495000.25),
        ("2025-08-18T07:30:00+02:00 words", 1755495000.0),
    ],
)
def test_forms_of_times(line: str, seconds: float) -> None:
    assert TimestampParser().read(line) == seconds


TRACEBACK = """[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/app/train.py", line 12, in step
[rank{rank}]:     loss = batch["labels"].sum()
[rank{rank}]: KeyError: 'labels'
"""


def test_labels_are_ranks_unless_a_line_contradicts() -> None:
    origin = LineOrigin(3, label=3)
    assert label_resolver(ranks_by_label([origin]))(LineOrigin(2, label=2, rank_is_label=True)) == LineOrigin(2)
    tasks = label_resolver(ranks_by_label([origin, LineOrigin(9, label=1)]))
    assert tasks(origin) == LineOrigin(3)
    assert tasks(LineOrigin(1, label=1, rank_is_label=True)) == LineOrigin(9)
    assert tasks(LineOrigin(2, label=2, rank_is_label=True)) == LineOrigin(label=2)
    assert label_resolver(ranks_by_label([LineOrigin(2, label=0), LineOrigin(3, label=0)]))(
        LineOrigin(0, label=0, rank_is_label=True)
    ) == LineOrigin(label=0)
    shared_rank = label_resolver(
        ranks_by_label([LineOrigin(0, label=0), LineOrigin(0, label=1), LineOrigin(0, label=2)])
    )
    assert [shared_rank(LineOrigin(0, label=2)), shared_rank(LineOrigin(5, label=5, rank_is_label=True))] == [
        LineOrigin(2),
        LineOrigin(5),
    ]


def _job(folder: Path, label: str) -> Path:
    lines = [*(f"step {each} loss 1.{each}" for each in range(20)), *TRACEBACK.format(rank=11).splitlines()]
    (folder / "job.out").write_text("".join(f"{label}{each}\n" for each in lines))
    return folder


def test_an_exception_after_a_task_label_is_the_exception_of_the_rank(tmp_path: Path) -> None:
    for number, label in enumerate(("1: ", "[1,1]<stderr>:", "[default3]:", "trainer-1  | ", "(Actor pid=7) ")):
        folder = tmp_path / str(number)
        folder.mkdir()
        verdict = explain([str(_job(folder, label))]).verdict
        assert (verdict.cause, [each.rank for each in verdict.culprits]) == ("rank_exception_masked", [11]), label


def test_explicit_ranks_take_precedence() -> None:
    fields = [{"pid": "7", "rank": "3", "local": "1"}, {"pid": "8", "local": "2"}, {"code": "1"}]
    reports = [(LineOrigin(), each) for each in fields]
    assert ranks_by_pid(reports, [LineOrigin(5, pid=7)], one_host=True) == {7: 3, 8: 2}
    assert ranks_by_pid(reports, [], one_host=False) == {7: 3}


def test_a_pid_shared_by_two_ranks_is_ignored() -> None:
    origins = [LineOrigin(1, pid=50), LineOrigin(2, pid=51), LineOrigin(6, pid=51), LineOrigin(pid=52), LineOrigin(4)]
    assert ranks_by_pid([], origins, one_host=False) == {50: 1}
