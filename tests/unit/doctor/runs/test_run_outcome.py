"""The outcome of a run of ours, from its ledger: finished, running, interrupted, failed, killed, recovered."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.doctor.output.job_answer import JobAnswer, answer_job
from lockstep.doctor.runs.run_outcome import RECORD_FILE, RunState, read_record, record_text, run_title
from lockstep.ledger import Ledger
from lockstep.watch.diagnosis.verdict import Culprit, Verdict, VerdictKind, VerdictLevel

CONFIG = {"recipe": "grpo", "name": "sort", "steps": 8}


def run(folder: Path, done: int, end: str = "", more: Callable[[Ledger], None] | None = None) -> Ledger:
    """Returns the open ledger of a run."""
    ledger = Ledger.create(folder, CONFIG)
    ledger.record_event("start", rows=20)
    for step in range(done):
        ledger.record_metrics(step, {"reward/mean": 0.5})
        ledger.commit(step, {})
    if more is not None:
        more(ledger)
    if end:
        ledger.record_event("end", reason=end, steps=done)
    return ledger


def ended(folder: Path, done: int, end: str = "", more: Callable[[Ledger], None] | None = None) -> JobAnswer:
    """Explains a run that has no process any more."""
    run(folder, done, end, more).close()
    return answer_job([str(folder)])


def recovery(ledger: Ledger) -> None:
    at = ledger.events()[0].at
    ledger.record_event("recovery", action="failed", at=at, worker="engine-0", what="died (SIGKILL)", step=3)
    ledger.record_event("recovery", action="restarted", at=at + 1, worker="engine-0", seconds=0.8, requests=16)


def test_a_finished_run_is_healthy_with_what_it_did(tmp_path: Path) -> None:
    answer = ended(tmp_path / "run", 8, "finished")
    assert answer.healthy and answer.title == "The run finished: 8 of 8 steps" and not answer.others
    assert [each.file for each in answer.verdict.evidence] == ["ledger.sqlite"] * 3
    assert "the run ended at" in answer.verdict.evidence[-1].text
    assert answer.json()["run"]["state"] == "finished" and answer.json()["class"] == "benign"


def test_a_recovered_run_says_what_was_recovered(tmp_path: Path) -> None:
    answer = ended(tmp_path / "run", 8, "finished", recovery)
    assert answer.healthy and answer.title.endswith("; 1 incident, recovered")
    assert "Recovered: engine-0 died (SIGKILL), healed after 1.0s (in 0.8 s, 16 requests" in answer.verdict.explanation
    assert any("engine-0" in each.text for each in answer.verdict.evidence)
    assert answer.json()["run"]["incidents"][0]["outcome"] == "healed"


def test_an_interrupted_run_is_healthy_and_says_how_to_resume(tmp_path: Path) -> None:
    answer = ended(tmp_path / "run", 5, "interrupted")
    assert answer.healthy and answer.title == "The run was stopped on request after 5 of 8 steps"
    assert f"lockstep train --resume {tmp_path / 'run'}" in answer.verdict.fix


def test_a_run_in_progress_is_recognised_by_its_lock(tmp_path: Path) -> None:
    with run(tmp_path / "run", 3):
        answer = answer_job([str(tmp_path / "run")])
        assert read_record(tmp_path / "run").pid == os.getpid()
    assert answer.healthy and answer.title == "The run is in progress: 3 of 8 steps done"
    assert "step 4 is in progress" in answer.verdict.explanation
    assert read_record(tmp_path / "run").state is RunState.KILLED, "the lock is free"


def test_a_raising_reward_is_named_with_its_file_and_the_log(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    why = "failed: RewardError: reward /home/u/rewards.py:score: raised ValueError: no closing tag"
    run(folder, 3, why).close()
    (folder / "logs" / "controller.log").write_text(
        "2026-11-27 20:28:30,793 controller E lockstep.run.run_reporter: the run failed\n"
        'Traceback (most recent call last):\n  File "/home/u/rewards.py", line 4, in score\n'
        '    raise ValueError("no closing tag")\nValueError: no closing tag\n'
    )
    answer = answer_job([str(folder)])
    verdict = answer.verdict
    assert answer.title == "The run failed after 3 of 8 steps" and verdict.cause == "rank_exception_masked"
    assert verdict.explanation.startswith("Step 4 of 8 failed: RewardError: reward /home/u/rewards.py:score")
    assert verdict.culprits == (Culprit(None, role="reward", where="score() of /home/u/rewards.py"),)
    assert verdict.evidence[0].file == "ledger.sqlite" and why.removeprefix("failed: ") in verdict.evidence[0].text
    assert any(each.file == "logs/controller.log" and each.line == 5 for each in verdict.evidence)
    assert "Correct the reward function" in verdict.fix and "--resume" in verdict.fix


def test_a_run_without_an_end_was_stopped_from_outside(tmp_path: Path) -> None:
    answer = ended(tmp_path / "run", 4)
    assert answer.verdict.cause == "external_kill" and answer.verdict.confidence < 0.8
    assert answer.title == "The run was stopped from outside after 4 of 8 steps"
    (other,) = answer.others
    assert other.cause == "host_oom" and other.distinguish


def stalled(folder: Path) -> Culprit:
    """A run that gave up because a rank stood still; returns that rank, which its incident names."""
    incident = folder / "incidents" / "20261127-202818-absent-policy-1"

    def stall(ledger: Ledger) -> None:
        ledger.record_event(
            "stall", number=1, change="told", level="confirmed", verdict="absent", who=["policy-1"], since_s=0.0,
            text="policy-1 has been in score() for 41 s", said_at=ledger.events()[0].at, incident=str(incident),
        )  # fmt: skip

    run(folder, 3, "failed: GaveUp: policy-1 did not come back", stall).close()
    incident.mkdir(parents=True)
    culprit = Culprit(1, role="policy", where="score() at reward.py:31")
    verdict = Verdict(VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (culprit,), "slow_rank_preprocess", confidence=0.8)
    (incident / "verdict.json").write_text(json.dumps(verdict.json()))
    return culprit


def test_an_incident_that_was_not_recovered_gives_class_and_culprit(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    culprit = stalled(folder)
    answer = answer_job([str(folder)])
    assert answer.verdict.cause == "slow_rank_preprocess" and answer.verdict.culprits == (culprit,)
    assert answer.title.endswith("1 incident, 1 not recovered")
    assert "Not recovered: policy-1" in answer.verdict.explanation


def test_the_second_attempt_counts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 3, "interrupted").close()
    with Ledger.resume(folder) as ledger:
        ledger.record_event("start", rows=20)
    record = read_record(folder)
    assert record.generation > 1 and record.state is RunState.KILLED, "the end belongs to the attempt before"
    assert f"attempt {record.generation}" in answer_job([str(folder)]).verdict.explanation


@pytest.mark.parametrize("end", ["finished", "interrupted", "failed: OSError: no space left on device"])
def test_what_ended_an_earlier_attempt_is_no_verdict_about_the_last_one(tmp_path: Path, end: str) -> None:
    folder = tmp_path / "run"
    culprit = stalled(folder)
    with Ledger.resume(folder) as ledger:
        ledger.record_event("start", rows=20)
        ledger.record_event("end", reason=end, steps=8)
    answer = answer_job([str(folder)])
    assert answer.healthy == (not end.startswith("failed")) and culprit not in answer.verdict.culprits
    assert answer.verdict.cause != "slow_rank_preprocess"
    assert answer.title.endswith("1 incident, recovered or ended with an earlier attempt")
    assert "Ended an earlier attempt: policy-1" in answer.verdict.explanation


def test_a_record_in_a_bundle_gives_the_same_answer(tmp_path: Path) -> None:
    answer = ended(tmp_path / "run", 8, "finished", recovery)
    assert answer.run is not None
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / RECORD_FILE).write_text(record_text(answer.run))
    again = answer_job([str(bundle)])
    assert again.run is not None and run_title(again.run) == answer.title
    assert again.verdict == answer.verdict


@pytest.mark.parametrize("text", ["{}", "[]", '{"events": 1}'])
def test_a_damaged_record_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD_FILE).write_text(text)
    with pytest.raises(ValueError, match=RECORD_FILE):
        answer_job([str(tmp_path)])


def test_a_folder_around_a_run_is_answered_from_its_ledger(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "sort"
    ended(folder, 3, "finished")
    (tmp_path / "job.log").write_text("engine-0 died (SIGKILL)\nERROR: killed\n")
    answer = answer_job([str(tmp_path)])
    assert answer.run is not None and answer.run.folder == str(folder) and answer.healthy
