"""Opens datasets: files, folders, Hugging Face datasets, and procedural tasks of reasoning-gym.

Errors in a file are reported when it is opened. A row of a reasoning-gym task is a pure function of the task's name,
arguments and seed, and of the row's number, so a scorer computes the row again instead of receiving it.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep.base.disk_errors import FULL_ERRNOS, refusal_reason
from lockstep.base.hub import REMEDY, hub_problem
from lockstep.config.data import DatasetConfig, ProceduralTask
from lockstep.data.dataset_rows import (
    ConcatenatedRows,
    CsvRows,
    DataError,
    DatasetRow,
    DatasetRows,
    HubDataUnreachable,
    JsonArray,
    JsonLines,
    TableRows,
    name_hint,
    uncompressed_file,
)

LARGE_PARQUET_BYTES = 128 << 20
"""Parquet files with more bytes, decoded, are not decoded into memory but into `datasets`' memory-mapped cache."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
COMPRESSED = ".gz"
"""Text files may be compressed: `train.jsonl.gz`."""
SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval")


def load_rows(cfg: DatasetConfig) -> DatasetRows:
    """Opens the dataset of a config.

    Raises:
        DataError: the dataset is missing, empty, malformed, or of an unknown kind.
    """
    if cfg.kind == "reasoning_gym":
        return TaskRows(cfg)
    path = Path(cfg.path).expanduser()
    if cfg.kind == "hub" or (cfg.kind == "auto" and not path.exists() and _looks_like_hub(cfg.path)):
        return _load_from_hub(cfg)
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = name_hint(path.name, siblings) if siblings else f"The folder {str(path.parent)!r} does not exist either."
        raise DataError(cfg.path, "there is no such file or folder", hint)
    if path.is_dir():
        return _open_folder(path, cfg)
    return _open_file(path, cfg.kind, cfg.limit)


def _looks_like_hub(name: str) -> bool:
    parts = name.split("/")
    is_file = name.removesuffix(COMPRESSED).endswith(SUFFIXES)
    return len(parts) <= 2 and all(parts) and not name.startswith((".", "~")) and not is_file


def _open_file(path: Path, kind: str, limit: int | None) -> DatasetRows:
    suffix = _suffix_of(path)
    if path.stat().st_size == 0:
        raise DataError(str(path), "the file is empty", "It needs at least one row.")
    if kind == "parquet" or (kind == "auto" and suffix == ".parquet"):
        return _open_parquet(path, limit)
    if kind not in ("auto", "jsonl", "csv") or (kind == "auto" and suffix not in SUFFIXES):
        remedy = f"Known suffixes: {', '.join(SUFFIXES)}; for another name set data.kind to jsonl, csv or parquet."
        raise DataError(str(path), f"unknown file suffix {suffix!r}", remedy)
    file = uncompressed_file(path) if path.suffix.lower() == COMPRESSED else path.open("rb")
    if kind == "csv" or (kind == "auto" and suffix == ".csv"):
        return CsvRows(path, file, limit)
    if kind == "auto" and suffix == ".json":
        head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if head.startswith(b"["):
            return JsonArray(path, file, limit)
    return JsonLines(path, file, limit)


def _suffix_of(path: Path) -> str:
    """The suffix that names the format: `.jsonl` of `train.jsonl` and of `train.jsonl.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == COMPRESSED else suffix


def _open_parquet(path: Path, limit: int | None) -> DatasetRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        groups = pq.read_metadata(path)
        if sum(groups.row_group(each).total_byte_size for each in range(groups.num_row_groups)) > LARGE_PARQUET_BYTES:
            return _open_large_parquet(path, limit)
        table = pq.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(str(path), f"cannot be read as a Parquet file: {error}", "Write it again.") from error
    return TableRows(str(path), table.column_names, table, limit)


def _open_large_parquet(path: Path, limit: int | None) -> DatasetRows:
    import datasets

    try:
        source = datasets.Dataset.from_parquet(str(path))
    except (datasets.exceptions.DatasetsError, OSError) as error:
        cause = error.__cause__ or error  # `datasets` says what it was doing, and not what was wrong
        if not isinstance(cause, OSError) or cause.errno not in FULL_ERRNOS:
            raise DataError(str(path), f"cannot be read as a Parquet file: {cause}", "Write it again.") from error
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        problem = f"its rows cannot be written to the cache of `datasets`: {refusal_reason(cause.errno, cache)}"
        remedy = "Make room, or set HF_DATASETS_CACHE to a folder on a larger disk."
        raise DataError(str(path), problem, remedy) from error
    return TableRows(str(path), source.column_names, source, limit)


def _open_folder(path: Path, cfg: DatasetConfig) -> DatasetRows:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _open_saved_dataset(path, cfg)
    suffixes = {"jsonl": SUFFIXES[:2], "csv": (".csv",), "parquet": (".parquet",)}.get(cfg.kind, SUFFIXES)
    files = sorted(file for file in path.rglob("*") if file.is_file() and _suffix_of(file) in suffixes)
    if not files:
        raise DataError(
            str(path), f"no file in the folder ends in {', '.join(suffixes)}", "Set data.path to the file itself."
        )
    named = {file: _split_of(file.relative_to(path)) for file in files}
    splits = sorted({split for split in named.values() if split})
    if splits:
        files = [file for file in files if named[file] == cfg.split]
        if not files:
            raise DataError(str(path), f"no file of split {cfg.split!r}", f"Set data.split. {name_hint('', splits)}")
    elif cfg.split != "train":
        remedy = "Set data.path to the file itself, or let its name begin with that of the split."
        raise DataError(str(path), f"the files' names do not say which is split {cfg.split!r}", remedy)
    parts = [_open_file(file, "auto", cfg.limit) for file in files]
    return parts[0] if len(parts) == 1 else ConcatenatedRows(str(path), parts, cfg.limit)


def _split_of(file: Path) -> str | None:
    """Returns the split in a file's name (`train-00000-of-00002.parquet`) or in its folder's."""
    for part in (file.stem, *reversed(file.parts[:-1])):
        word = part.replace("_", "-").replace(".", "-").split("-")[0].lower()
        if word in SPLITS:
            return word
    return None


def _open_saved_dataset(path: Path, cfg: DatasetConfig) -> DatasetRows:
    """Opens a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import datasets

    try:
        source = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(str(path), f"the saved dataset cannot be read: {error}", "Save it again.") from error
    if isinstance(source, datasets.DatasetDict):
        if cfg.split not in source:
            raise DataError(str(path), f"there is no split {cfg.split!r}", name_hint(cfg.split, list(source)))
        source = source[cfg.split]
    return TableRows(str(path), source.column_names, source, cfg.limit)


def _load_from_hub(cfg: DatasetConfig) -> DatasetRows:
    import datasets
    from datasets.exceptions import DatasetsError

    offline = hub_problem()  # then the copy in the cache is used, if there is one
    try:
        with _without_requests() if offline else nullcontext():
            source = datasets.load_dataset(cfg.path, cfg.name, split=cfg.split)
    except (DatasetsError, OSError, ValueError) as error:
        if offline:
            problem = f"there is no such file, it is not in this machine's cache, and {offline}"
            raise HubDataUnreachable(cfg.path, problem, f"{REMEDY[0].upper()}{REMEDY[1:]}.") from error
        remedy = (
            "Check data.path, data.name and data.split, the network and HF_TOKEN; a local file needs its full path."
        )
        error_class = HubDataUnreachable if isinstance(error, ConnectionError) else DataError
        raise error_class(cfg.path, f"the hub dataset cannot be loaded: {error}", remedy) from error
    return TableRows(cfg.path, source.column_names, source, cfg.limit)


@contextmanager
def _without_requests() -> Iterator[None]:
    """Makes `datasets` use its cache alone, as with `HF_HUB_OFFLINE`, which it reads only when it is imported."""
    import datasets
    import huggingface_hub.constants

    settings: tuple[Any, ...] = (huggingface_hub.constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in settings]
    for module in settings:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


TASK_COLUMN = "reasoning_gym"
"""Column that identifies the task and its row."""


class TaskRows(DatasetRows):
    """Rows of a task, with columns `question` and `answer`.

    Raises:
        DataError: reasoning-gym is not installed, or has no such task or argument.
    """

    columns = ("question", "answer", TASK_COLUMN)

    def __init__(self, cfg: DatasetConfig) -> None:
        self.path, self._task = cfg.path, cfg.task or ProceduralTask()
        self._count = min(self._task.size, cfg.limit or self._task.size)
        self._source = _make_task(cfg.path, self._task.model_dump_json())

    def __len__(self) -> int:
        return self._count

    def digest(self) -> str:
        return ""

    def __getitem__(self, row: int) -> DatasetRow:
        if not 0 <= row < self._count:
            raise IndexError(f"row {row} of {self._count}")
        entry = self._source[row]
        task_row = {"task": self.path, "row": row, **self._task.model_dump(mode="json")}
        return {"question": entry["question"], "answer": entry["answer"], TASK_COLUMN: task_row}


def task_score(task_row: dict[str, Any], answer: str) -> float:
    """Scores an answer by the task's scorer, from 0 to 1.

    Args:
        task_row: the row's column `reasoning_gym`.
    """
    task = ProceduralTask(size=task_row["size"], seed=task_row["seed"], arguments=task_row["arguments"])
    source = _make_task(task_row["task"], task.model_dump_json())
    return float(
        source.score_answer(answer=answer, entry=_task_entry(task_row["task"], task.model_dump_json(), task_row["row"]))
    )


@lru_cache(maxsize=4096)
def _task_entry(name: str, task: str, row: int) -> dict[str, Any]:
    """Returns a row of a task. Cached, because all completions of a group need the same one."""
    entry: dict[str, Any] = _make_task(name, task)[row]
    return entry


@lru_cache(maxsize=16)
def _make_task(name: str, settings: str) -> Any:
    """Returns the dataset of a task. `settings` is JSON, because a dict cannot be a cache key."""
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
            raise DataError(name, f"the task has no argument {argument!r}", name_hint(argument, known))
    try:
        config = config_class(size=task["size"], seed=task["seed"], **task["arguments"])
        config.validate()
        return dataset_class(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        remedy = "Check data.task.arguments."
        raise DataError(name, f"the task does not accept its arguments: {error}", remedy) from error


def _nearest_tasks(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    close += [each for each in names if name and name in each and each not in close][:3]
    listed = " or ".join(repr(each) for each in close)
    return f"Did you mean {listed}?" if close else f"There are {len(names)} tasks, from {names[0]!r} to {names[-1]!r}."
