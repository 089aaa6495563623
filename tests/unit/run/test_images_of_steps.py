"""The images of a run's steps: kept while a step needs them, and left out if they have changed since the run began."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout" / "client"))
sys.path.insert(0, str(Path(__file__).parents[1] / "data" / "images"))
from engine_stub import Engine
from vision_folders import Attempts, png

from lockstep.config.loader import check_config
from lockstep.config.rollout import SamplingConfig
from lockstep.data.dataset_rows import DataError
from lockstep.data.samples import Group, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.run import rollout_buffer
from lockstep.run.interrupt import InterruptHandler
from lockstep.run.planning.run_data import RunData
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.recovery.trainer_recovery import RecoveryContext
from lockstep.run.rollout_buffer import PromptSampler, RolloutBuffer
from lockstep.run.run import Run, RunRoles
from lockstep.run.trained_roles import TrainedRoles

PER_STEP = 2


class Life:
    """One attempt of a run without trainers, from its data to the groups of its steps."""

    def __init__(self, data: Attempts, ledger: Ledger, ahead: int = 0, room: int | None = None) -> None:
        self.ledger, self.engine = ledger, Engine()
        samples = data.open(room)
        self.data = RunData(samples, store=data.store)
        draws = PromptSampler(self.data.take, ledger, PER_STEP, filtered=False)
        client = RolloutClient([self.engine], SamplingConfig(), 0)  # type: ignore[list-item]
        self.rollouts = RolloutBuffer(client, ledger, draws, group_size=2, steps=9, max_staleness=ahead)
        roles: Any = RunRoles(trained=TrainedRoles([]), data=self.data, rollouts=self.rollouts)  # type: ignore[arg-type]
        values = {
            "recipe": "grpo", "name": "x", "steps": 9, "model": {"path": "m"}, "data": {"path": "d"},
            "reward": {"terms": [{"kind": "exact_match"}]}, "prompts_per_step": PER_STEP,
        }  # fmt: skip
        config = check_config(values, "test")
        reporter: Any = SimpleNamespace(choose_samples=lambda step, rollouts: [])
        context = RecoveryContext(RecoveryManager(config.recovery, ledger), None)
        self.run = Run(config, ledger.folder, ledger, roles, reporter, InterruptHandler(), 0, context)

    def step(self, step: int) -> list[Group]:
        """The groups that a step trains on."""
        self.engine.version = step
        groups = self.run.groups(step)
        while groups.missing:
            groups.add(self.scored(self.rollouts.take(step, groups.missing)))
        self.run.collected(step, groups)
        return groups.rollouts.groups

    @staticmethod
    def scored(rollouts: Rollouts) -> Rollouts:
        for group in rollouts.groups:
            group.rewards = np.zeros(len(group.completions), np.float32)
        return rollouts


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "ledger", {"name": "x"})


def rows_of(groups: list[Group]) -> list[int]:
    return [group.prompt.row for group in groups]


def test_completions_that_wait_for_training(tmp_path: Path, ledger: Ledger) -> None:
    """With the prepared pixels nothing changes; without them, the group of a changed image is left out and counted."""
    data = Attempts(tmp_path, "skip")
    before = Life(data, ledger).step(0)
    assert rows_of(before) == [0, 1]
    data.picture(1).write_bytes(png((16, 16), 99))
    again = Life(data, ledger).step(0)
    assert rows_of(again) == [0, 1]
    digests = [image.digest for group in again for image in group.prompt.images]
    assert digests == [image.digest for group in before for image in group.prompt.images]
    for digest in digests:
        data.store.path(digest).unlink()
    life = Life(data, ledger)
    assert rows_of(life.step(0)) == [0] and life.run._row["data/left_out"] == 1.0
    assert digests[0] in data.store and digests[1] not in data.store, "prepared again, and nothing of the new picture"
    data.picture(0).unlink()
    data.store.path(digests[0]).unlink()
    with pytest.raises(DataError, match="all samples of step 1 are too long, or have images that have become unusable"):
        Life(data, ledger).step(0)


def test_prompts_that_were_not_submitted_yet(tmp_path: Path, ledger: Ledger) -> None:
    data = Attempts(tmp_path, "skip")
    Life(data, ledger).step(0)
    data.picture(3).unlink()
    life = Life(data, ledger)
    assert rows_of(life.step(1)) == [2] and life.run._row["data/left_out"] == 1.0
    assert rows_of(life.step(2)) == [4, 5], "every row has the step that it had"
    assert all("/0:3/" not in id for id in life.engine.asked)


def test_completions_that_were_kept_of_an_unfinished_step(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a changed image are not used with the new one; the others are, and are not generated again."""
    monkeypatch.setattr(rollout_buffer, "PERSIST_INTERVAL_S", 0.0)
    data = Attempts(tmp_path, "skip")
    Life(data, ledger, ahead=1).step(0)
    kept = {each.request for each in ledger.kept_completions(1)}
    assert len(kept) == 4
    data.picture(2).write_bytes(png((16, 16), 99))
    life = Life(data, ledger, ahead=1)
    groups = life.step(1)
    assert rows_of(groups) == [3]
    assert {each.request for group in groups for each in group.completions} < kept
    assert not kept & set(life.engine.asked)
    refused = Attempts.__new__(Attempts)
    refused.__dict__ |= {**data.__dict__, "on_error": "refuse"}
    with pytest.raises(DataError, match=r"row 2: image '.*2.png' \(was [0-9a-f]{32}, is [0-9a-f]{32}\)"):
        Life(refused, ledger)


def test_the_folder_of_images_stays_as_small_as_the_steps_in_progress(tmp_path: Path, ledger: Ledger) -> None:
    data = Attempts(tmp_path, rows=18)
    life = Life(data, ledger, ahead=1, room=0)
    most = 0
    for step in range(9):
        groups = life.step(step)
        assert all(image.digest in data.store for group in groups for image in group.prompt.images)
        most = max(most, len(list((tmp_path / "run").glob("??/*"))))
        life.run.ledger.commit(step, {})
        life.data.release(*range(step + 1))
    assert most <= 3 * PER_STEP, "of this step, of the next, and of the one that is prepared ahead"
