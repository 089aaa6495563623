"""Where a run's processes are, and whether they see its folder."""

from pathlib import Path

import pytest

from lockstep.run.place import FolderNotShared, must_share, run_id, take_place


def test_a_rank_knows_the_folder_of_its_run(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    assert run_id(ours) == ""
    run = take_place(ours, "small")
    must_share(ours, run)
    assert run_id(ours) == run
    with pytest.raises(FolderNotShared, match=r"does not see the run's folder .*theirs: set folder"):
        must_share(theirs, run)
    theirs.mkdir()
    take_place(theirs, "small")  # an image that has such a folder, of another run
    with pytest.raises(FolderNotShared):
        must_share(theirs, run)
