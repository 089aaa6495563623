"""First causes and victims, attempts, survived errors, culprits."""

import json
from pathlib import Path

import pytest

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.watch.diagnosis.verdict import Verdict
from tests.unit.doctor.job_logs import LOST, raised, state, steps, waited, watchdog, write

_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
_XID = "Apr 13 14:44:59 gpu10 kernel: [3543143.5] NVRM: Xid (PCI:0000:00:0a): 79, GPU has fallen off the bus."


def judged(folder: Path, **files: list[str]) -> Verdict:
    return explain([write(folder, **files)]).verdict


def test_an_error_that_the_job_survived_is_not_a_cause(tmp_path: Path) -> None:
    lines = [*steps(0, 20), "OSError: [Errno 28] No space left on device, will try again", *steps(0, 400, 20)]
    assert judged(tmp_path, train=[*lines, "Training completed"]).cause == "benign"
    running = judged(tmp_path, train=lines)
    assert running.cause == "benign"


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        run_001__driver=[*steps(0, 5), *raised(0, _OOM)],
        run_002__driver=[*steps(0, 5, 100), *raised(0, "OSError: [Errno 98] Address already in use")],
    )
    assert verdict.cause == "port_in_use"


def test_attempts_in_one_file(tmp_path: Path) -> None:
    first = [
        "START TIME: Fri",
        *steps(0, 5),
        *raised(0, _OOM),
        "failed (exitcode: 1) local_rank: 0 (pid: 9) of binary: x",
    ]
    verdict = judged(tmp_path, train=[*first, "START TIME: Sat", *steps(0, 400, 60), "Training completed"])
    assert verdict.cause == "benign"


def test_a_kernel_line_explains_the_errors_of_the_process(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        dmesg=[_XID],
        train=[*steps(0, 9), *raised(0, "RuntimeError: CUDA error: an illegal memory access was encountered")],
    )
    assert verdict.cause == "gpu_hardware_fault"
    assert verdict.culprits[0].name == "0000:00:0a" and verdict.culprits[0].host == "gpu10"


def test_a_wrapper_is_only_evidence_if_there_is_nothing_else(tmp_path: Path) -> None:
    wrapper = ["(APIServer pid=7) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."]
    assert judged(tmp_path, serve=wrapper).cause == "vllm_engine_failure"
    verdict = judged(tmp_path, serve=[f"(Worker_TP1 pid=8) {_OOM}", *wrapper])
    assert verdict.cause == "rank_oom" and verdict.culprits[0].rank == 1


def test_a_killed_rank(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        slurm=[
            *steps(0, 9),
            *waited(1, "all_reduce", line=4, last=LOST),
            "srun: error: c0417: task 3: Killed",
            "srun: error: c0417: task 0: Terminated",
            "slurmstepd: error: Detected 1 oom_kill event in StepId=884.0. Some of the tasks have been OOM Killed.",
        ],
    )
    assert verdict.cause == "host_oom"
    assert [(each.rank, each.host) for each in verdict.culprits] == [(3, "c0417")]


def test_a_node_mentioned_in_a_line(tmp_path: Path) -> None:
    line = "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM) at node (ID: 5, IP: 10.9.1.2)"
    verdict = judged(tmp_path, driver=[*steps(0, 3), line])
    assert verdict.cause == "host_oom" and verdict.culprits[0].host == "10.9.1.2"


def test_a_remote_traceback(tmp_path: Path) -> None:
    lines = [
        "(TaskRunner pid=1) Traceback (most recent call last):",
        '(TaskRunner pid=1)   File "/venv/lib/python3.11/site-packages/ray/_private/worker.py", line 2, in get',
        "(TaskRunner pid=1)     raise value.as_instanceof_cause()",
        "(TaskRunner pid=1) ray.exceptions.RayTaskError(OutOfDiskError): ray::W.update() (pid=4, ip=192.168.7.1, x=3)",
        '(TaskRunner pid=1)   File "/home/u/worker.py", line 3, in update',
        "(TaskRunner pid=1)     put(x)",
        "(TaskRunner pid=1) ray.exceptions.OutOfDiskError: Local disk is full",
    ]
    verdict = judged(tmp_path, driver=[*steps(0, 9), *lines])
    assert verdict.cause == "storage_fault"


@pytest.mark.parametrize("noise", [b"\x00\xff\xfe" * 200, b"\n" * 5000, b"{" * 20000, "é€😀".encode() * 300])
def test_arbitrary_bytes_give_an_answer(tmp_path: Path, noise: bytes) -> None:
    (tmp_path / "a.log").write_bytes(noise + b"\nRuntimeError: x\n" + noise)
    verdict = explain([str(tmp_path)]).verdict
    assert verdict.json()["class"]


def test_dumps_and_logs_give_one_verdict(tmp_path: Path) -> None:
    from shutil import copytree

    files = Path(__file__).parents[2] / "watch" / "dumps" / "files" / "gloo_absent"
    copytree(files, tmp_path / "dumps")
    (tmp_path / "rank2.log").write_text("\n".join([*steps(2, 9), *raised(2, "KeyError: 'labels'")]))
    verdict = explain([str(tmp_path)]).verdict
    assert verdict.cause == "rank_exception_masked" and verdict.culprits[0].rank == 2
    assert verdict.collective is not None and verdict.collective.seq == 7
    assert "dumps" in verdict.explanation


def test_incidents_of_a_run_beside_its_output_are_no_log(tmp_path: Path) -> None:
    """The sentence about the host's memory in an incident was taken for a GPU's."""
    died = "engine-0 (host a) was killed by SIGKILL (killed by the kernel: out of memory)."
    incident = tmp_path / "run" / "incidents" / "20261128-001726-dead-engine-0"
    incident.mkdir(parents=True)
    content = {"kind": "dead", "class": "host_oom", "level": "confirmed", "confidence": 0.95, "explanation": died}
    facts = [{"source": "its parent", "text": died}]
    (incident / "verdict.json").write_text(json.dumps({**content, "evidence": facts}, indent=1))
    (tmp_path / "output.txt").write_text("\n".join([*steps(0, 9), f"confirmed: {died}"]))
    other = tmp_path / "data" / "judge" / "verdict.json"
    other.parent.mkdir(parents=True)
    other.write_text(json.dumps({"guilty": False}))
    found = explain([str(tmp_path)])
    assert (found.verdict.cause, found.verdict.explanation) == ("host_oom", died)
    assert [each for each in found.gaps if "verdict.json" in each] == [f"{other}: no incident: not a verdict: 'kind'"]


def test_folders_that_number_something_else_are_one_attempt(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        run_1__driver=[*steps(0, 50), *raised(0, "OSError: [Errno 98] Address already in use")],
        run_2__driver=[*steps(1, 50)],
    )
    assert verdict.cause == "port_in_use"


def test_a_job_that_was_submitted_again(tmp_path: Path) -> None:
    first = ["Job started on host a", *steps(0, 5), *raised(0, _OOM)]
    second = ["Job started on host a", *steps(0, 5, 100), *raised(0, "OSError: [Errno 98] Address already in use")]
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "slurm-100.out").write_text("\n".join(first))
    (folder / "slurm-101.out").write_text("\n".join(second))
    assert explain([str(folder)]).verdict.cause == "port_in_use"


def test_a_banner_that_comes_again_after_a_failure_begins_an_attempt(tmp_path: Path) -> None:
    banner = "wandb: Tracking run with wandb version 0.19.8"
    first = [banner, *steps(0, 5), *raised(0, _OOM)]
    verdict = judged(
        tmp_path, train=[*first, banner, *steps(0, 5, 100), *raised(0, "OSError: [Errno 98] Address already in use")]
    )
    assert verdict.cause == "port_in_use"
    once = judged(tmp_path, train=[*first, "wandb: Run data is saved locally", *steps(0, 1, 100)])
    assert once.cause == "rank_oom"


def test_files_with_old_names_are_ignored(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        old__train=[*steps(0, 5), *raised(0, _OOM)],
        train=[*steps(0, 5, 100), *raised(0, "OSError: [Errno 98] Address already in use")],
    )
    assert verdict.cause == "port_in_use"


def test_a_broken_gpu_stays_broken(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path,
        run_1__driver=[*steps(0, 5), *raised(0, "RuntimeError: CUDA error: uncorrectable ECC error encountered")],
        run_2__driver=[*steps(0, 5, 100), *raised(0, _OOM)],
    )
    assert verdict.cause == "gpu_hardware_fault"


_DONE = "2026-11-21 14:30:00 Training completed"
_EXIT = "srun: error: n3: task 3: Exited with exit code 1"


@pytest.mark.parametrize(
    "lines",
    [
        [*watchdog(3, 9), _EXIT, "71.0 FAILED", "71.extern COMPLETED"],
        [*watchdog(3, 9), "[rank0]: Error: Training job completed status: FAILED", "Job state: COMPLETED=3 FAILED=1"],
        [*steps(0, 9), *watchdog(3, 9), _EXIT, _DONE],
        [*steps(0, 9), _DONE, "OSError: [Errno 30] Read-only file system: '/models/final/model.safetensors'"],
        [*steps(0, 9), _DONE, "[rank0]: SomeError: the upload was refused"],
        [*steps(0, 9), _DONE, "RuntimeError: CUDA error: uncorrectable ECC error encountered"],
        [*steps(0, 9), _DONE, _EXIT],
    ],
)
def test_a_success_message_does_not_undo_a_failure(tmp_path: Path, lines: list[str]) -> None:
    assert judged(tmp_path, job=lines).cause != "benign"


def test_success_after_a_survived_error(tmp_path: Path) -> None:
    again = [*steps(0, 9), *watchdog(3, 9), _EXIT, "restarting worker group", *steps(0, 9), _DONE]
    assert judged(tmp_path, job=again).cause == "benign"
    trial = [*steps(0, 9), "evaluation server: process 41 terminated with exit code 1", *steps(0, 2, 9), _DONE]
    assert judged(tmp_path, job=trial).cause == "benign"


def test_a_fatal_line_of_a_rank_that_continues(tmp_path: Path) -> None:
    said = "[rank0] the driver wrote: GPU 0000:9b:00.0: GPU has fallen off the bus."
    assert judged(tmp_path, job=[*steps(0, 9), said, *steps(0, 4, 9)]).cause == "benign"
    left = judged(tmp_path, job=[*steps(0, 9), said.replace("rank0", "rank1"), *steps(0, 4, 9)])
    assert left.cause == "gpu_hardware_fault", "the others only had a few steps under way"


def test_rows_of_a_trainer_are_steps(tmp_path: Path) -> None:
    rows = [f"{{'loss': 1.9, 'grad_norm': 2.5, 'learning_rate': 1e-05, 'epoch': {at / 100}}}" for at in range(1, 30)]
    bad = "{'loss': 1.9, 'grad_norm': inf, 'learning_rate': 1e-05, 'epoch': 0.095}"
    assert judged(tmp_path, job=[*rows[:9], bad, *rows[9:]]).cause == "benign"
    stays = [row.replace("2.5", "nan").replace("1.9", "nan") for row in rows[9:]]
    assert judged(tmp_path, job=[*rows[:9], *stays]).cause == "nan_or_inf"


def _bar(count: int) -> str:
    return "".join(f"\rEpoch 1:  1%|#    | {at}/999 [00:01<02:11, 3.1it/s, loss=1.2]" for at in range(count))


@pytest.mark.parametrize("count", [20, 600])
def test_a_traceback_at_the_end_of_a_progress_bar(tmp_path: Path, count: int) -> None:
    first, *others = raised(2, "KeyError: 'label'")
    verdict = judged(tmp_path, job=[_bar(count) + first, *others])
    assert verdict.cause == "rank_exception_masked" and [each.rank for each in verdict.culprits] == [2]
    assert verdict.evidence[0].line == 4


def test_a_message_between_two_parts_of_a_progress_bar(tmp_path: Path) -> None:
    out = f"[rank1]: {_OOM}"
    verdict = judged(tmp_path, job=[_bar(600) + "\r" + out])
    assert verdict.cause == "rank_oom" and [each.rank for each in verdict.culprits] == [1]
    assert verdict.evidence[0].text == out and verdict.evidence[0].line == 1


def test_a_continued_progress_bar(tmp_path: Path) -> None:
    lines = [_bar(300), "OSError: [Errno 28] No space left on device, will try again", _bar(600)]
    assert judged(tmp_path, job=lines).cause == "benign"


def test_the_state_of_an_idle_group_does_not_show_a_first_collective(tmp_path: Path) -> None:
    lines = []
    for rank in range(4):
        lines += [line.replace("[Rank", f"[PG ID 3 PG GUID 7(dp) Rank {rank}] [Rank") for line in watchdog(rank, 5512)]
        lines += state(rank, 0, -1)
    assert judged(tmp_path, job=lines).cause != "p2p_path_broken"
    first = [line for rank in range(4) for line in [*watchdog(rank, 1), *state(rank, 1, 0)]]
    assert judged(tmp_path, job=first).cause == "p2p_path_broken"


def test_an_exception_without_a_rule_undoes_the_success_of_another_rank(tmp_path: Path) -> None:
    done, raises = [*steps(0, 9), _DONE], raised(1, "mylib.BadThing: no")
    assert judged(tmp_path, rank0=done, rank1=[*steps(1, 9), *raises]).cause == "rank_exception_masked"
    assert judged(tmp_path / "one", job=[*done, *raises]).cause == "rank_exception_masked"


def test_an_evaluation_that_ended_is_not_the_end_of_the_training(tmp_path: Path) -> None:
    counters = [f"step {at}/1000 loss 0.5" for at in range(50)]
    among = judged(tmp_path, job=[*counters, "Evaluation completed: accuracy 0.3"])
    assert among.confidence < 0.8
    assert judged(tmp_path / "all", job=[*counters, "step 1000/1000", "Evaluation completed"]).confidence >= 0.8


def test_an_engine_timeout_is_weak_evidence(tmp_path: Path) -> None:
    prefix = "(EngineCore_DP0 pid=3) ERROR 03-08 17:32:28 [core.py:844] "
    frame = '  File "/v/site-packages/vllm/v1/executor/multiproc_executor.py", line 290, in get_response'
    said = ["Traceback (most recent call last):", frame, "    status, result = mq.dequeue(", "TimeoutError", "",
            "The above exception was the direct cause of the following exception:", "",
            "Traceback (most recent call last):", frame, "    raise TimeoutError(...) from e",
            "TimeoutError: RPC call to sample_tokens timed out."]  # fmt: skip
    verdict = judged(tmp_path, server=[prefix + each for each in said])
    assert verdict.confidence <= 0.5


def test_the_time_limit_is_not_the_cause_of_a_job_that_was_stuck(tmp_path: Path) -> None:
    limit = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T16:00:00 DUE TO TIME LIMIT ***"
    stuck = [line for rank in range(4) for line in watchdog(rank, 812)]
    undated = [line.replace("1121 14:30:00.000000000 ", "") for line in stuck]
    for number, lines in enumerate((stuck, undated)):
        verdict = judged(tmp_path / str(number), job=[*steps(0, 9), *lines, limit])
        assert verdict.cause != "external_kill" or verdict.confidence < 0.6
    running = judged(tmp_path / "b", job=[*steps(0, 9), limit])
    assert running.cause == "external_kill" and running.confidence > 0.8


def test_concatenated_logs_of_ranks(tmp_path: Path) -> None:
    lines = [*steps(0, 50), *raised(0, "KeyError: 'label'"), *steps(1, 50)]
    verdict = judged(tmp_path, all=lines)
    assert verdict.cause == "rank_exception_masked" and [each.rank for each in verdict.culprits] == [0]
    beyond = [*steps(0, 50), "[rank0]: KeyError: 'label', will try again", *steps(1, 50, 50)]
    assert judged(tmp_path / "beyond", all=beyond).cause == "benign"


def test_a_servers_report_of_its_death_outranks_its_clients_errors(tmp_path: Path) -> None:
    died = "ERROR 08-01 20:43:17 [multiproc_executor.py:149] Worker proc VllmWorker-3 died unexpectedly, shutting down."
    seen = raised(0, "requests.exceptions.HTTPError: 500 Server Error: Internal Server Error for url: http://h:8000/v1")
    verdict = judged(tmp_path, engine=[died], trainer=[*steps(0, 20), *seen])
    assert verdict.cause == "vllm_engine_failure" and [each.rank for each in verdict.culprits] == [3]
    undated = judged(tmp_path / "undated", client=seen, server=["Worker proc VllmWorker-3 died unexpectedly"])
    assert undated.cause == "vllm_engine_failure"


def test_a_server_that_answers_with_an_error_was_not_late(tmp_path: Path) -> None:
    seen = raised(0, "requests.exceptions.HTTPError: 500 Server Error: Internal Server Error for url: http://h:8000/v1")
    verdict = judged(tmp_path, trainer=[*steps(0, 20), *seen])
    assert verdict.cause == "remote_service_timeout" and verdict.confidence < 0.8


def test_a_setup_warning_followed_by_steps_is_harmless(tmp_path: Path) -> None:
    warned = "[W ProcessGroupGloo.cpp:727] Warning: Unable to resolve hostname to a (local) address. Using the loopback"
    warned += " address as fallback. Manually set the network interface to bind to with GLOO_SOCKET_IFNAME."
    batches = [f"2026-11-21 14:10:{at:02d},000 [rank{at % 2}] epoch 0 batch {at} loss 0.5" for at in range(30)]
    verdict = judged(tmp_path, all=[*batches[:8], warned, *batches[8:], "[rank0] all epochs done, acc 0.9"])
    assert verdict.cause == "benign"


def _short(joined: int) -> list[str]:
    came = ["[rank1]: torch.distributed.DistNetworkError: failed to recv, got 0 bytes"] if joined > 1 else []
    count = f"Timed out after 601 seconds waiting for clients. {joined}/4 clients joined."
    return [f"[rank0]: torch.distributed.DistStoreError: {count}", *came]


def test_errors_of_exactly_the_missing_ranks_explain_their_absence(tmp_path: Path) -> None:
    broken = "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    beside = [line for rank in (2, 3) for line in raised(rank, broken)]
    verdict = judged(tmp_path, node_a=_short(2), node_b=beside)
    assert verdict.cause == "gpu_hardware_fault" and {each.rank for each in verdict.culprits} == {2, 3}
    assert judged(tmp_path / "one", node_a=_short(1), node_b=beside).cause == "rendezvous_incomplete"
