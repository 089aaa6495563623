"""Generation ahead of training, and replaced groups, in runs with and without kills.

Such a run is not bitwise reproducible, as it depends on timing when an engine loads new weights. The tests check what
holds for every run: every prompt is used once, no step is generated again, no token is older than allowed.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Launched, config, task, train, weights, write

from lockstep.data.samples import Completion
from lockstep.ledger.ledger import Ledger

STEPS, PROMPTS, GROUP = 6, 4, 4
TERMS = [{"kind": "exact_match"}, {"kind": "regex", "pattern": "[0-4].*", "weight": 0.5}]


def values(home: Path, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A config with long completions of a fixed length, so that there is work ahead of training."""
    common: dict[str, Any] = {
        "name": name,
        "folder": str(folder / "runs"),
        "steps": STEPS,
        "loss": {"old_logprobs": "engine"},
        "rollout": {
            "sampling": {"max_tokens": 24, "ignore_eos": True},
            "engine": {"max_rows": 8, "threads": 1},
            "max_staleness": 2,
        },
        "token_budget": 512,
        "trainer": {"ranks": 1, "threads": 1, "optimizer": {"lr": 3e-3}},
    }
    return config(home, "grpo", **(common | changes))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task(tmp_path_factory.mktemp("async"))


def tokens_while_training(launched: Launched) -> int:
    """The largest number of tokens that the engine generated during one `train` stage, by its beacon."""
    counters: dict[int, list[int]] = {}
    while launched.process.poll() is None:
        position, engine = launched.position(), launched.beacon("engine-0")
        after = launched.position()
        counter = engine.counters.get("tokens") if engine is not None else None
        if (
            position is not None
            and position == after
            and position.stage == "train"
            and position.step is not None
            and counter
        ):
            counters.setdefault(position.step, []).append(counter.value)
        time.sleep(0.005)
    return max((max(found) - min(found) for found in counters.values()), default=0)


def own_versions(completion: Completion) -> np.ndarray:
    """The versions of the tokens that the model generated."""
    return completion.versions if completion.mask is None else completion.versions[completion.mask]


def check(run: Path, bound: int) -> dict[int, dict[str, float]]:
    """Check what must hold at any moment; returns the rows of metrics."""
    with Ledger.reader(run) as ledger:
        steps = ledger.collected_steps()
        assert steps == list(range(len(steps)))
        used = ledger.prompts_used()
        discarded: list[str] = []
        for step in steps:
            stored = ledger.stored_step(step)
            if stored is None:
                continue
            assert len(stored.rollouts.groups) == PROMPTS
            discarded += stored.extra.get("discarded", [])
            versions = np.concatenate([own_versions(c) for g in stored.rollouts.groups for c in g.completions])
            assert step - bound <= versions.min() and versions.max() <= step
            assert stored.rollouts.version >= step - bound
        assert len(discarded) == len(set(discarded)) and not set(discarded) & set(used)
        assert len(used) == PROMPTS * len(steps)
        return {row.step: row.values for row in ledger.metrics_rows()}


@pytest.mark.timeout(300)
def test_a_run_ahead_overlaps_and_is_bounded(home: Path, tmp_path: Path) -> None:
    made = values(home, tmp_path, "ahead", steps=3, reward={"terms": TERMS}, evaluation=None)
    run = tmp_path / "runs" / "ahead"
    launched = Launched.start(run, str(write(tmp_path, made)), hold={"stage": "train", "seconds": 0.2, "at_end": False})
    moved = tokens_while_training(launched)
    assert launched.finish() == 0, launched.text()
    assert moved > 0, "the engine decodes while the trainer works"
    rows = check(run, 2)
    assert sorted(rows) == [0, 1, 2]
    assert max(row["rollout/staleness_max"] for row in rows.values()) in (1, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_ahead_with_replaced_groups_resumes_after_a_kill(home: Path, tmp_path: Path) -> None:
    filtered = {"enable": True, "max_num_gen_batches": 3}
    made = values(home, tmp_path, "ahead", filter_groups=filtered, reward={"terms": TERMS})
    run = tmp_path / "runs" / "ahead"
    launched = Launched.start(run, str(write(tmp_path, made)), hold={"stage": "train", "seconds": 0.2, "at_end": False})
    launched.wait_for("train", 3)
    launched.kill()
    check(run, 2)
    digests = {path.name: path.read_bytes() for path in (run / "steps").glob("*.arrow")}
    assert digests

    launched = Launched.resume(run, hold={"stage": "train", "seconds": 0.2, "at_end": False})
    moved = tokens_while_training(launched)
    assert launched.finish() == 0, launched.text()
    assert moved > 0, "the engine decodes while the trainer works"
    for name, content in digests.items():
        path = run / "steps" / name
        assert not path.exists() or path.read_bytes() == content, "nothing durable is made anew"
    rows = check(run, 2)
    assert sorted(rows) == list(range(STEPS))
    assert max(row["rollout/staleness_max"] for row in rows.values()) in (1, 2)
    assert all(row["rollout/staleness_mean"] <= row["rollout/staleness_max"] for row in rows.values())
    assert max(row.get("rollout/ready", 0) for row in rows.values()) > 0
    assert all(1 <= row["rollout/rounds"] <= 3 for row in rows.values())
    assert list((run / "steps").glob("*.partial")) == []
    with Ledger.reader(run) as ledger:
        assert [row.step + 1 for row in ledger.evaluations()] == [0, 2, 4, 6]
        drawn = ledger._index.rows("SELECT start, count FROM draws ORDER BY start")
    positions = [position for start, count in drawn for position in range(start, start + count)]
    assert positions == list(range(len(positions))), "every position was used once"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bound", [1, 3])
def test_a_run_ahead_killed_again_and_again(home: Path, tmp_path: Path, bound: int) -> None:
    made = values(home, tmp_path, "ahead", reward={"terms": TERMS})
    made["rollout"]["max_staleness"] = bound
    run, file = tmp_path / "runs" / "ahead", write(tmp_path, made)
    digests: dict[str, bytes] = {}
    for stage, step in (("rollout", 0), ("reward", 1), ("logprobs", 2), ("publish", 2), ("evaluate", 3), ("train", 4)):
        hold_request = {"stage": stage, "seconds": 0.1, "at_end": False}  # some are over before anybody could look
        launched = (
            Launched.resume(run, hold=hold_request)
            if run.exists()
            else Launched.start(run, str(file), hold=hold_request)
        )
        launched.wait_for(stage, step)
        launched.kill()
        check(run, bound)
        for path in (run / "steps").glob("*.arrow"):
            assert digests.setdefault(path.name, path.read_bytes()) == path.read_bytes(), path.name
    launched = Launched.resume(run)
    assert launched.finish() == 0, launched.text()
    rows = check(run, bound)
    assert sorted(rows) == list(range(STEPS))
    with Ledger.reader(run) as ledger:
        expected = {f"{position // 20}" for position in range(STEPS * PROMPTS)}
        assert {uid.partition(":")[0] for uid in ledger.prompts_used()} == expected
        assert len(ledger.prompts_used()) == STEPS * PROMPTS


WORLD = '''
from lockstep.rollout.environments import Observation


class Twice:
    """Two turns; what is said in the second is worth something where the first said it too."""

    def reset(self, prompt):
        self.said = []
        return "+"

    def step(self, action):
        self.said.append(action)
        done = len(self.said) == 2
        return Observation("=", reward=float(done and self.said[0][:1] in self.said[1]), done=done)
'''


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bound", [1, 2])
def test_conversations_run_ahead_and_resume_after_a_kill(home: Path, tmp_path: Path, bound: int) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    rollout = {
        "sampling": {"max_tokens": 24, "stop": list("02468")},
        "engine": {"max_rows": 8, "threads": 1},
        "environment": {"path": f"{tmp_path}/world.py:Twice", "max_turn_tokens": 10, "branches": [2]},
        "max_staleness": bound,
    }
    reward = {"terms": [{"kind": "environment"}, *TERMS]}
    run = tmp_path / "runs" / "ahead"
    file = write(tmp_path, values(home, tmp_path, "ahead", rollout=rollout, reward=reward))
    launched = Launched.start(run, str(file), hold={"stage": "train", "seconds": 0.2, "at_end": False})
    launched.wait_for("train", 3)
    launched.kill()
    check(run, bound)
    digests = {path.name: path.read_bytes() for path in (run / "steps").glob("*.arrow")}
    launched = Launched.resume(run)
    assert launched.finish() == 0, launched.text()
    for name, content in digests.items():
        path = run / "steps" / name
        assert not path.exists() or path.read_bytes() == content, "nothing durable is made anew"
    rows = check(run, bound)
    assert sorted(rows) == list(range(STEPS))
    assert 1 <= max(row["rollout/staleness_max"] for row in rows.values()) <= bound
    assert all(row["rollout/turns_max"] == 2 for row in rows.values())
    with Ledger.reader(run) as ledger:
        last = [ledger.stored_step(step) for step in ledger.collected_steps()][-1]
    assert last is not None
    completions = [completion for group in last.rollouts.groups for completion in group.completions]
    masks = [completion.mask for completion in completions]
    assert all(mask is None or not mask.all() for mask in masks), "the environment's replies are not trained"
    assert any(mask is not None for mask in masks)
    assert all((np.diff(own_versions(each)) >= 0).all() for each in completions), "no turn is older than the one before"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replaced_groups_are_the_same_after_a_resume(home: Path, tmp_path: Path) -> None:
    """Without staleness the results are bitwise equal."""
    changes: dict[str, Any] = {
        "filter_groups": {"enable": True, "metric": "exact_match", "max_num_gen_batches": 4},
        "reward": {"terms": TERMS},
        "rollout": {"sampling": {"max_tokens": 4}, "engine": {"max_rows": 32, "threads": 1}},
    }
    whole = train(tmp_path, values(home, tmp_path, "whole", **changes))
    run, file = tmp_path / "runs" / "killed", write(tmp_path, values(home, tmp_path, "killed", **changes))
    for stage, step in (("rollout", 1), ("reward", 2), ("ledger", 3), ("train", 4)):
        hold_request = {"stage": stage, "seconds": 0.1, "at_end": False}  # some are over before anybody could look
        launched = (
            Launched.resume(run, hold=hold_request)
            if run.exists()
            else Launched.start(run, str(file), hold=hold_request)
        )
        launched.wait_for(stage, step)
        launched.kill()
    launched = Launched.resume(run)
    assert launched.finish() == 0, launched.text()
    assert weights(run) == weights(whole)
    one, other = check(run, 0), check(whole, 0)
    names = ("rollout/rounds", "rollout/groups_discarded", "reward/mean", "policy/loss")
    assert [[row[name] for name in names] for row in one.values()] == [
        [row[name] for name in names] for row in other.values()
    ]
    assert max(row["rollout/rounds"] for row in other.values()) > 1
    assert all(row["rollout/staleness_max"] == 0 for row in other.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_engine_does_not_hold_up_the_step(home: Path, tmp_path: Path) -> None:
    """The engine is not ended: the other one generates its requests, new weights do not wait for it, and it rejoins."""
    made = values(home, tmp_path, "two", steps=4, reward={"terms": TERMS}, evaluation=None)
    made["rollout"] |= {"max_staleness": 0, "reissue": {"after_s": 1.5}}
    made["rollout"]["engine"] |= {"count": 2}
    made["watch"] = {"enable": False}
    run = tmp_path / "runs" / "two"
    launched = Launched.start(
        run, str(write(tmp_path, made)), hold={"stage": "reward", "seconds": 0.5, "at_end": False}
    )
    launched.wait_for("reward", 0)
    state = launched.beacon("engine-1")
    assert state is not None
    os.kill(state.pid, signal.SIGSTOP)
    try:
        launched.wait_for("reward", 2)
    finally:
        os.kill(state.pid, signal.SIGCONT)
    assert launched.finish() == 0, launched.text()
    assert "engine-1 is excluded until it answers" in launched.text() and "engine-1 rejoined after" in launched.text()
    assert sorted(check(run, 0)) == [0, 1, 2, 3]
    with Ledger.reader(run) as ledger:
        assert not [event for event in ledger.events() if event.kind == "recovery"]
