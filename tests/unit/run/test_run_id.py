"""The run id, and ranks that see another folder."""

from pathlib import Path

import pytest

from lockstep.run.run_id import FolderNotShared, check_folder_shared, claim_run_id, read_run_id


def test_a_rank_checks_the_folder_of_its_run(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    assert read_run_id(ours) == ""
    run = claim_run_id(ours, "small")
    check_folder_shared(ours, run)
    assert read_run_id(ours) == run
    with pytest.raises(FolderNotShared, match=r"cannot see the run's folder .*theirs: set folder"):
        check_folder_shared(theirs, run)
    theirs.mkdir()
    claim_run_id(theirs, "small")  # an image that has such a folder, of another run
    with pytest.raises(FolderNotShared):
        check_folder_shared(theirs, run)
