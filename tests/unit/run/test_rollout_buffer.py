"""Rollouts of coming steps: durable, each generated once, and never older than allowed."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout" / "client"))
from engine_stub import Engine, prompts

from lockstep.config.rollout import SamplingConfig
from lockstep.data.samples import Prompt, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.run import rollout_buffer as room
from lockstep.run.rollout_buffer import PromptSampler, RolloutBuffer, TooStale, steps_to_request


class Source:
    """Prompts whose row is their position."""

    def take(self, step: int, start: int, count: int) -> list[Prompt]:
        return prompts(start + count)[start:]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "run", {"name": "x"})


def buffer(ledger: Ledger, engine: Engine, ahead: int = 0, steps: int = 9, filtered: bool = False) -> RolloutBuffer:
    engines = RolloutClient([engine], SamplingConfig(), 0)  # type: ignore[list-item]
    draws = PromptSampler(Source().take, ledger, 2, filtered)
    return RolloutBuffer(engines, ledger, draws, group_size=2, steps=steps, max_staleness=ahead)


def uids(rollouts: Rollouts) -> list[str]:
    return [group.prompt.uid for group in rollouts.groups]


def take(made: RolloutBuffer, step: int, count: int = 2) -> Rollouts:
    made.engines.workers[0].version = step  # type: ignore[attr-defined]
    made.request(step)
    return made.take(step, count)


def collect(ledger: Ledger, rollouts: Rollouts) -> None:
    for group in rollouts.groups:
        group.rewards = np.zeros(len(group.completions), np.float32)
    ledger.record_rollouts(rollouts.step, rollouts)


def test_slow_completions_are_durable_before_they_are_scored(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PERSIST_INTERVAL_S", 0.5)
    take(buffer(ledger, Engine(all_s=0.1)), 0)
    assert ledger.kept_completions(0) == [], "a quick step is not worth a write"

    slow = Engine(half_s=0.8, all_s=2.0)
    take(buffer(ledger, slow), 1)
    assert {found.request for found in ledger.kept_completions(1)} == set(slow.asked)

    again = Engine()
    made = buffer(ledger, again)
    rollouts = take(made, 1)
    assert (again.asked, made.metrics(1)["rollout/generated"]) == ([], 0)
    assert [c.request for group in rollouts.groups for c in group.completions] == slow.asked


def test_steps_are_requested_ahead_and_each_once(ledger: Ledger) -> None:
    engine = Engine()
    made = buffer(ledger, engine, ahead=2, steps=4)
    asked = []
    for step in range(4):
        rollouts = take(made, step)
        assert uids(rollouts) == [f"0:{2 * step}", f"0:{2 * step + 1}"]
        collect(ledger, rollouts)
        asked.append(sorted({int(id.partition("/")[0]) for id in engine.asked}))
    assert asked == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]], "none after the last"
    assert len(engine.asked) == len(set(engine.asked)) == 16
    assert made.metrics(3) == {"rollout/generated": 4.0, "rollout/ready": 1.0}


def test_completions_of_later_steps_are_kept_and_not_generated_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PERSIST_INTERVAL_S", 0.0)
    collect(ledger, take(buffer(ledger, Engine(), ahead=1), 0))
    assert len(ledger.kept_completions(1)) == 4
    engine = Engine()
    made = buffer(ledger, engine, ahead=1)  # after a kill
    collect(ledger, take(made, 1))
    assert {id.partition("/")[0] for id in engine.asked} == {"3"}
    assert made.metrics(1)["rollout/generated"] == 0


def test_collected_steps_are_not_requested(ledger: Ledger) -> None:
    first = buffer(ledger, Engine(), ahead=1)
    for step in range(3):
        collect(ledger, take(first, step))
    engine = Engine()
    made = buffer(ledger, engine, ahead=1)
    for step in range(3):  # trained again from what is stored
        made.request(step)
    assert {id.partition("/")[0] for id in engine.asked} == {"4"}


def test_rounds_get_new_prompts_and_a_restart_repeats_them(ledger: Ledger) -> None:
    made = buffer(ledger, Engine(), ahead=1, filtered=True)
    assert uids(take(made, 0)) == ["0:0", "0:1"]
    assert uids(take(made, 0, 1)) == ["0:4"], "step 2 has 2 and 3 already"
    again = buffer(ledger, Engine(), ahead=1, filtered=True)
    assert uids(take(again, 0)) == ["0:0", "0:1"]
    assert uids(take(again, 0, 1)) == ["0:4"]
    assert uids(take(again, 0, 2)) == ["0:5", "0:6"]
    assert uids(take(again, 1)) == ["0:2", "0:3"]


def test_a_token_that_is_too_old_is_never_trained_on(ledger: Ledger) -> None:
    made = buffer(ledger, Engine(), ahead=1)  # its tokens are all of version 0
    made.request(2)
    with pytest.raises(TooStale, match="step 3, which trains version 2, has a token of version 0: older than 1 step"):
        made.take(2, 2)


@given(st.integers(1, 30), st.integers(0, 6), st.data())
def test_no_token_is_older_than_the_bound_however_long_generation_takes(steps: int, bound: int, data: Any) -> None:
    """The schedule alone: engines may finish at any time after they were asked, and take new weights at once."""
    asked_at: dict[int, int] = {}
    start = data.draw(st.integers(0, steps - 1))
    stored = data.draw(st.integers(start, steps))  # steps before it are durable from an earlier life
    for step in range(start, steps):  # engines serve version `step`
        wanted = steps_to_request(step, steps, bound)
        assert len(wanted) <= bound + 1 and step in wanted
        for ahead in wanted:
            if ahead >= stored:
                asked_at.setdefault(ahead, step)
        if step >= stored:
            oldest = data.draw(st.integers(asked_at[step], step))
            assert step - bound <= oldest <= step
    assert set(asked_at) == set(range(stored, steps)), "all are asked for, and none after the last"


def test_overlap_leaves_the_controller_free(ledger: Ledger) -> None:
    """Requests of coming steps are handed over without waiting for them."""
    made = buffer(ledger, Engine(half_s=9, all_s=9), ahead=3)
    began = time.monotonic()
    made.request(0)
    assert time.monotonic() - began < 1


def test_rounds_taken_before_a_rewind_are_returned_again(ledger: Ledger) -> None:
    engine = Engine()
    made = buffer(ledger, engine, filtered=True)
    rounds = [take(made, 0, 2), made.take(0, 1)]
    asked = list(engine.asked)
    made.rewind()  # a trainer rank failed in the step
    made.request(0)
    assert [uids(made.take(0, count)) for count in (2, 1)] == [uids(each) for each in rounds]
    assert engine.asked == asked, "nothing is generated twice"
    third = made.take(0, 1)
    assert uids(third) == ["0:3"], "and what is missing still is drawn as it would have been"
    made.rewind()
    assert [uids(made.take(0, 1)) for _ in range(3)] == [uids(each) for each in (*rounds, third)]
    collect(ledger, rounds[0])
    made.request(1)
    assert made._taken == {}
