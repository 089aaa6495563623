"""Candidates from the structure of a job."""

from pathlib import Path

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.watch.diagnosis.verdict import Verdict
from tests.unit.doctor.job_logs import LOST, TIMED_OUT, raised, state, steps, waited, watchdog, write


def judged(folder: Path, **files: list[str]) -> Verdict:
    return explain([write(folder, **files)]).verdict


def ranks(verdict: Verdict) -> list[int | None]:
    return [each.rank for each in verdict.culprits]


def test_a_rank_that_waits_in_another_call_is_named(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        rank0=[*steps(0, 40), *waited(0, "all_reduce", line=54)],
        rank1=[*steps(1, 40), *waited(1, "all_reduce", line=54)],
        rank2=[*steps(2, 36), *waited(2, "barrier", line=71)],
    )
    assert ranks(verdict) == [2]
    assert {verdict.cause, verdict.alternatives[0].what} == {"rank_divergent_branch", "uneven_data"}
    assert verdict.collective is not None and verdict.collective.operation == "allreduce"
    assert {each.file for each in verdict.evidence} >= {"rank2.log"}


def test_ranks_in_another_branch_of_the_same_step_diverged(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        rank0=[*steps(0, 40), *waited(0, "all_reduce", line=30, function="dense_first")],
        rank1=[*steps(1, 40), *waited(1, "all_reduce", line=20, function="sparse_first")],
        rank2=[*steps(2, 40), *waited(2, "all_reduce", line=30, function="dense_first")],
    )
    assert verdict.cause == "rank_divergent_branch" and ranks(verdict) == [1]


def test_a_rank_that_still_tokenises(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        rank0=waited(0, "barrier", line=33, function="load"),
        rank1=waited(1, "barrier", line=33, function="load"),
        rank2=[f"Tokenizing train split: {at}%|##| {at}/100 [00:{at}<00:10, 8it/s]" for at in range(10, 60, 10)],
    )
    assert verdict.cause == "slow_rank_preprocess" and ranks(verdict) == [2]


def test_a_rank_that_saves_a_checkpoint(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        rank0=[*steps(0, 20), "2026-11-21 14:11:00,000 saving checkpoint to out/step_20"],
        rank1=[*steps(1, 20), *waited(1, "all_reduce", line=54)],
        rank2=[*steps(2, 20), *waited(2, "all_reduce", line=54)],
    )
    assert verdict.cause == "checkpoint_timeout" and ranks(verdict) == [0]


def test_the_stack_of_a_silent_rank_shows_its_activity(tmp_path: Path) -> None:
    stack = ['Process 77: python train.py', 'Thread 77 (idle): "MainThread"', "    write (torch/serialization.py:8)",
             "    save_checkpoint (main.py:148)", "    main (main.py:139)"]  # fmt: skip
    verdict = judged(
        tmp_path,
        rank0=steps(0, 20),
        rank1=[*steps(1, 20), *waited(1, "all_reduce", line=54)],
        pyspy_rank0=stack,
    )
    assert verdict.cause == "checkpoint_timeout" and ranks(verdict) == [0]


def test_a_rank_that_is_behind_never_entered(tmp_path: Path) -> None:
    lines = [line for rank in range(4) for line in steps(rank, 8)]
    lines += watchdog(0, 9, "ALLGATHER") + watchdog(1, 9, "ALLGATHER")
    lines += state(0, 9, 8) + state(1, 9, 8) + state(2, 8, 8) + state(3, 8, 8)
    verdict = judged(tmp_path, train=lines)
    assert verdict.cause == "rank_divergent_branch" and ranks(verdict) == [2, 3]
    assert verdict.collective is not None and verdict.collective.operation == "allgather"


def test_different_sizes_at_the_same_sequence_number(tmp_path: Path) -> None:
    lines = [line for rank in range(2) for line in steps(rank, 9)]
    verdict = judged(tmp_path, train=[*lines, *watchdog(0, 9, numel=94705057), *watchdog(1, 9, numel=1)])
    assert verdict.cause in ("uneven_data", "rank_divergent_branch")
    assert verdict.confidence < 0.8


def test_all_ranks_of_a_host_in_the_first_collective(tmp_path: Path) -> None:
    lines = watchdog(0, 1) + watchdog(1, 1) + state(0, 1, 0) + state(1, 1, 0)
    verdict = judged(tmp_path, train=["world_size: 2", *lines])
    assert verdict.cause == "p2p_path_broken"


def test_all_ranks_wait_to_receive(tmp_path: Path) -> None:
    verdict = judged(tmp_path, **{f"rank{at}": [*steps(at, 9), *waited(at, "recv", line=9)] for at in range(3)})
    assert verdict.cause == "rank_divergent_branch"


def test_a_timeout_without_other_evidence_is_unknown(tmp_path: Path) -> None:
    lines = ["world size: 8", *steps(0, 30), *watchdog(0, 30, numel=1)]
    verdict = judged(tmp_path, train=lines)
    assert verdict.cause == "unknown" and not verdict.culprits


def test_an_exception_comes_before_its_victims(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        rank0=[*steps(0, 9), *waited(0, "all_reduce", line=54, last=LOST)],
        rank1=[*steps(1, 9), *raised(1, "ZeroDivisionError: division by zero")],
        rank2=[*steps(2, 9), *waited(2, "all_reduce", line=54, last=TIMED_OUT)],
    )
    assert verdict.cause == "rank_exception_masked" and ranks(verdict) == [1]
    assert verdict.culprits[0].where == "step() at train.py:12"


def test_stacks_without_logs(tmp_path: Path) -> None:
    def taken(pid: int, *frames: str) -> list[str]:
        return [f"Process {pid}: python", f'Thread {pid} (active): "MainThread"', *(f"    {each}" for each in frames)]

    waiting = ("barrier (torch/distributed/distributed_c10d.py:1)", "train (trainer.py:2)")
    verdict = judged(
        tmp_path,
        train=steps(0, 50),
        pyspy_node1=[*taken(1, *waiting), *taken(2, *waiting), *taken(3, *waiting)],
        pyspy_node2=[*taken(4, *waiting), *taken(5, "tokenize (data.py:3)", "load (data.py:9)", "main (train.py:4)")],
    )
    assert verdict.cause == "slow_rank_preprocess"
    assert [each.pid for each in verdict.culprits] == [5]
    assert verdict.collective is not None and verdict.collective.operation == "barrier"


def test_functions_with_common_names_are_not_collectives() -> None:
    from lockstep.doctor.judge.collective_waits import collective_of_frames
    from lockstep.doctor.logs.stack_traces import TraceFrame

    assert collective_of_frames([TraceFrame("/usr/lib/python3.11/http/client.py", 9, "send")]) == ""
    assert collective_of_frames([TraceFrame("/venv/torch/distributed/distributed_c10d.py", 9, "send")]) == "send"
    assert collective_of_frames([TraceFrame("/home/u/train.py", 9, "sync", "dist.broadcast(x, 0)")]) == "broadcast"


def test_a_barrier_in_the_same_function_is_another_branch(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        rank0=[*steps(0, 40), *waited(0, "barrier", line=71)],
        rank1=[*steps(1, 40), *waited(1, "all_reduce", line=54)],
        rank2=[*steps(2, 40), *waited(2, "all_reduce", line=54)],
    )
    assert verdict.cause == "rank_divergent_branch" and ranks(verdict) == [0]


def test_a_rank_that_has_no_data_left(tmp_path: Path) -> None:
    lines = [line for rank in range(3) for line in steps(rank, 9)]
    lines += ["[rank2] StopIteration: loader exhausted, leaving the training loop", "[rank2] waiting for the others"]
    verdict = judged(tmp_path, train=[*lines, *watchdog(0, 40), *watchdog(1, 40)])
    assert verdict.cause == "uneven_data" and ranks(verdict) == [2]


def test_a_merged_log_with_only_the_end_of_a_traceback(tmp_path: Path) -> None:
    lines = [f"2026-11-21 14:05:00 | INFO | rank={rank} | step 3 loss 1.1" for rank in range(4)]
    lines += ["2026-11-21 14:20:00 | ERROR | rank=0 | KeyError: 'label'"]
    lines += [
        f"2026-11-21 14:30:00 | ERROR | rank={rank} | {watchdog(rank, 40)[0].split('] ', 2)[2]}" for rank in (1, 2, 3)
    ]
    verdict = judged(tmp_path, train=lines)
    assert verdict.cause == "rank_exception_masked" and ranks(verdict) == [0]


def test_a_mismatch_that_the_job_survived(tmp_path: Path) -> None:
    said = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=5, OpType=ALLREDUCE, TensorShape=[10], TensorDtypes=Float), but Rank 0 "
        "is running collective: CollectiveFingerPrint(SequenceNumber=5, OpType=BROADCAST, TensorShape=[3])."
    )
    assert explain([write(tmp_path, train=[*steps(0, 9), said, *steps(0, 40, 9)])]).verdict.cause == "benign"
    left = explain([write(tmp_path / "last", train=[*steps(0, 9), said])]).verdict
    assert left.cause == "rank_divergent_branch"


def _taken(rank: int, *frames: str) -> list[str]:
    return [
        f"Process {rank}: python train.py",
        f'Thread {rank} (active): "MainThread"',
        *(f"    {at}" for at in frames),
    ]


def test_reporting_a_dead_engine_is_not_an_exception_of_its_own(tmp_path: Path) -> None:
    said = "[rank0]: RuntimeError: Engine core proc EngineCore_DP0 died unexpectedly, shutting down client."
    assert judged(tmp_path, train=[*steps(0, 3), said]).cause != "rank_exception_masked"


def test_an_analysis_of_dumps_that_names_other_sizes_adds_nothing_to_those_of_the_watchdogs(tmp_path: Path) -> None:
    lines = [line for rank in range(2) for line in steps(rank, 9)]
    said = "error msg: Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH, Expected input sizes: '[[9]]'"
    verdict = judged(tmp_path, train=[*lines, *watchdog(0, 9, numel=94705057), *watchdog(1, 9, numel=1)], dumps=[said])
    assert verdict.confidence < 0.8
    assert {verdict.cause, verdict.alternatives[0].what} == {"rank_divergent_branch", "uneven_data"}


def test_a_save_that_ended_before_the_wait_is_not_what_a_silent_rank_does(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        rank0=[*steps(0, 20), "2026-11-21 14:10:20,000 saved checkpoint to out/step_20 (took 4.1 s)"],
        rank1=[*steps(1, 20), *waited(1, "all_reduce", line=54)],
        rank2=[*steps(2, 20), *waited(2, "all_reduce", line=54)],
    )
    assert verdict.cause == "unknown" and ranks(verdict) == [0]


def test_what_a_library_rejects_before_the_first_step_is_a_setting(tmp_path: Path) -> None:
    library = ("/venv/lib/python3.11/site-packages/tool/options.py", 7, "read", 'raise ValueError("bad entry")')
    rejected = raised(0, "ValueError: bad entry: w1 8", ("/home/u/train.py", 12, "main", "read()"), library)
    assert judged(tmp_path / "new", rank0=["starting", *rejected]).cause == "config_error"
    assert judged(tmp_path / "late", rank0=[*steps(0, 9), *rejected]).cause == "rank_exception_masked"


def test_a_killed_rank_is_named_although_the_logs_do_not_say_by_what(tmp_path: Path) -> None:
    job = [*steps(0, 9), *steps(1, 9), *waited(0, "all_reduce", line=54, last=LOST)]
    for ended in ("srun: error: n07: task 1: Killed", "srun: error: n07: task 1: CPU time limit exceeded"):
        verdict = judged(tmp_path, job=[*job, ended, "srun: error: n07: task 0: Exited with exit code 1"])
        assert ranks(verdict) == [1], ended


def test_all_ranks_of_two_hosts_that_use_rdma_wait_for_no_port(tmp_path: Path) -> None:
    used = [f"n{at}:9{at}:9{at} [0] NCCL INFO Using network IB" for at in (1, 2)]
    waits = [each for rank in (0, 1) for each in waited(rank, "all_reduce", line=54)]
    not_used = [each.replace("IB", "Socket") for each in used]
    assert judged(tmp_path / "rdma", job=[*used, *waits]).cause == "ib_rdma_fault"
    assert judged(tmp_path / "tcp", job=[*not_used, *waits]).cause == "network_blocked"


def test_a_rank_whose_log_breaks_off_between_two_steps_was_killed(tmp_path: Path) -> None:
    step = "[{}] {}/36 loss=0.5"
    peers = {f"rank{at}": [step.format(at, 4), step.format(at, 8), *raised(at, LOST)] for at in (0, 2)}
    killed = judged(tmp_path / "killed", **peers, rank1=[step.format(1, 4), step.format(1, 8)])
    assert killed.cause == "external_kill" and ranks(killed) == [1] and killed.confidence < 0.8
    left = judged(tmp_path / "left", **peers, rank1=[step.format(1, 4), step.format(1, 8), "[1] nothing left to do"])
    assert left.cause == "uneven_data" and ranks(left) == [1]


def test_the_death_of_a_process_is_no_setting(tmp_path: Path) -> None:
    library = ("/venv/lib/python3.11/site-packages/datasets/utils.py", 617, "check", "raise RuntimeError(")
    verdict = judged(tmp_path, job=raised(0, "RuntimeError: a reader died during the map", library))
    assert verdict.cause == "rank_exception_masked"


def test_the_root_of_a_broadcast_waits_one_operation_later_for_the_same_rank(tmp_path: Path) -> None:
    waits = [*watchdog(0, 31), *watchdog(1, 30, "BROADCAST"), *watchdog(3, 30, "BROADCAST")]
    verdict = judged(tmp_path, job=[*(line for rank in range(4) for line in steps(rank, 9)), *waits])
    assert ranks(verdict) == [2] and verdict.cause == "unknown"
    behind = [*waits, *state(0, 31, 30), *state(1, 30, 29), *state(2, 29, 29), *state(3, 30, 29)]
    assert ranks(judged(tmp_path / "states", job=behind)) == [2]
    alone = judged(tmp_path / "alone", job=[line for line in waits if "[rank0]" not in line])
    assert 0 not in ranks(alone)
    assert ranks(judged(tmp_path / "two", job=[*watchdog(0, 31), *watchdog(1, 30, "ALLGATHER"), *waits[2:]])) != [2]


def test_a_metric_is_no_activity_and_trouble_no_slow_work(tmp_path: Path) -> None:
    def judge(folder: str, last: str, second: int = 8) -> Verdict:
        late = f"2026-11-21 14:10:{second:02d},000 [rank 1] {last}"
        return judged(tmp_path / folder, rank0=[*steps(0, 9), *watchdog(0, 9, at="14:20:10")], rank1=[late])

    assert judge("metric", "INFO loss 0.5 failed_samples=0 reward=0.31").cause != "slow_collective_timeout"
    assert judge("share", "INFO scoring answers=41%").cause == "slow_collective_timeout"
    stale = judge("trouble", "WARNING OSError: [Errno 116] Stale file handle: '/nfs/a', trying once more", 30)
    assert stale.cause == "storage_fault" and ranks(stale) == [1]


def test_a_rank_that_reads_its_next_sample_prepares_data(tmp_path: Path) -> None:
    waiting = ("all_reduce (torch/distributed/distributed_c10d.py:2810)", "main (/home/u/train.py:9)")
    reading = ("read (/home/u/tar.py:19)", "next_sample (/home/u/tar.py:31)", "main (/home/u/train.py:7)")
    verdict = judged(tmp_path, rank0=_taken(0, *waiting), rank1=_taken(1, *waiting), rank2=_taken(2, *reading))
    assert verdict.cause == "slow_rank_preprocess" and ranks(verdict) == [2]
