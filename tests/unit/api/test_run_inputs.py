"""Datasets and functions become files and paths in a config."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from scoring_function import length_of

from lockstep.api.run_inputs import RunInputs
from lockstep.data.dataset_rows import DataError

ROWS = [{"prompt": "a", "answer": "é"}, {"prompt": "b", "answer": None}]


def test_rows_become_json_lines(tmp_path: Path) -> None:
    inputs = RunInputs(tmp_path / "run")
    values = inputs.replace({"data": ROWS, "evaluation": {"data": {"path": ROWS[:1], "limit": 1}, "every": 2}})
    assert values["evaluation"]["data"]["limit"] == 1 and values["evaluation"]["every"] == 2
    path = Path(values["data"]["path"])
    assert path.parent == tmp_path / "run" / "inputs" and path.suffix == ".jsonl"
    assert [json.loads(line) for line in inputs.contents[path].splitlines()] == ROWS
    assert set(inputs.contents) == {path, Path(values["evaluation"]["data"]["path"])}
    again = RunInputs(tmp_path / "run").replace({"data": [dict(row) for row in ROWS]})
    assert again["data"] == values["data"], "the name depends on the content alone"
    assert not path.exists(), "nothing is written yet"


def test_datasets_become_parquet(tmp_path: Path) -> None:
    inputs = RunInputs(tmp_path)
    given = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}], "answer": 3}])
    path = Path(inputs.replace({"data": {"path": given, "limit": 5}})["data"]["path"])
    file = tmp_path / "x.parquet"
    file.write_bytes(inputs.contents[path])
    assert pq.read_table(file).to_pylist() == [{"prompt": [{"role": "user", "content": "hi"}], "answer": 3}]


def test_a_mixture_has_a_file_for_each_of_its_datasets(tmp_path: Path) -> None:
    inputs = RunInputs(tmp_path)
    mixture = [{"path": ROWS, "weight": 1}, {"path": "other.jsonl", "weight": 2}]
    found = inputs.replace({"data": {"mixture": mixture}})["data"]["mixture"]
    assert found[0]["weight"] == 1 and "inputs/data0-" in found[0]["path"] and found[1] == mixture[1]


def test_functions_become_paths(tmp_path: Path) -> None:
    terms = [length_of, {"kind": "function", "path": length_of, "weight": 2}, {"kind": "math"}]
    found = RunInputs(tmp_path).replace({"reward": {"terms": terms, "workers": 2}})["reward"]
    first, second, third = found["terms"]
    assert first["path"].endswith("scoring_function.py:length_of") and first["kind"] == "function"
    assert second == {"kind": "function", "path": first["path"], "weight": 2} and third == {"kind": "math"}
    assert found["workers"] == 2


def test_what_has_no_objects_stays(tmp_path: Path) -> None:
    values: dict[str, Any] = {"data": {"path": "d.jsonl"}, "reward": {"terms": [{"kind": "math"}]}, "evaluation": None}
    inputs = RunInputs(tmp_path)
    assert inputs.replace(values) == values and not inputs.contents


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "there are none"),
        ([{"prompt": "a"}, "b"], "row 1: expected a mapping"),
        ([{"prompt": {1, 2}}], "row 0: not a JSON value"),
        ([{"prompt": float("nan")}], "row 0: not a JSON value"),
        ([{"prompt": "\ud800"}], "row 0: not a JSON value"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "with several splits"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "IterableDataset.*Give a Dataset"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_stored_is_refused(tmp_path: Path, data: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        RunInputs(tmp_path).replace({"data": data})
