"""Launcher labels and the ranks behind them."""

from pathlib import Path

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.rank_resolver import label_resolver, ranks_by_label

TRACEBACK = """[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/app/train.py", line 12, in step
[rank{rank}]:     loss = batch["labels"].sum()
[rank{rank}]: KeyError: 'labels'
"""


def test_labels_are_ranks_unless_a_line_contradicts() -> None:
    origin = LineOrigin(3, label=3)
    assert label_resolver(ranks_by_label([origin]))(LineOrigin(2, label=2, guessed=True)) == LineOrigin(2)
    tasks = label_resolver(ranks_by_label([origin, LineOrigin(9, label=1)]))
    assert tasks(origin) == LineOrigin(3)
    assert tasks(LineOrigin(1, label=1, guessed=True)) == LineOrigin(9)
    assert tasks(LineOrigin(2, label=2, guessed=True)) == LineOrigin(label=2)
    assert label_resolver(ranks_by_label([LineOrigin(2, label=0), LineOrigin(3, label=0)]))(
        LineOrigin(0, label=0, guessed=True)
    ) == LineOrigin(label=0)
    alone = label_resolver(ranks_by_label([LineOrigin(0, label=0), LineOrigin(0, label=1), LineOrigin(0, label=2)]))
    assert [alone(LineOrigin(0, label=2)), alone(LineOrigin(5, label=5, guessed=True))] == [
        LineOrigin(2),
        LineOrigin(5),
    ]


def _job(folder: Path, label: str) -> Path:
    lines = [*(f"step {each} loss 1.{each}" for each in range(20)), *TRACEBACK.format(rank=11).splitlines()]
    (folder / "job.out").write_text("".join(f"{label}{each}\n" for each in lines))
    return folder


def test_an_exception_behind_the_label_of_a_task_is_its_ranks(tmp_path: Path) -> None:
    for number, label in enumerate(("1: ", "[1,1]<stderr>:", "[default3]:", "trainer-1  | ", "(Actor pid=7) ")):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = explain([str(_job(folder, label))]).verdict
        assert (said.cause, [each.rank for each in said.culprits]) == ("rank_exception_masked", [11]), label
