"""Which checkpoints are written, when they count, and which are kept."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.cluster.protocol import RemoteError
from lockstep.config.trainer import CheckpointConfig
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.run.checkpoint_manager import CheckpointManager, restore_checkpoint
from lockstep.train.errors import CheckpointError


class SlowSaver:
    """Writes a file at once and says that it is complete after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.left = looks, 0
        self.folders: list[Path] = []

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(folder.name)
        self.folders.append(folder)
        self.left = self.looks

    def saved(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger.create(tmp_path / "run", {"name": "x"})
    for step in range(12):
        ledger.commit(step, {})
    return ledger


def make(ledger: Ledger, looks: int = 0, **config: object) -> CheckpointManager:
    return CheckpointManager(
        CheckpointConfig.model_validate(config), ledger.folder / "checkpoints", ledger, SlowSaver(looks)
    )


def versions(ledger: Ledger) -> list[int]:
    return [row.step + 1 for row in ledger.checkpoints()]


def test_a_checkpoint_counts_only_when_it_is_complete(ledger: Ledger) -> None:
    checkpoints = make(ledger, looks=2)
    checkpoints.begin(4, None)
    for expected in (None, None, 4):
        checkpoints.poll()
        assert checkpoints.newest() == expected


def test_finish_waits_for_the_current_checkpoint(ledger: Ledger) -> None:
    checkpoints = make(ledger, looks=3)
    checkpoints.begin(4, None)
    checkpoints.finish()
    assert versions(ledger) == [4]


def test_the_newest_and_the_best_checkpoints_are_kept(ledger: Ledger) -> None:
    checkpoints = make(ledger, keep_last=2, keep_best=True)
    for version, metric in ((2, 0.3), (4, 0.9), (6, 0.5), (8, None), (10, 0.7)):
        checkpoints.begin(version, metric)
        checkpoints.finish()
    assert versions(ledger) == [4, 8, 10]
    assert sorted(path.name for path in (ledger.folder / "checkpoints").iterdir()) == [
        *("00000004", "00000008", "00000010")
    ]


def test_without_keep_best_only_the_newest_are_kept(ledger: Ledger) -> None:
    checkpoints = make(ledger, keep_last=3, keep_best=False)
    for version in (2, 4, 6, 8):
        checkpoints.begin(version, 1 / version)
        checkpoints.finish()
    assert versions(ledger) == [4, 6, 8]


def test_due_periodically_at_the_end_and_for_a_new_best(ledger: Ledger) -> None:
    checkpoints = make(ledger, every=5)
    due = [version for version in range(12) if checkpoints.due(version, last=version == 11, improved=version == 7)]
    assert due == [5, 7, 10, 11]
    never = make(ledger, every=0, keep_best=False)
    assert [version for version in range(12) if never.due(version, last=version == 11, improved=True)] == [11]


def test_an_existing_or_current_checkpoint_is_not_due_again(ledger: Ledger) -> None:
    checkpoints = make(ledger, looks=1, every=5)
    checkpoints.begin(5, None)
    assert not checkpoints.due(5, last=True, improved=True)
    checkpoints.finish()
    assert not checkpoints.due(5, last=True, improved=True)


def test_leftovers_of_a_killed_run_are_deleted(ledger: Ledger) -> None:
    checkpoints = make(ledger)
    checkpoints.begin(4, None)
    checkpoints.finish()
    folder = ledger.folder / "checkpoints"
    (folder / "00000006.tmp-1-2").mkdir()  # cut while it was written
    (folder / "00000006").mkdir()  # complete, but the ledger does not know
    (folder / "00000004-good").mkdir()  # a copy that the user made
    (folder / "notes.txt").write_text("mine")
    make(ledger)
    assert sorted(path.name for path in folder.iterdir()) == ["00000004", "00000004-good", "notes.txt"]


class Ranks:
    """Load what is not damaged."""

    def __init__(self, *damaged: int, code: str = CheckpointError.error_code) -> None:
        self.damaged, self.code = [f"{version:08d}" for version in damaged], code
        self.loaded: list[str] = []

    def load(self, folder: Path) -> None:
        if folder.name in self.damaged:
            raise RemoteError("policy-0", 0, "CheckpointError", f"checkpoint {folder}: is torn", "", self.code)
        self.loaded.append(folder.name)


def saved_at(ledger: Ledger, *at: int, keep_last: int = 2) -> None:
    checkpoints = make(ledger, keep_last=keep_last)
    for version in at:
        checkpoints.begin(version, None)
        checkpoints.finish()


def test_a_run_starts_new_or_from_the_newest_checkpoint(ledger: Ledger) -> None:
    assert restore_checkpoint(Ranks(), ledger) == 0
    saved_at(ledger, 2, 4)
    ranks = Ranks()
    assert (restore_checkpoint(ranks, ledger), ranks.loaded) == (4, ["00000004"])


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(ledger: Ledger) -> None:
    saved_at(ledger, 2, 4, 6)
    ranks = Ranks(6)
    assert (restore_checkpoint(ranks, ledger), ranks.loaded) == (4, ["00000004"])
    assert versions(ledger) == [4], "so that it is written again when the run has come as far"
    assert make(ledger, every=2).due(6, last=False, improved=False)


def test_a_run_that_generates_nothing_falls_back_to_any_checkpoint(ledger: Ledger) -> None:
    saved_at(ledger, 2, 4, 6, 8, keep_last=4)
    ranks = Ranks(4, 6, 8)
    assert (restore_checkpoint(ranks, ledger), ranks.loaded) == (2, ["00000002"])
    assert versions(ledger) == [2]


def test_checkpoints_whose_later_step_files_are_gone_are_not_used(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "other", {"name": "x"}) as ledger:
        for step in range(8):
            token = np.array([1], np.int32)
            completion = Completion(f"0:{step}/0", token, np.zeros(1, np.float32), token, "stop", "1")
            group = Group(Prompt(f"0:{step}", step, token, "1="), [completion], np.ones(1, np.float32))
            ledger.record_rollouts(step, Rollouts(step=step, version=step, groups=[group]))
            ledger.commit(step, {})
        saved_at(ledger, 2, 4, 6, keep_last=3)
        assert ledger.stored_steps() == [4, 5, 6, 7]
        with pytest.raises(RemoteError, match="00000006: is torn"):
            restore_checkpoint(Ranks(4, 6), ledger)
        assert versions(ledger) == [2, 4, 6]


def test_other_errors_are_raised(ledger: Ledger) -> None:
    saved_at(ledger, 2, 4)
    with pytest.raises(RemoteError):
        restore_checkpoint(Ranks(4, code=""), ledger)
    assert versions(ledger) == [2, 4]


def test_a_complete_checkpoint_counts_after_its_writer_was_lost(ledger: Ledger) -> None:
    checkpoints = make(ledger, looks=99)
    checkpoints.begin(3, 0.5)
    (checkpoints.folder / "00000004.tmp-1-1").mkdir()
    checkpoints.writer_lost()
    assert [(row.step, row.metric) for row in ledger.checkpoints()] == [(2, 0.5)]
    assert [path.name for path in checkpoints.folder.iterdir()] == ["00000003"]
    checkpoints.poll()
    checkpoints.writer_lost()
    assert checkpoints.newest() == 3
