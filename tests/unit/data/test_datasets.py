"""All kinds of datasets, and errors in them."""

import datetime
import errno
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import lockstep.data.datasets as module
from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_rows import DataError
from lockstep.data.datasets import load_rows

ROWS = [{"prompt": f"p{i}", "answer": i, "extra": {"k": [i]}} for i in range(5)]


def jsonl(path: Path, rows: list[object] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path | str, **options: object) -> list[dict]:
    rows = load_rows(DatasetConfig(path=str(path), **options))
    return [rows[i] for i in range(len(rows))]


def parquet(path: Path, rows: list[dict] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_jsonl(tmp_path) -> None:
    rows = load_rows(DatasetConfig(path=str(jsonl(tmp_path / "a.jsonl"))))
    assert [rows[i] for i in (4, 0, 2)] == [ROWS[4], ROWS[0], ROWS[2]]
    assert (len(rows), rows.columns) == (5, ("prompt", "answer", "extra"))


def test_jsonl_with_byte_order_mark_blank_lines_and_windows_ends(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text":"\xc3\xa4"}\r\n\r\n   \n{"text":"b","more":1}')
    rows = load_rows(DatasetConfig(path=str(path)))
    assert [rows[0], rows[1]] == [{"text": "ä"}, {"text": "b", "more": 1}]
    assert rows.place(1) == (str(path), "line 4")
    assert rows.columns == ("text", "more")


def test_json_array_and_json_that_is_lines(tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_text(" \n" + json.dumps(ROWS, indent=2))
    assert load(path) == ROWS
    jsonl(path)
    assert load(path) == ROWS


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.ndjson.gz", "part/train.jsonl.gz"])
def test_compressed_files(tmp_path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(ROWS) if ".json." in name else "".join(json.dumps(row) + "\n" for row in ROWS)
    path.write_bytes(gzip.compress(text.encode()))
    assert load(path) == ROWS == load(path.parent)
    rows = load_rows(DatasetConfig(path=str(path)))
    assert rows.place(1)[0] == str(path)
    assert {*tmp_path.rglob("*")} == {path.parent, path} - {tmp_path}, "nothing is left beside it"


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b'{"a": 1}\n' * 99)[:-20]], ids=["other", "cut"])
def test_damaged_compressed_files_are_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as a gzip file"):
        load(path)


def test_csv_values_are_text_as_they_stand(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"a, ""b""\nc",007\r\n\r\nd,\r\n')
    expected = [{"prompt": 'a, "b"\nc', "answer": "007"}, {"prompt": "d", "answer": ""}]
    assert load(path) == expected == load(tmp_path) == load(path, kind="csv")
    rows = load_rows(DatasetConfig(path=str(path)))
    assert (rows.place(0), rows.place(1)) == ((str(path), "line 2"), (str(path), "line 5"))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert load(tmp_path / "b.csv.gz") == expected
    assert len(load(path, limit=1)) == 1
    path.write_text("text\n" + "x" * 500_000 + "\n")
    assert len(load(path)[0]["text"]) == 500_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2,3\n", "line 2: expected 2 values, as in the header, found 3"),
        ("a,b\n1\n", "line 2: expected 2 values"),
        ("a,b\n", "has no rows"),
        ("a,a\n1,2\n", "has equal names, or none"),
        ("a,\n1,2\n", "has equal names, or none"),
        ('a,b\n"1,2\n', "line 2.*not CSV"),
    ],
)
def test_unusable_csv_is_refused(tmp_path, text: str, words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        load(path)


def test_parquet(tmp_path) -> None:
    assert load(parquet(tmp_path / "a.parquet")) == ROWS


def test_large_parquet_goes_through_memory_mapped_datasets(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "LARGE_PARQUET_BYTES", 10)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = load_rows(DatasetConfig(path=str(parquet(tmp_path / "a.parquet"))))
    assert [rows[i] for i in range(5)] == ROWS
    assert rows._source.cache_files


@pytest.mark.parametrize("large", [False, True])
def test_a_parquet_file_with_a_damaged_page(tmp_path, monkeypatch, large) -> None:
    """Its footer is whole, so it can be opened."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if large:
        monkeypatch.setattr(module, "LARGE_PARQUET_BYTES", 10)
    path = parquet(tmp_path / "a.parquet", [{"prompt": "word " * 2000 + str(n)} for n in range(8)])
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    with pytest.raises(DataError, match="cannot be read as a Parquet file") as caught:
        load(path)
    assert str(path) in str(caught.value) and "generating the dataset" not in str(caught.value)


@pytest.mark.parametrize("large", [False, True])
def test_text_in_parquet_that_is_not_utf8(tmp_path, monkeypatch, large) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if large:
        monkeypatch.setattr(module, "LARGE_PARQUET_BYTES", 10)
    texts = pa.array([b"good", b"\xff\xfe", b"good"]).view(pa.string())
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "a.parquet")
    rows = load_rows(DatasetConfig(path=str(tmp_path / "a.parquet")))
    assert rows[0] == {"prompt": "good"} == rows[2]
    with pytest.raises(DataError, match="row 1: it cannot be read"):
        rows[1]


def test_a_cache_of_large_parquet_files_without_room(tmp_path, monkeypatch) -> None:
    import datasets

    def full(*arguments: object, **options: object) -> None:
        raise datasets.exceptions.DatasetGenerationError("while generating") from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(datasets.Dataset, "from_parquet", full)
    monkeypatch.setattr(module, "LARGE_PARQUET_BYTES", 10)
    with pytest.raises(DataError, match=r"cache of `datasets`.*HF_DATASETS_CACHE"):
        load(parquet(tmp_path / "a.parquet"))


def test_the_digest_finds_other_content(tmp_path) -> None:
    """Of the same rows it is the same in each format; of a row between those that are looked at it is not seen."""
    many = [{"prompt": f"p{n}", "answer": str(n)} for n in range(2500)]
    paths = [jsonl(tmp_path / "a.jsonl", many), parquet(tmp_path / "a.parquet", many)]
    digests = {load_rows(DatasetConfig(path=str(path))).digest() for path in paths}
    assert len(digests) == 1
    for row, seen in ((0, True), (2499, True), (1, False), (1500, True)):
        changed = [*many[:row], {"prompt": "other", "answer": "1"}, *many[row + 1 :]]
        assert (load_rows(DatasetConfig(path=str(jsonl(paths[0], changed)))).digest() not in digests) == seen
    pq.write_table(pa.table({"b": [b"1", b"2"], "c": [datetime.date(2020, 1, 1)] * 2}), paths[1])
    first = load_rows(DatasetConfig(path=str(paths[1]))).digest()
    pq.write_table(pa.table({"b": [b"1", b"3"], "c": [datetime.date(2020, 1, 1)] * 2}), paths[1])
    assert load_rows(DatasetConfig(path=str(paths[1]))).digest() != first


def test_a_folder_yields_the_files_of_the_split(tmp_path) -> None:
    parquet(tmp_path / "data/train-00000-of-00002.parquet", ROWS[:2])
    parquet(tmp_path / "data/train-00001-of-00002.parquet", ROWS[2:])
    jsonl(tmp_path / "data/test.jsonl", ROWS[:1])
    assert load(tmp_path) == ROWS
    assert load(tmp_path, limit=3) == ROWS[:3]
    assert load(tmp_path, split="test") == ROWS[:1]
    with pytest.raises(DataError, match=r"no file of split 'validation'.*test, train"):
        load(tmp_path, split="validation")


def test_a_folder_without_splits_yields_all_files(tmp_path) -> None:
    jsonl(tmp_path / "a.jsonl", ROWS[:3])
    jsonl(tmp_path / "b.jsonl", ROWS[3:])
    rows = load_rows(DatasetConfig(path=str(tmp_path)))
    assert [rows[i] for i in range(5)] == ROWS
    assert rows.place(3) == (str(tmp_path / "b.jsonl"), "line 1")
    with pytest.raises(IndexError):
        rows[5]
    with pytest.raises(DataError, match="do not say which is split 'test'"):
        load(tmp_path, split="test")


def test_saved_dataset_and_its_splits(tmp_path) -> None:
    import datasets

    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(str(tmp_path / "two"))
    assert load(tmp_path / "one") == ROWS
    assert load(tmp_path / "two", split="test") == ROWS[:1]
    with pytest.raises(DataError, match=r"no split 'tets'. Did you mean 'test'"):
        load(tmp_path / "two", split="tets")


def test_hub_dataset_goes_to_the_hub_with_name_and_split(monkeypatch) -> None:
    import datasets

    requested = []

    def fake(path, name, split):
        requested.append((path, name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert load("openai/gsm8k", name="main", limit=2) == ROWS[:2]
    assert requested == [("openai/gsm8k", "main", "train")]


@pytest.mark.parametrize("error", [ValueError("Unknown split"), ConnectionError("offline"), FileNotFoundError("no")])
def test_hub_errors_name_what_to_check(monkeypatch, error) -> None:
    import datasets

    def fail(*args, **named):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"nobody/nothing: the hub dataset cannot be loaded: .*HF_TOKEN"):
        load("nobody/nothing")


def test_missing_file_names_the_nearest(tmp_path) -> None:
    jsonl(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"no such file or folder\. Did you mean 'train.jsonl'"):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match="does not exist either"):
        load(tmp_path / "nowhere/train.jsonl")


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        (b'{"a": 1}\n{"a": 2\n', "line 2", "not JSON"),
        (b'{"a": 1}\n\n[1, 2]\n', "line 3", "found list"),
        (b'{"a": 1}\n{"a": "\xff\xfe"}\n', "line 2", "not JSON"),
        (b'[\n{"a": 1}\n]\n', "line 1", "read the file as one JSON array, rename it to end in"),
        (b"\n  \n\n", None, "has no rows"),
        (b"", None, "is empty"),
    ],
)
def test_malformed_jsonl_is_refused_with_its_line(tmp_path, content, place, message) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load(path)
    assert (error.value.path, error.value.place) == (str(path), place)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        ('[\n{"a": 1},\n{"a": }\n]', "line 3", "not JSON"),
        ('[{"a": 1}, 7]', "row 1", "found int"),
        ("[]", None, "the array is empty"),
    ],
)
def test_malformed_json_is_refused(tmp_path, content, place, message) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as error:
        load(path)
    assert error.value.place == place


def test_other_files_are_refused(tmp_path) -> None:
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as a Parquet file"):
        load(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no rows"):
        load(parquet(tmp_path / "b.parquet", []))
    (tmp_path / "a.tsv").write_text("a\tb")
    with pytest.raises(DataError, match=r"unknown file suffix '.tsv'. Known suffixes: .jsonl"):
        load(tmp_path / "a.tsv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no file in the folder ends in"):
        load(tmp_path / "empty")


def test_kind_reads_a_file_with_another_name(tmp_path) -> None:
    assert load(jsonl(tmp_path / "rows.txt"), kind="jsonl") == ROWS
    assert load(parquet(tmp_path / "rows.bin"), kind="parquet") == ROWS


def test_file_cut_while_in_use_is_an_error_and_not_a_crash(tmp_path) -> None:
    path = jsonl(tmp_path / "a.jsonl")
    rows = load_rows(DatasetConfig(path=str(path)))
    with path.open("r+") as file:
        file.truncate(20)
    with pytest.raises(DataError, match="not JSON"):
        rows[4]
