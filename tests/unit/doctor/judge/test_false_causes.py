"""Lines that look like causes and are not: lists of guesses, kills, waits of an engine."""

from pathlib import Path

import pytest

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.watch.diagnosis.verdict import Verdict
from tests.unit.doctor.job_logs import raised, steps, watchdog, write

_SILENT = "INFO [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds."


def judged(folder: Path, **files: list[str]) -> Verdict:
    return explain([write(folder, **files)]).verdict


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "worker.py:1851 -- Raylet is terminated: ip=10.1.0.5, id=ab12. Termination is unexpected. Possible reasons "
            "include: (1) SIGKILL by the user or system OOM killer, (2) Invalid memory access from Raylet causing "
            "SIGSEGV or SIGBUS, (3) Other termination signals.",
            "ray_node_or_gcs",
        ),
        ("python: Bus error (core dumped)", "shm_too_small"),
    ],
)
def test_a_list_of_possible_causes_is_not_evidence(tmp_path: Path, line: str, cause: str) -> None:
    verdict = judged(tmp_path, driver=[*steps(0, 9), line])
    assert verdict.cause == cause
    if cause == "ray_node_or_gcs":
        assert "shm_too_small" not in [each.what for each in verdict.alternatives]


@pytest.mark.parametrize(
    "end",
    [
        "ERROR [core.py:1099] TimeoutError: RPC call to sample_tokens timed out.",
        "ERROR [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.",
    ],
)
def test_an_engine_that_waits_for_its_worker_does_not_accuse_the_path_between_gpus(tmp_path: Path, end: str) -> None:
    verdict = judged(tmp_path, serve=[_SILENT, _SILENT, end])
    assert verdict.cause == "vllm_engine_failure"
    assert "p2p_path_broken" not in [each.what for each in verdict.alternatives]


@pytest.mark.parametrize(
    "end",
    ["slurmstepd: error: *** STEP 4410.0 ON gpu-03 CANCELLED AT 2026-11-21T14:20:21 ***", "Terminated"],
)
def test_an_external_kill_counts_if_nothing_failed_before(tmp_path: Path, end: str) -> None:
    verdict = judged(tmp_path, job=[*steps(0, 9), end])
    assert verdict.cause == "external_kill" and verdict.confidence < 0.8
    assert judged(tmp_path, job=[*steps(0, 9), *raised(1, "KeyError: 'x'"), end]).cause == "rank_exception_masked"
    assert judged(tmp_path, job=[*steps(0, 9), *watchdog(1, 9), end]).cause != "external_kill"


def test_the_gpu_that_throttles_is_the_one_that_all_wait_for(tmp_path: Path) -> None:
    def rank(number: int, state: str) -> list[str]:
        line = f"step {{}} clocks_event_reasons.hw_thermal_slowdown {state}"
        return [line.format(at) for at in range(20)] + (watchdog(number, 20) if state != "Active" else [])

    verdict = judged(tmp_path, rank0=rank(0, "Not Active"), rank1=rank(1, "Active"), rank2=rank(2, "Not Active"))
    assert verdict.cause == "gpu_hardware_fault" and [each.rank for each in verdict.culprits] == [1]


_LIMIT = "slurmstepd: error: *** JOB 77 ON gpu-03 CANCELLED AT 2026-11-21T{} DUE TO TIME LIMIT ***"


def test_a_time_limit_does_not_explain_a_failure_long_before_it(tmp_path: Path) -> None:
    lines = [*steps(0, 9), *steps(1, 9), *raised(1, "KeyError: 'label'")]
    hung = judged(tmp_path, job=[*lines, _LIMIT.format("20:00:00")])
    assert hung.cause == "rank_exception_masked" and [each.rank for each in hung.culprits] == [1]
    assert judged(tmp_path, job=[*steps(0, 9), _LIMIT.format("14:10:10")]).cause == "external_kill"


def test_a_time_limit_after_a_refused_update_of_weights(tmp_path: Path) -> None:
    line = '2026-11-21 14:10:30 INFO:     10.0.0.2:5470 - "POST /update_weights_from_distributed HTTP/1.1" 500 Error'
    verdict = judged(tmp_path, serve=[line], train=[*steps(0, 9), _LIMIT.format("20:00:00")])
    assert verdict.cause == "vllm_weight_sync" and verdict.confidence < 0.8


def test_a_launcher_that_ends_a_helper_after_success(tmp_path: Path) -> None:
    closing = (
        "W1121 14:12:00.118000 331 torch/elastic/multiprocessing/api.py:897] Sending process 340 closing signal SIGTERM"
    )
    good = [*steps(0, 9), "{'train_runtime': 412.2, 'train_loss': 0.81}", closing, "job finished with exit code 0"]
    assert judged(tmp_path, job=good).cause == "benign"
    assert (
        judged(tmp_path, job=[*steps(0, 9), closing, "srun: error: n3: task 3: Exited with exit code 1"]).cause
        != "benign"
    )


def test_a_successful_end_does_not_excuse_a_persistent_nan(tmp_path: Path) -> None:
    def row(at: int, loss: str) -> str:
        return f"{{'loss': {loss}, 'grad_norm': {loss}, 'learning_rate': 1e-05, 'epoch': {at / 100}}}"

    end = "{'train_runtime': 412.2, 'train_loss': 0.8, 'epoch': 1.0}"
    good = [row(at, "0.5") for at in range(1, 60)]
    lasting = [row(at, "nan") for at in range(60, 99)]
    assert judged(tmp_path, job=[*good, *lasting, end]).cause == "nan_or_inf"
    assert (
        judged(tmp_path, job=[*good, row(60, "nan"), *[row(at, "0.5") for at in range(61, 99)], end]).cause == "benign"
    )
    assert judged(tmp_path, job=[*lasting[:9], *[row(at, "0.5") for at in range(71, 99)], end]).cause == "benign"


def test_an_exception_with_only_its_last_line(tmp_path: Path) -> None:
    missing_file = "[rank8]: FileNotFoundError: [Errno 2] No such file or directory: '/data/sft/train.jsonl'"
    lost = "[rank0]: torch.distributed.DistBackendError: [0] store->get('0') got error: Connection reset by peer"
    verdict = judged(tmp_path, node1=[*steps(0, 9), lost], node2=[missing_file])
    assert verdict.cause == "storage_fault" and [each.rank for each in verdict.culprits] == [8]
    refused = "[rank1]: my.checks.ShapeMismatchError: rows differ"
    assert judged(tmp_path / "last", job=[*steps(0, 9), refused]).cause == "rank_exception_masked"


def test_a_harmless_exception_on_one_line(tmp_path: Path) -> None:
    line = "ValueError: row 17 has no label, left out"
    assert judged(tmp_path, job=[*steps(0, 9), line, *steps(0, 9, 9)]).cause == "benign"
    assert judged(tmp_path, job=[*steps(0, 9), line, "Training completed"]).cause == "benign"
    quoted = "completion: 'ValueError: row 17 has no label'"
    assert judged(tmp_path, job=[*steps(0, 9), quoted, *steps(0, 1, 9)]).cause == "benign"


def test_wrapped_lines(tmp_path: Path) -> None:
    plan = "INFO a plan of how the layers of the model are dealt to stages and to devices of each host of this job"
    cause = "KeyError: 'a label that is missing in some of the rows of the data that this rank was given to work on'"
    lines = [plan, *steps(0, 9), *watchdog(0, 40), *watchdog(1, 40), *raised(2, cause)]
    broken = [line[at : at + 72] for line in lines for at in range(0, len(line), 72)]
    verdict = judged(tmp_path, job=broken)
    assert verdict.cause == "rank_exception_masked" and [each.rank for each in verdict.culprits] == [2]
    assert verdict.collective is not None and verdict.collective.operation == "allreduce"
    assert all(each.text in broken[each.line - 1] for each in verdict.evidence if each.line)


@pytest.mark.parametrize("end", ["asyncio.exceptions.CancelledError", "SystemExit: 0", "SystemExit"])
def test_an_exit_as_intended_is_no_failure(tmp_path: Path, end: str) -> None:
    assert explain([write(tmp_path, rank0=[*steps(0, 9), *raised(0, end)])]).verdict.cause == "benign"


def test_a_non_zero_exit_is_a_failure(tmp_path: Path) -> None:
    assert explain([write(tmp_path, rank0=[*steps(0, 9), *raised(0, "SystemExit: 3")])]).verdict.cause != "benign"


@pytest.mark.parametrize("end", ["40 updates, 0 failed, 0 ERROR lines", "done in 9 s, errors: 0", "no errors"])
def test_a_count_of_no_errors_is_no_trouble(tmp_path: Path, end: str) -> None:
    assert explain([write(tmp_path, rank0=[*steps(0, 9), end])]).verdict.cause == "benign"


@pytest.mark.parametrize("last", ["all 8 files verified", "wrote shards to out/", "rank 0 exiting with SystemExit: 0"])
def test_a_program_that_closes_with_its_work_done_is_healthy(tmp_path: Path, last: str) -> None:
    lines = ["part-3: checksum mismatch, loading it again", "part-3: OK", last]
    assert judged(tmp_path, fetch=lines).cause == "benign"
    assert judged(tmp_path / "b", fetch=[*lines, "Segmentation fault (core dumped)"]).cause != "benign"
    assert judged(tmp_path / "c", fetch=[*lines[:2], "rank 0 done, waiting for the others"]).cause != "benign"


def test_information_of_a_library_is_no_trouble(tmp_path: Path) -> None:
    end = "[I1127 20:30:18.97 TCPStoreLibUvBackend.cpp:1354] [c10d] uv_loop_close failed with:-16 errn:EBUSY"
    assert judged(tmp_path, job=[*steps(0, 40), end]).cause == "benign"


def test_a_sweep_that_names_failed_trials_did_not_end_well(tmp_path: Path) -> None:
    """The driver's last line says that it is done; a line that says "not complete" reports no success either."""
    failed = "2026-11-28 00:26:09,729 ERROR tune.py:1035 -- Trials did not complete: [trial_2, trial_3]"
    assert judged(tmp_path, driver=[*steps(0, 9), failed, "sweep finished"]).cause == "rank_exception_masked"
    assert judged(tmp_path, other=["starting", "loading", "12 trials did not complete"]).cause != "benign"


def test_a_refused_request_that_the_client_skips_is_no_wrong_setting(tmp_path: Path) -> None:
    refusal = 'HTTP 400 {"error": {"message": "This model\'s maximum context length is 128 tokens."}}'
    served = ["INFO:     Application startup complete.", *steps(0, 9)]
    assert judged(tmp_path, log=[*served, f"WARNING request 3 skipped: {refusal}", *steps(0, 3, 9)]).cause == "benign"


def test_a_placement_group_that_became_ready_is_not_waited_for(tmp_path: Path) -> None:
    starts = "2026-11-28 00:26:59,431 INFO worker.py:2038 -- Started a local Ray instance."
    lines = [starts, "waiting for placement group", "placement group is ready"]
    assert judged(tmp_path, driver=lines).cause == "benign"


def test_a_kill_without_a_line_about_memory_is_no_lack_of_memory(tmp_path: Path) -> None:
    killed = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL"
    bare = judged(tmp_path / "bare", job=[*steps(0, 9), killed])
    assert bare.cause == "external_kill" and bare.confidence < 0.8
    assert "host_oom" in [each.what for each in bare.alternatives]
    kernel = "[7712.2] Memory cgroup out of memory: Killed process 40122 (python) total-vm:91233kB"
    assert judged(tmp_path / "proven", job=[*steps(0, 9), killed, kernel]).cause == "host_oom"


_TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/u/verify.py", line 36, in verify',
    "    raise ValueError(answer)",
    "ValueError: answer 5 has no box",
]


def test_an_exception_that_a_logger_printed_before_a_good_end_was_handled(tmp_path: Path) -> None:
    record, end = (
        "2026-11-21 14:10:30 | ERROR | verify | answer 5 failed",
        "2026-11-21 14:10:31 | INFO | all answers scored",
    )
    assert judged(tmp_path / "logged", job=[record, *_TRACEBACK, end]).cause == "benign"
    assert judged(tmp_path / "last", job=[record, *_TRACEBACK]).cause == "rank_exception_masked"
    engine = ["(EngineCore pid=7) ERROR failed", *(f"(EngineCore pid=7) {line}" for line in _TRACEBACK)]
    assert judged(tmp_path / "engine", job=[*engine, f"(APIServer pid=6) {end}"]).cause != "benign"
    lost = end.replace("scored", "aborted")
    assert judged(tmp_path / "aborted", job=[record, *_TRACEBACK, lost]).cause == "rank_exception_masked"


def test_a_chain_of_exceptions_is_one_failure(tmp_path: Path) -> None:
    during = ["", "During handling of the above exception, another exception occurred:", ""]
    missing = [*_TRACEBACK[:3], "FileNotFoundError: [Errno 2] No such file or directory: '/mnt/code'"]
    verdict = judged(
        tmp_path, job=[*missing, *during, *_TRACEBACK[:3], "ValueError: /mnt/code/a.zip is not a valid path."]
    )
    assert verdict.cause == "storage_fault"
    said = "OSError: It looks like the config file at 'out/config.json' is not a valid JSON file."
    broken = [*_TRACEBACK[:3], "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"]
    assert judged(tmp_path / "json", job=[*broken, *during, *_TRACEBACK[:3], said]).cause == "config_error"


def test_two_lines_show_no_health(tmp_path: Path) -> None:
    assert judged(tmp_path, job=["loading the model", "joining the group"]).cause == "unknown"


def test_a_rank_that_reports_its_end_after_an_exception_survived_it(tmp_path: Path) -> None:
    def lines(rank: int, last: str) -> list[str]:
        first = steps(0, 9) if rank == 0 else []
        error = ["Traceback (most recent call last):", '  File "train.py", line 8, in read', '    float("n/a")']
        return [*first, *error, "ValueError: could not convert string to float: 'n/a'", f"2026-11-21 14:12:00 {last}"]

    done = {f"rank_{rank}": lines(rank, f"[rank {rank}] INFO done, 9 steps") for rank in (0, 1)}
    assert explain([write(tmp_path / "done", **done)]).verdict.cause == "benign"
    open_end = {name: [*each[:-1], "2026-11-21 14:12:00 closing"] for name, each in done.items()}
    assert explain([write(tmp_path / "open", **open_end)]).verdict.cause == "rank_exception_masked"


def test_a_lock_in_a_collective_of_objects_is_no_start_method(tmp_path: Path) -> None:
    frames = (
        ("train.py", 71, "gather", "dist.all_gather_object(found, mine)"),
        ("/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3405, "_object_to_tensor",
         "_pickler(f).dump(obj)"),
    )  # fmt: skip
    job = write(tmp_path, train=[*steps(1, 4), *raised(1, "TypeError: cannot pickle '_thread.lock' object", *frames)])
    verdict = explain([job]).verdict
    assert verdict.cause == "rank_exception_masked" and [each.rank for each in verdict.culprits] == [1]


_WARNING = (
    "lib.py:31: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 12020)."
)
_KILLED = (
    "[2026-07-01 09:16:31,702] [ERROR] [launch.py:325:sigkill_handler] ['python', 'a.py'] exits with return code = -9"
)


def test_what_only_a_warning_says_did_not_kill_a_process(tmp_path: Path) -> None:
    assert judged(tmp_path, job=["starting", _WARNING, "loading shard 1 of 4", _KILLED]).cause == "external_kill"
    error = "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."
    assert judged(tmp_path, job=["starting", *raised(0, error)]).cause == "version_mismatch"


def test_an_accepted_difference_of_versions_is_no_cause(tmp_path: Path) -> None:
    accepted = (
        "Installed CUDA version 12.1 does not match the version torch was compiled with 12.4 but since the APIs are "
        "compatible, accepting this combination"
    )
    assert judged(tmp_path, job=["starting", accepted, "loading shard 1 of 4", _KILLED]).cause == "external_kill"


def test_an_announced_number_of_steps_is_no_progress(tmp_path: Path) -> None:
    head = ["  Gradient Accumulation steps = 8", "  Total optimization steps = 870"]
    error = "AssertionError: Dynamo only supports FSDP with use_orig_params=True"
    assert judged(tmp_path, job=[*head, *raised(0, error)]).cause == "config_error"
    assert judged(tmp_path, job=[*head, *steps(0, 9), *raised(0, error)]).cause != "config_error"


@pytest.mark.parametrize(
    "line",
    [
        "WARNING:urllib3.connectionpool:Retrying (Retry(total=2)) after connection broken by "
        "'ConnectionResetError(104, 'Connection reset by peer')': /api/x",
        "WARNING reward server refused a connection, second try worked",
        "judge endpoint timed out but answered on the third attempt",
    ],
)
def test_a_line_that_tells_of_another_try_ends_no_job(tmp_path: Path, line: str) -> None:
    assert judged(tmp_path, job=[*steps(0, 9), line, "Weights are in out/. See you."]).cause == "benign"


def test_the_last_retry_is_no_success(tmp_path: Path) -> None:
    line = "WARNING reward server refused a connection, second try failed, giving up"
    assert judged(tmp_path, job=[*steps(0, 9), line]).cause == "remote_service_timeout"


def test_a_rank_refused_by_a_process_of_its_own_host_is_not_the_first_that_failed(tmp_path: Path) -> None:
    refused = (
        "[rank3]: RuntimeError: failed to connect, willRetry=0, retry=3, rank=3, size=4, local=[10.7.0.4]:3312, "
        "remote=[10.7.0.4]:2154, error=SO_ERROR: Connection refused, remote=[10.7.0.4]:2154"
    )
    verdict = judged(tmp_path, job=[refused, *raised(1, "KeyError: 'label'")])
    assert verdict.cause == "rank_exception_masked" and [each.rank for each in verdict.culprits] == [1]


def test_a_full_disk_is_not_shared_memory_because_of_the_name_of_a_folder(tmp_path: Path) -> None:
    line = "OSError: [Errno 28] No space left on device: '/root/.cache/vllm/torch_compile_cache/a/rank_0_0'"
    assert judged(tmp_path, job=[*steps(0, 9), *raised(0, line)]).cause == "storage_fault"
    shared = "RuntimeError: unable to write: No space left on device: '/torch_4120_91'"
    assert judged(tmp_path / "shared", job=[*steps(0, 9), *raised(0, shared)]).cause == "shm_too_small"


def test_a_size_that_the_peer_did_not_send_explains_an_absurd_allocation(tmp_path: Path) -> None:
    absurd = (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4611686018427387904 bytes. Error code 12 (Cannot allocate memory)"
    )
    sizes = "RuntimeError: [enforce fail at pair.cc:454] op.preamble.length <= op.nbytes. 8192 vs 4096"
    verdict = judged(tmp_path, job=[*steps(0, 9), *raised(1, absurd), *raised(0, sizes)])
    assert verdict.cause == "rank_divergent_branch"


def test_a_rank_named_where_somebody_tells_of_it_is_the_culprit(tmp_path: Path) -> None:
    told = {
        "host_oom": "launcher: the process of rank 2 was killed by the kernel's OOM killer (pid 4412)",
        "uneven_data": "[2026-11-21 14:20:00] WARNING loader: rank 2 ran out of batches, the others have 4 more",
    }
    waits = [line for rank in (0, 1, 3) for line in watchdog(rank, 21)]
    for cause, line in told.items():
        verdict = judged(tmp_path / cause, job=[*steps(0, 9), line, *(waits if cause == "uneven_data" else [])])
        assert verdict.cause == cause and [each.rank for each in verdict.culprits] == [2]


def test_a_traceback_with_the_level_on_each_line_is_of_the_rank_of_its_file(tmp_path: Path) -> None:
    stamp = "2026-11-21 14:10:20 ERROR "
    lines = [f"{stamp}{each.removeprefix('[rank1]: ')}" for each in raised(1, "TypeError: 'NoneType' is no list")]
    verdict = judged(tmp_path, rank0=[*steps(0, 9), *watchdog(0, 9)], rank1=[*steps(1, 9), *lines])
    assert verdict.cause == "rank_exception_masked" and [each.rank for each in verdict.culprits] == [1]
