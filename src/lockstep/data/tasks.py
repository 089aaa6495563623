"""Procedural tasks of reasoning-gym: rows that are made when they are asked for, and the scorers that belong to them.

A row is a pure function of the task's name, arguments, seed and the row's number; so the scorer makes it again instead
of being sent it.
"""

import dataclasses
import difflib
import json
from functools import lru_cache
from typing import Any

from lockstep.config.data import Dataset, Task
from lockstep.data.datasets import DataError, Row, Rows, nearest

COLUMN = "reasoning_gym"
"""Column that says which row of which task it is."""


class TaskRows(Rows):
    """Rows `question` and `answer` of a task.

    Raises:
        DataError: reasoning-gym is not installed, or there is no such task or argument.
    """

    columns = ("question", "answer", COLUMN)

    def __init__(self, cfg: Dataset) -> None:
        self.path, self._task = cfg.path, cfg.task or Task()
        self._count = min(self._task.size, cfg.limit or self._task.size)
        self._source = _made(cfg.path, self._task.model_dump_json())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < self._count:
            raise IndexError(f"row {row} of {self._count}")
        entry = self._source[row]
        made = {"task": self.path, "row": row, **self._task.model_dump(mode="json")}
        return {"question": entry["question"], "answer": entry["answer"], COLUMN: made}


def task_score(made: dict[str, Any], answer: str) -> float:
    """What the task's scorer gives for an answer, 0 to 1.

    Args:
        made: the row's column `reasoning_gym`.
    """
    task = Task(size=made["size"], seed=made["seed"], arguments=made["arguments"])
    source = _made(made["task"], task.model_dump_json())
    return float(source.score_answer(answer=answer, entry=_entry(made["task"], task.model_dump_json(), made["row"])))


@lru_cache(maxsize=4096)
def _entry(name: str, task: str, row: int) -> dict[str, Any]:
    """A group's completions share one."""
    entry: dict[str, Any] = _made(name, task)[row]
    return entry


@lru_cache(maxsize=16)
def _made(name: str, settings: str) -> Any:
    """The dataset of a task; `settings` as JSON, which can be a key."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        remedy = "Install the extra: pip install 'lockstep-rl[tasks]'."
        raise DataError(name, f"reasoning-gym cannot be imported ({error})", remedy) from error
    if name not in DATASETS:
        raise DataError(name, "reasoning-gym has no such task", _nearest_tasks(name, sorted(DATASETS)))
    task = json.loads(settings)
    dataset_class, config_class = DATASETS[name]
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in ("size", "seed")]
    for argument in task["arguments"]:
        if argument not in known:
            raise DataError(name, f"the task has no argument {argument!r}", nearest(argument, known))
    try:
        config = config_class(size=task["size"], seed=task["seed"], **task["arguments"])
        config.validate()
        return dataset_class(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        remedy = "Check data.task.arguments."
        raise DataError(name, f"the task refuses its arguments: {error}", remedy) from error


def _nearest_tasks(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    close += [each for each in names if name and name in each and each not in close][:3]
    listed = " or ".join(repr(each) for each in close)
    return f"Did you mean {listed}?" if close else f"There are {len(names)}, from {names[0]!r} to {names[-1]!r}."
