"""Rows of a data set, wherever they come from: JSONL, JSON, Parquet, a folder, Hugging Face datasets.

Files stay on disk or in Arrow memory; a row becomes Python objects when it is asked for. Everything that can
be wrong with a file is said when it is opened.
"""

import difflib
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lockstep.config.data import Dataset

Row = dict[str, Any]

LARGE_PARQUET_BYTES = 2**30
"""Larger Parquet files are not decoded into memory but into `datasets`' memory-mapped cache."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval")


class BadRow(ValueError):
    """A row cannot be used; who knows where it stands makes a DataError of it."""

    def __init__(self, column: str | None, message: str, remedy: str) -> None:
        self.column, self.message, self.remedy = column, message, remedy
        super().__init__(message)


class DataError(ValueError):
    """Data that cannot be used.

    Attributes:
        path: file, folder or hub name.
        place: `line 12` or `row 12` (rows count from 0), None where it is about the whole.
        column: the column it is about, if any.
        remedy: what to do.
    """

    def __init__(
        self, path: str, message: str, remedy: str, *, place: str | None = None, column: str | None = None
    ) -> None:
        self.path, self.place, self.column, self.message, self.remedy = path, place, column, message, remedy
        where = [path, *([place] if place else []), *([f"column {column!r}"] if column else [])]
        super().__init__(f"{', '.join(where)}: {message}. {remedy}")


class HubDataUnreachable(DataError):
    """A hub dataset that is not on this machine, and cannot be asked for now."""


class Rows(ABC):
    """A sequence of rows with named columns."""

    path: str
    columns: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> Row: ...

    def place(self, row: int) -> tuple[str, str]:
        """(path, place) of a row, for messages."""
        return self.path, f"row {row}"

    def refuse(self, row: int, bad: BadRow) -> DataError:
        """What to raise about a row."""
        path, place = self.place(row)
        return DataError(path, bad.message, bad.remedy, place=place, column=bad.column)


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint that ends a message: the closest of the names, or all of them."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"There is: {', '.join(sorted(names)) or 'nothing'}."


class JsonLines(Rows):
    """One JSON object per line; the file stays on disk, only the lines' places are kept.

    Every line is parsed once when it is opened. Blank lines are skipped.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path = str(path)
        self._decode = msgspec.json.Decoder().decode
        self._file = path.open("rb")
        starts, stops, lines, columns = [], [], [], dict[str, None]()
        at = 0
        for number, line in enumerate(self._file, start=1):
            begin, at = at, at + len(line)
            if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                begin, line = 3, line[3:]
            if not line.strip():
                continue
            columns.update(dict.fromkeys(self._parse(line, number)))
            starts.append(begin)
            stops.append(at)
            lines.append(number)
            if len(starts) == limit:
                break
        if not starts:
            raise DataError(self.path, "the file has no rows", "Write one JSON object per line.")
        self._starts, self._stops, self._lines = np.array(starts), np.array(stops), np.array(lines)
        self.columns = tuple(columns)

    def _parse(self, line: bytes, number: int) -> Row:
        try:
            row = self._decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            remedy = "Each line must be one JSON object."
            if number == 1 and line.lstrip().startswith(b"["):
                remedy = "A JSON array over several lines is read from a file that ends in .json."
            raise DataError(self.path, f"not JSON: {error}", remedy, place=f"line {number}") from error
        if not isinstance(row, dict):
            what = f"expected an object with named columns, found {type(row).__name__}"
            raise DataError(self.path, what, "Each line must be one JSON object.", place=f"line {number}")
        return row

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> Row:
        start, stop = int(self._starts[row]), int(self._stops[row])
        # pread and not a memory map: a file that shrinks under a map ends the process with SIGBUS.
        return self._parse(os.pread(self._file.fileno(), stop - start, start), int(self._lines[row]))

    def place(self, row: int) -> tuple[str, str]:
        return self.path, f"line {self._lines[row]}"


class JsonArray(Rows):
    """A JSON file that holds an array of objects; it is parsed into memory."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path = str(path)
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        try:
            rows = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            remedy = "The file must hold an array of objects, or one object per line."
            raise DataError(self.path, f"not JSON: {error}", remedy, place=_line_of(error, content)) from error
        self._rows: list[Row] = rows[:limit]
        for number, row in enumerate(self._rows):
            if not isinstance(row, dict):
                what = f"expected an object with named columns, found {type(row).__name__}"
                raise DataError(self.path, what, "The file must hold an array of objects.", place=f"row {number}")
        if not self._rows:
            raise DataError(self.path, "the array is empty", "Write at least one object.")
        self.columns = tuple(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Row:
        return dict(self._rows[row])


def _line_of(error: Exception, content: bytes) -> str | None:
    digits = str(error).rpartition("byte ")[2].rstrip(")")
    if not digits.isdecimal():
        return None
    newlines = content[: int(digits)].count(b"\n")
    return f"line {newlines + 1}"


class Table(Rows):
    """An Arrow table or a Hugging Face dataset: columns outside of Python, rows on demand."""

    def __init__(self, path: str, columns: Sequence[str], source: Any, limit: int | None = None) -> None:
        self.path, self.columns, self._source = path, tuple(columns), source
        self._count = min(len(source), limit or len(source))
        if self._count == 0:
            raise DataError(path, "the data set has no rows", "Choose another split or file.")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Row:
        if not 0 <= row < self._count:
            raise IndexError(f"row {row} of {self._count}")
        if hasattr(self._source, "slice"):
            found: Row = self._source.slice(row, 1).to_pylist()[0]
            return found
        return dict(self._source[row])


class Joined(Rows):
    """Several files, one after the other."""

    def __init__(self, path: str, parts: Sequence[Rows], limit: int | None = None) -> None:
        self.path, self._parts = path, list(parts)
        self._ends = list(accumulate(len(part) for part in parts))
        self._count = min(self._ends[-1], limit or self._ends[-1])
        self.columns = tuple(dict.fromkeys(name for part in parts for name in part.columns))

    def _find(self, row: int) -> tuple[Rows, int]:
        if not 0 <= row < self._count:
            raise IndexError(f"row {row} of {self._count}")
        part = bisect_right(self._ends, row)
        return self._parts[part], row - (self._ends[part - 1] if part else 0)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Row:
        part, inner = self._find(row)
        return part[inner]

    def place(self, row: int) -> tuple[str, str]:
        part, inner = self._find(row)
        return part.place(inner)


def load_rows(cfg: Dataset) -> Rows:
    """Opens what the config names.

    Raises:
        DataError: it is missing, empty, malformed, or of a kind that is not known.
    """
    if cfg.kind == "reasoning_gym":
        from lockstep.data.tasks import TaskRows  # takes seconds to import

        return TaskRows(cfg)
    path = Path(cfg.path).expanduser()
    if cfg.kind == "hub" or (cfg.kind == "auto" and not path.exists() and _looks_like_hub(cfg.path)):
        return _hub(cfg)
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings) if siblings else f"The folder {str(path.parent)!r} does not exist either."
        raise DataError(cfg.path, "there is no such file or folder", hint)
    if path.is_dir():
        return _folder(path, cfg)
    return _file(path, cfg.kind, cfg.limit)


def _looks_like_hub(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(parts) and not name.startswith((".", "~")) and not name.endswith(SUFFIXES)


def _file(path: Path, kind: str, limit: int | None) -> Rows:
    suffix = path.suffix.lower()
    if path.stat().st_size == 0:
        raise DataError(str(path), "the file is empty", "It needs at least one row.")
    if kind == "parquet" or (kind == "auto" and suffix == ".parquet"):
        return _parquet(path, limit)
    if kind == "auto" and suffix == ".json":
        with path.open("rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        return JsonArray(path, limit) if head.startswith(b"[") else JsonLines(path, limit)
    if kind == "jsonl" or suffix in SUFFIXES:
        return JsonLines(path, limit)
    remedy = f"Known are {', '.join(SUFFIXES)}; for another name set data.kind to jsonl or parquet."
    raise DataError(str(path), f"files that end in {suffix!r} are not known", remedy)


def _parquet(path: Path, limit: int | None) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.stat().st_size > LARGE_PARQUET_BYTES:
            import datasets

            source = datasets.Dataset.from_parquet(str(path))
            return Table(str(path), source.column_names, source, limit)
        table = pq.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(str(path), f"not a Parquet file that can be read: {error}", "Write it again.") from error
    return Table(str(path), table.column_names, table, limit)


def _folder(path: Path, cfg: Dataset) -> Rows:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved(path, cfg)
    wanted = {"jsonl": SUFFIXES[:2], "parquet": SUFFIXES[3:]}.get(cfg.kind, SUFFIXES)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in wanted)
    if not files:
        raise DataError(str(path), f"no file in the folder ends in {', '.join(wanted)}", "Name the file itself.")
    named = {file: _split_of(file.relative_to(path)) for file in files}
    splits = sorted({split for split in named.values() if split})
    if splits:
        files = [file for file in files if named[file] == cfg.split]
        if not files:
            raise DataError(str(path), f"no file of split {cfg.split!r}", f"Set data.split. {nearest('', splits)}")
    elif cfg.split != "train":
        remedy = "Name the file itself, or put the split's name in front of the file's."
        raise DataError(str(path), f"the files' names do not say which is split {cfg.split!r}", remedy)
    parts = [_file(file, "auto", cfg.limit) for file in files]
    return parts[0] if len(parts) == 1 else Joined(str(path), parts, cfg.limit)


def _split_of(file: Path) -> str | None:
    """The split that a file's name (`train-00000-of-00002.parquet`) or its folder's names."""
    for part in (file.stem, *reversed(file.parts[:-1])):
        word = part.replace("_", "-").replace(".", "-").split("-")[0].lower()
        if word in SPLITS:
            return word
    return None


def _saved(path: Path, cfg: Dataset) -> Rows:
    """A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    import datasets

    try:
        source = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(str(path), f"the saved dataset cannot be read: {error}", "Save it again.") from error
    if isinstance(source, datasets.DatasetDict):
        if cfg.split not in source:
            raise DataError(str(path), f"there is no split {cfg.split!r}", nearest(cfg.split, list(source)))
        source = source[cfg.split]
    return Table(str(path), source.column_names, source, cfg.limit)


def _hub(cfg: Dataset) -> Rows:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        source = datasets.load_dataset(cfg.path, cfg.name, split=cfg.split)
    except (DatasetsError, OSError, ValueError) as error:
        remedy = (
            "Check data.path, data.name and data.split, the network and HF_TOKEN; a local file needs its whole path."
        )
        refusal = HubDataUnreachable if isinstance(error, ConnectionError) else DataError
        raise refusal(cfg.path, f"the hub dataset cannot be loaded: {error}", remedy) from error
    return Table(cfg.path, source.column_names, source, cfg.limit)
