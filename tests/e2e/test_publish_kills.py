"""An engine is killed, or hangs, in the middle of copying weights: the run continues and ends with the weights of an
undisturbed run. An engine that is only slow is waited for."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import Launched, config, prompts_used, weights, write
from resume_scenarios import References

from lockstep.ledger.ledger import Ledger

KILLS = 20


def pause_in_copy(launched: Launched, name: str, folder: Path) -> tuple[int, Path]:
    """Pause an engine in its next copy; returns its pid and the file whose removal resumes it."""
    state = launched.wait_until(lambda: launched.beacon(name), name, lambda: False)
    (hold := folder / f"hold-{state.pid}").touch()
    launched.wait_for_file(folder, f"half-{state.pid}")
    return state.pid, hold


def restarted(launched: Launched) -> list[dict[str, Any]]:
    with Ledger.reader(launched.folder) as ledger:
        return [e.fields for e in ledger.events() if e.kind == "recovery" and e.fields["action"] == "restarted"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_is_killed_in_the_middle_of_its_copy_twenty_times_in_a_row(
    reference: References, tmp_path: Path
) -> None:
    home = reference("grpo").home
    changes = {"steps": KILLS + 2, "evaluation": None, "checkpoint": {"every": 10}, "weights": {"check": "complete"}}
    values = config(home, "grpo", folder=str(tmp_path / "quiet"), **changes)
    quiet = Launched.start(tmp_path / "quiet" / "grpo", str(write(tmp_path / "quiet", values)))
    assert quiet.finish() == 0, quiet.text()
    values |= {"folder": str(tmp_path / "runs"), "recovery": {"rollout": {"max_restarts": 2 * KILLS}}}
    (folder := tmp_path / "midway").mkdir()
    file = write(tmp_path, values)
    launched = Launched.start(tmp_path / "runs" / "grpo", str(file), hold={"midway": str(folder)})
    for number in range(KILLS):
        pid, hold = pause_in_copy(launched, f"engine-0.{number}" if number else "engine-0", folder)
        os.kill(pid, signal.SIGKILL)
        hold.unlink()
        launched.wait_until(lambda: len(restarted(launched)) > number or None, "healed", lambda: False)  # noqa: B023
    assert launched.finish() == 0, launched.text()
    assert [each["what"] for each in restarted(launched)] == ["died (SIGKILL)"] * KILLS
    assert weights(launched.folder) == weights(quiet.folder)
    assert prompts_used(launched.folder) == prompts_used(quiet.folder)


@pytest.mark.slow
def test_an_engine_that_hangs_in_its_copy_is_ended_and_not_the_trainer(reference: References, tmp_path: Path) -> None:
    home = reference("grpo").home
    changes = {"steps": 6, "evaluation": None, "weights": {"check": "complete", "receiver_limit_s": 2.0}}
    values = config(home, "grpo", folder=str(tmp_path / "runs"), **changes)
    values["rollout"] |= {"engine": {"count": 2, "max_rows": 32, "threads": 1}, "reissue": {"after_s": 2.0}}
    (folder := tmp_path / "midway").mkdir()
    file = write(tmp_path, values)
    launched = Launched.start(tmp_path / "runs" / "grpo", str(file), hold={"midway": str(folder)})
    pid, _ = pause_in_copy(launched, "engine-1", folder)
    assert launched.finish() == 0, launched.text()
    assert f"pid {pid} has been reading weights of an older version" in launched.printed()
    assert [each["worker"] for each in restarted(launched)] == ["engine-1"], "no other worker has failed"


@pytest.mark.slow
def test_an_engine_that_takes_long_for_its_weights_is_not_left_out(reference: References, tmp_path: Path) -> None:
    home = reference("grpo").home
    values = config(
        home, "grpo", folder=str(tmp_path / "runs"), steps=2, evaluation=None, weights={"check": "complete"}
    )
    values["rollout"] |= {"engine": {"count": 2, "max_rows": 32, "threads": 1}, "reissue": {"after_s": 3.0}}
    (folder := tmp_path / "midway").mkdir()
    file = write(tmp_path, values)
    launched = Launched.start(tmp_path / "runs" / "grpo", str(file), hold={"midway": str(folder)})
    pid, hold = pause_in_copy(launched, "engine-1", folder)
    (folder / f"slow-{pid}").touch()
    hold.unlink()
    assert launched.finish() == 0, launched.text()
    assert "is excluded" not in launched.printed() and restarted(launched) == []
    with Ledger.reader(launched.folder) as ledger:
        took = [row.values["time/publish_s"] for row in ledger.metrics_rows()]
    assert max(took) > 3.5, took
