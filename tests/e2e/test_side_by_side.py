"""Runs side by side on one machine: ports, names in shared memory, fork servers and scratch folders do not collide."""

from pathlib import Path

import pytest
from harness import Launched, config, task, weights, write

from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runs", [3, 10])
def test_runs_of_one_name_at_once(tmp_path: Path, runs: int) -> None:
    """The runs have the same name and config, in folders of their own, and start at the same moment. They end with the
    same weights, and leave nothing behind."""
    home = task(tmp_path / "home")
    trainer = {"ranks": 1, "threads": 1, "optimizer": {"lr": 3e-3}}
    launched = []
    for number in range(runs):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        values = config(home, "sft", folder=str(folder / "runs"), steps=3, trainer=trainer)
        launched.append(Launched.start(folder / "runs" / "sft", str(write(folder, values)), cold=True))
    for each in launched:
        assert each.finish(900) == 0, each.text()
    folders = [each.folder for each in launched]
    assert all(weights(folder) == weights(folders[0]) for folder in folders)
    ids = {(folder / "run-id").read_text().strip() for folder in folders}
    assert len(ids) == runs and not any(run_shm_dir(run).exists() for run in ids)
    for folder in folders:
        with Ledger.reader(folder) as ledger:
            assert ledger.steps_done() == 3 and ledger.generation == 1
            assert not [event for event in ledger.events() if event.kind in ("incident", "recovery")]
