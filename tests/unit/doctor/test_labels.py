"""Labels of launchers against ranks that lines name."""

from pathlib import Path

from lockstep.doctor.explain import explain
from lockstep.doctor.labels import pairs, settled
from lockstep.doctor.prefixes import Who

TRACEBACK = """[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/app/train.py", line 12, in step
[rank{rank}]:     loss = batch["labels"].sum()
[rank{rank}]: KeyError: 'labels'
"""


def test_labels_are_ranks_unless_a_rank_says_otherwise() -> None:
    told = Who(3, label=3)
    assert settled(pairs([told]))(Who(2, label=2, guessed=True)) == Who(2)
    tasks = settled(pairs([told, Who(9, label=1)]))
    assert tasks(told) == Who(3)
    assert tasks(Who(1, label=1, guessed=True)) == Who(9)
    assert tasks(Who(2, label=2, guessed=True)) == Who(label=2)
    assert settled(pairs([Who(2, label=0), Who(3, label=0)]))(Who(0, label=0, guessed=True)) == Who(label=0)
    alone = settled(pairs([Who(0, label=0), Who(0, label=1), Who(0, label=2)]))
    assert [alone(Who(0, label=2)), alone(Who(5, label=5, guessed=True))] == [Who(2), Who(5)]


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
