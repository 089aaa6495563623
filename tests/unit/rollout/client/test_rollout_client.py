"""Requests to engines and their completions, by queue."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from engine_stub import Engine, prompts, requests

from lockstep.config.rollout import SamplingConfig
from lockstep.rollout.client.rollout_client import RolloutClient


def test_each_queue_collects_its_own_completions_once() -> None:
    engine = Engine(all_s=0.0)
    engines = RolloutClient([engine], SamplingConfig(), 0)  # type: ignore[list-item]
    engines.submit([requests("a", "a/0", "a/1")], queue="step 4")
    engines.submit([requests("b", "b/0")], queue="step 5")
    assert [found.request for found in engines.collect(queue="step 5")] == ["b/0"]
    assert engines.collect(queue="step 5") == [], "each comes once"
    assert {found.request for found in engines.sample(prompts(2), SamplingConfig(), "evaluation")} == {
        "evaluation.1/0:0",
        "evaluation.1/0:1",
    }
    assert [found.request for found in engines.collect(queue="step 4")] == ["a/0", "a/1"], "kept while others asked"


def test_whole_groups_go_to_the_least_loaded_engine() -> None:
    busy, idle = Engine(half_s=9, all_s=9), Engine(half_s=9, all_s=9)
    engines = RolloutClient([busy, idle], SamplingConfig(), 0)  # type: ignore[list-item]
    engines.submit([requests("a", *(f"a/{k}" for k in range(4)))])
    engines.submit([requests("b", "b/0", "b/1"), requests("c", "c/0")])
    assert (len(busy.asked), idle.asked) == (4, ["b/0", "b/1", "c/0"])


def test_collect_returns_at_once() -> None:
    engines = RolloutClient([Engine(half_s=9, all_s=9)], SamplingConfig(), 0)  # type: ignore[list-item]
    began = time.monotonic()
    assert engines.collect() == []
    engines.submit([requests("a", "a/0")])
    assert engines.collect() == []
    assert time.monotonic() - began < 1


def test_earlier_steps_come_first_and_evaluation_before_all() -> None:
    engines = RolloutClient([Engine()], SamplingConfig(), 0)  # type: ignore[list-item]
    (prompt,) = prompts(1)
    made = [engines.requests(step, prompt, {str(step): 0}) for step in (3, 2, -1)]
    assert [each.settings.priority for each in made] == [3, 2, -1]
