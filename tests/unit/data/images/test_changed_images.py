"""Image files that change between two attempts of a run, or while it runs, are named and never used in silence."""

import os
from pathlib import Path
from typing import Any

import pytest
from vision_folders import ROWS, Attempts, png

from lockstep.data.dataset_rows import DataError
from lockstep.data.images.image_record import RECORD_FILE, content_digest
from lockstep.data.images.restored_images import restore_images


def rows_of(samples: list[Any]) -> list[int]:
    return [sample.row for sample in samples]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_resumed_run_is_refused_with_row_file_and_both_digests(tmp_path: Path, how: str, mixed: bool) -> None:
    run = Attempts(tmp_path, mixed=mixed)
    run.open()
    before, after = content_digest(run.picture(3).read_bytes()), "missing"
    if how == "deleted":
        run.picture(3).unlink()
    else:
        run.picture(3).write_bytes(png((16, 16), 99))
        after = content_digest(run.picture(3).read_bytes())
    named = f"line 4: 1 image changed since the run began: row 3: image '{run.picture(3)}' (was {before}, is {after})"
    with pytest.raises(DataError) as refused:
        run.open()
    assert named in str(refused.value) and "data.images.on_error=skip" in str(refused.value)
    run.picture(3).write_bytes(png((16, 16), 3))
    assert len(run.open()) == ROWS + mixed, "it is restored"


def test_equal_content_at_another_time_is_no_change(tmp_path: Path) -> None:
    run = Attempts(tmp_path)
    run.open()
    for row in range(ROWS):
        os.utime(run.picture(row), (row, row))
    assert rows_of(run.open().take(0, ROWS)) == list(range(ROWS))


@pytest.mark.parametrize("mixed", [False, True])
def test_rows_of_changed_images_are_left_out_and_the_order_of_the_others_stays(tmp_path: Path, mixed: bool) -> None:
    """A row that was unusable from the beginning stays left out, too."""
    run = Attempts(tmp_path, "skip", mixed)
    run.picture(0).write_bytes(b"no image")
    first = run.open(shuffle=True)
    order = rows_of(first.take(0, 2 * len(first)))
    assert len(first) == ROWS - 1 + mixed
    run.picture(2).unlink()
    run.picture(4).write_bytes(png((24, 16), 99))
    run.picture(0).write_bytes(png((16, 16), 0))
    again = run.open(shuffle=True)
    assert len(again) == len(first)
    lost = {2 + mixed, 4 + mixed}
    assert rows_of(again.take(0, 2 * len(first))) == [row for row in order if row not in lost]
    assert again.first().row == next(row for row in order if row not in lost)


@pytest.mark.parametrize("on_error", ["refuse", "skip"])
def test_an_image_that_changes_while_the_run_goes_on(tmp_path: Path, on_error: str) -> None:
    run = Attempts(tmp_path, on_error)
    source = run.open()
    taken = source.take(0, 2)
    before = content_digest(run.picture(4).read_bytes())
    run.picture(4).write_bytes(png((16, 16), 99))
    if on_error == "skip":
        assert rows_of(source.take(3, 3)) == [3, 5]
    else:
        with pytest.raises(DataError, match=rf"line 5: .*4.png' has changed .*: its digest was {before} and is "):
            source.take(3, 3)
    run.picture(0).write_bytes(png((16, 16), 99))
    assert restore_images(taken, source, run.store) == (0, set()), "the prepared pixels are those of the sample"
    run.store.path(taken[0].images[0].digest).unlink()
    if on_error == "skip":
        assert restore_images(taken, source, run.store) == (0, {taken[0].uid})
    else:
        with pytest.raises(DataError, match=r"0\.png' has changed since the run began"):
            restore_images(taken, source, run.store)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    run = Attempts(tmp_path)
    run.open()
    (run.store.folder / RECORD_FILE).write_text("{")
    with pytest.raises(DataError, match=r"files\.json: the record of the run's image files is damaged"):
        run.open()
