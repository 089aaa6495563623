"""What looks like a cause and is none: lists of guesses, ends, waits of an engine; and ends that tell nothing else."""

from pathlib import Path

import pytest

from lockstep.doctor.explain import explain
from lockstep.watch.verdict import Verdict

from .jobs import raised, steps, watchdog, write

_SILENT = "INFO [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds."


def judged(folder: Path, **files: list[str]) -> Verdict:
    return explain([write(folder, **files)]).verdict


@pytest.mark.parametrize(
    ("said", "cause"),
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
def test_a_list_of_possible_causes_is_no_evidence(tmp_path: Path, said: str, cause: str) -> None:
    verdict = judged(tmp_path, driver=[*steps(0, 9), said])
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
def test_an_end_from_outside_counts_where_nothing_failed_before(tmp_path: Path, end: str) -> None:
    verdict = judged(tmp_path, job=[*steps(0, 9), end])
    assert verdict.cause == "external_kill" and verdict.confidence < 0.8
    assert judged(tmp_path, job=[*steps(0, 9), *raised(1, "KeyError: 'x'"), end]).cause == "rank_exception_masked"
    assert judged(tmp_path, job=[*steps(0, 9), *watchdog(1, 9), end]).cause != "external_kill"


def test_the_gpu_that_throttles_is_the_one_that_all_wait_for(tmp_path: Path) -> None:
    def rank(number: int, state: str) -> list[str]:
        said = f"step {{}} clocks_event_reasons.hw_thermal_slowdown {state}"
        return [said.format(at) for at in range(20)] + (watchdog(number, 20) if state != "Active" else [])

    verdict = judged(tmp_path, rank0=rank(0, "Not Active"), rank1=rank(1, "Active"), rank2=rank(2, "Not Active"))
    assert verdict.cause == "gpu_hardware_fault" and [each.rank for each in verdict.culprits] == [1]
