"""Lines dated outside a job are not its cause."""

from pathlib import Path

from lockstep.doctor.judge.log_diagnosis import explain
from tests.unit.doctor.job_logs import raised, steps, write

_KILLED = "Out of memory: Killed process 1881 (python3) total-vm:912331200kB, anon-rss:502331200kB"
_XID = "NVRM: Xid (PCI:0000:3f:00): 79, pid=1, name=python, GPU has fallen off the bus."
_JOB = [*steps(0, 9), "2026-11-21 14:11:00,000 [rank 3] ERROR stop", *raised(3, "KeyError: 'x'")]


def cause(folder: Path, kernel: str, job: list[str] = _JOB) -> tuple[str, float]:
    verdict = explain([write(folder, dmesg=[kernel], train=job)]).verdict
    return verdict.cause, verdict.confidence


def test_a_kill_on_another_day_is_not_the_cause(tmp_path: Path) -> None:
    assert cause(tmp_path, f"[Thu Nov 19 03:00:01 2026] {_KILLED}")[0] == "rank_exception_masked"
    assert cause(tmp_path, f"[Mon Nov 23 03:00:01 2026] {_KILLED}")[0] == "rank_exception_masked"


def test_a_kill_while_the_job_ran_is_the_cause(tmp_path: Path) -> None:
    found, sure = cause(tmp_path, f"[Sat Nov 21 14:10:05 2026] {_KILLED}")
    assert found == "host_oom" and sure > 0.8


def test_a_kill_may_be_dated_in_another_time_zone(tmp_path: Path) -> None:
    lines = [*steps(0, 9), "2026-11-21 14:11:00,000 [rank 3] ERROR stop"]
    found, sure = cause(tmp_path, f"[Sat Nov 21 07:10:05 2026] {_KILLED}", lines)
    assert found == "host_oom" and sure < 0.6


def test_a_hardware_fault_persists_with_less_confidence(tmp_path: Path) -> None:
    found, sure = cause(tmp_path, f"[Thu Nov 19 03:00:01 2026] {_XID}", steps(0, 2))
    assert found == "gpu_hardware_fault" and sure < 0.6
    assert cause(tmp_path, f"[Thu Nov 19 03:00:01 2026] {_XID}")[0] == "rank_exception_masked"


def test_the_end_of_a_log_without_final_timestamps_is_unknown(tmp_path: Path) -> None:
    bars = [f"{at}%|#    | {at}/100 [{at}:00<99:00, 1.0s/it]" for at in range(90)]
    assert cause(tmp_path, f"[Sun Nov 22 14:10:05 2026] {_KILLED}", [*steps(0, 9), *bars])[1] > 0.8
    assert cause(tmp_path, f"[Thu Nov 19 14:10:05 2026] {_KILLED}", [*bars, *steps(0, 9)])[1] > 0.8


def test_old_lines_printed_by_an_epilog_are_ignored(tmp_path: Path) -> None:
    kernel = [f"[Fri Nov 20 03:09:58 2026] {_XID}", f"[Fri Nov 20 03:10:58 2026] {_KILLED}"]
    verdict = explain([write(tmp_path, slurm=[*_JOB, "--- last kernel messages ---", *kernel])]).verdict
    assert verdict.cause == "rank_exception_masked" and verdict.confidence >= 0.6
    now = ["[Fri Nov 20 03:10:58 2026] nvidia: loaded", f"[Sat Nov 21 14:10:58 2026] {_XID}"]
    verdict = explain([write(tmp_path / "now", slurm=[*_JOB, "--- last kernel messages ---", *now])]).verdict
    assert verdict.cause == "gpu_hardware_fault"
