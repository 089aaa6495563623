"""An engine that is killed again and again while it takes weights: the run goes on, with the weights of one that was
not disturbed."""

import os
import signal
from pathlib import Path

import pytest
from harness import Launched, config, prompts_used, weights, write
from lives import References

from lockstep.ledger.ledger import Ledger

KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_is_killed_in_the_middle_of_twenty_publishes(reference: References, tmp_path: Path) -> None:
    home = reference("grpo").home
    changes = {"steps": KILLS + 2, "evaluation": None, "checkpoint": {"every": 10}, "weights": {"check": "complete"}}
    values = config(home, "grpo", folder=str(tmp_path / "quiet"), **changes)
    quiet = Launched.start(tmp_path / "quiet" / "grpo", str(write(tmp_path / "quiet", values)))
    assert quiet.finish() == 0, quiet.text()
    values |= {"folder": str(tmp_path / "runs"), "recovery": {"rollout": {"max_restarts": 2 * KILLS}}}
    hold = {"stage": "train", "seconds": 0.3, "at_end": False}
    launched = Launched.start(tmp_path / "runs" / "grpo", str(write(tmp_path, values)), hold=hold)
    for number in range(KILLS):
        name = f"engine-0.{number}" if number else "engine-0"
        launched.wait_for("train", number)
        state = launched.beacon(name)
        assert state is not None, launched.text()
        os.kill(state.pid, signal.SIGSTOP)  # it has nothing to do; the next it is asked for is to take the weights
        launched.wait_for("publish", number)
        os.kill(state.pid, signal.SIGKILL)
        launched.wait_until(lambda: healed(launched) > number or None, "healed", lambda: False)  # noqa: B023
    assert launched.finish() == 0, launched.text()
    assert healed(launched) == KILLS
    assert weights(launched.folder) == weights(quiet.folder)
    assert prompts_used(launched.folder) == prompts_used(quiet.folder)


def healed(launched: Launched) -> int:
    with Ledger.reader(launched.folder) as ledger:
        return sum(e.kind == "recovery" and e.fields["action"] == "restarted" for e in ledger.events())
