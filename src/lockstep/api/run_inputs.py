"""Objects in place of paths: datasets, lists of rows and functions that a program gives to a run.

Each becomes a file in the run's folder, or the path of a function, and its place in the config gets that path. So a run
that was started from Python is an ordinary run: its config is a file, and the command line resumes it.
"""

import hashlib
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.api.function_source import SourceModule, importable_path
from lockstep.data.dataset_rows import DataError
from lockstep.run.planning.input_files import input_path

if TYPE_CHECKING:
    from datasets import Dataset

Rows = Sequence[Mapping[str, Any]]
"""Rows of a dataset, each with its columns by name; values are those of JSON."""
RewardTerms = Callable[..., Any] | Mapping[str, Any] | Sequence[Callable[..., Any] | Mapping[str, Any]]
"""Reward functions, and terms as in the config (`{"kind": "math", "weight": 0.5}`): one, or several."""


class RunInputs:
    """Replaces objects in a config by paths.

    Args:
        run: the folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self.contents: dict[Path, bytes] = {}
        """The files to write."""

    def replace(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the config with paths in place of objects. Objects may stand for the paths of `data`, of the items of
        `data.mixture`, of `evaluation.data` and `validation.data` (or for these sections themselves), and for a reward
        term or the `path` of one.

        Raises:
            DataError: a row is not a mapping of names to JSON values, or there is none.
            FunctionNotCarried: other processes cannot use a function.
        """
        result = dict(values)
        if "data" in result:
            result["data"] = self._training_data(result["data"])
        for name in ("evaluation", "validation"):
            section = result.get(name)
            if isinstance(section, Mapping) and "data" in section:
                result[name] = {**section, "data": self._dataset(section["data"], f"{name}-data")}
        reward = result.get("reward")
        if isinstance(reward, Mapping) and "terms" in reward:
            result["reward"] = {**reward, "terms": self._terms(reward["terms"])}
        return result

    def _training_data(self, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("mixture"), Sequence):
            parts = [self._dataset(each, f"data{index}") for index, each in enumerate(data["mixture"])]
            return {**data, "mixture": parts}
        return self._dataset(data, "data")

    def _dataset(self, data: Any, stem: str) -> Any:
        """The section of a dataset, with the path of its file. Sections without objects stay as they are."""
        if _is_data(data) or not isinstance(data, Mapping):  # a DatasetDict is both
            return {"path": self._write(data, stem)} if _is_data(data) else data
        return {**data, "path": self._write(data["path"], stem)} if _is_data(data.get("path")) else data

    def _write(self, data: Any, stem: str) -> str:
        content, suffix = (
            (_json_lines(data), ".jsonl") if isinstance(data, list | tuple) else (_parquet(data), ".parquet")
        )
        return self._add(stem.replace("-", "_"), content, suffix)

    def _add(self, stem: str, content: bytes, suffix: str) -> str:
        path = input_path(self._run, stem, hashlib.sha256(content).hexdigest(), suffix)
        self.contents[path] = content
        return str(path)

    def _terms(self, terms: Any) -> Any:
        """The reward terms, with paths in place of functions."""
        if callable(terms) or isinstance(terms, Mapping):
            terms = [terms]
        if not isinstance(terms, Sequence) or isinstance(terms, str):
            return terms
        copied, names = SourceModule(), dict[int, str]()

        def path_of(function: Callable[..., Any], index: int) -> str | None:
            path = importable_path(function)
            if path is None:
                names[index] = copied.add(function)
            return path

        found: list[Any] = []
        for index, term in enumerate(terms):
            if callable(term):
                term = {"kind": "function", "path": term}
            if isinstance(term, Mapping) and callable(term.get("path")):
                term = {**term, "path": path_of(term["path"], index)}
            found.append(term)
        if names:
            file = self._add("rewards", copied.text().encode(), ".py")
            found = [
                {**term, "path": f"{file}:{names[index]}"} if index in names else term
                for index, term in enumerate(found)
            ]
        return found


def _is_data(value: Any) -> bool:
    return isinstance(value, list | tuple) or (value is not None and _dataset_class(value) is not None)


def _dataset_class(value: Any) -> str | None:
    """The name of a value's class, if it is one of Hugging Face's datasets; does not import them."""
    library = sys.modules.get("datasets")
    names = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    return next((name for name in names if library is not None and isinstance(value, getattr(library, name))), None)


def _json_lines(rows: Sequence[Any]) -> bytes:
    """Rows as one JSON object per line. Raises DataError."""
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            problem = f"expected a mapping of column names to values, found {type(row).__name__}"
            raise DataError("the given rows", problem, "Give a list of dicts.", place=f"row {number}")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        except (TypeError, ValueError) as error:
            remedy = "Columns hold texts, numbers, lists and dicts; for other types give a datasets.Dataset."
            raise DataError("the given rows", f"not a JSON value: {error}", remedy, place=f"row {number}") from error
    if not lines:
        raise DataError("the given rows", "there are none", "Give at least one.")
    return b"".join(lines)


def _parquet(data: "Dataset") -> bytes:
    """A dataset as a Parquet file. Raises DataError."""
    kind = _dataset_class(data)
    if kind in ("DatasetDict", "IterableDatasetDict"):
        raise DataError("the given dataset", f"it is a {kind} with several splits", "Give one: dataset['train'].")
    if kind == "IterableDataset":
        remedy = "Give a Dataset: a run reads rows in any order, and must find them again when it resumes."
        raise DataError("the given dataset", "it is an IterableDataset", remedy)
    buffer = io.BytesIO()
    data.to_parquet(buffer)
    return buffer.getvalue()
