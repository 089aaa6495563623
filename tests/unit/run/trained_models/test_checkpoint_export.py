"""Which checkpoint an export takes."""

from pathlib import Path

import pytest

from lockstep.ledger.sqlite_index import CheckpointRow
from lockstep.run.errors import RunRefused
from lockstep.run.planning.parent_run import choose_checkpoint

ROWS = [CheckpointRow(step, Path(f"{step + 1:08d}"), metric, 0.0) for step, metric in ((2, 0.5), (5, 0.7), (7, 0.7))]


@pytest.mark.parametrize(("step", "expected"), [("last", 7), ("best", 7), ("3", 2), ("6", 5)])
def test_a_checkpoint_is_named_by_its_steps_or_its_rank(step: str, expected: int) -> None:
    assert choose_checkpoint(ROWS, step).step == expected


def test_what_is_missing_is_named() -> None:
    with pytest.raises(RunRefused, match="after 3, 6, 8 steps"):
        choose_checkpoint(ROWS, "5")
    with pytest.raises(RunRefused, match="no complete checkpoint yet"):
        choose_checkpoint([], "last")
    with pytest.raises(RunRefused, match="no checkpoint was evaluated"):
        choose_checkpoint([CheckpointRow(0, Path("1"), None, 0.0)], "best")
