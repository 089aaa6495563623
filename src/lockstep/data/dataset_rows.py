"""Access to the rows of a dataset (JSONL, JSON, CSV, Arrow table, several files), and the errors about unusable rows.

JSONL stays on disk and tables stay in Arrow memory: a row becomes Python objects when it is read. A JSON array is
parsed into memory as a whole.
"""

import csv
import difflib
import gzip
import hashlib
import io
import json
import os
import tempfile
import zlib
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from lockstep.base.disk_errors import FULL_ERRNOS, free_space, refusal_reason
from lockstep.base.json_text import MAX_JSON_DEPTH, is_deeper, may_be_deeper
from lockstep.base.text import count_noun

DatasetRow = dict[str, Any]

MAX_ROW_BYTES = 64 << 20
"""Limit of a line of JSONL. A row becomes Python objects that are several times as large."""
MIN_UNCOMPRESSED_BYTES, MAX_COMPRESSION = 256 << 20, 200
"""A gzip file may hold the larger of so many bytes and so many times its own. Rows of text shrink to a tenth, or to
a hundredth if they repeat; a file that is built to fill the disk, to a thousandth."""
DIGESTED_ROWS = 1000
"""Most rows that are read for a digest of a dataset."""
_UNCOMPRESS = "Uncompress it yourself (gunzip), make room, or set TMPDIR to a folder on a larger disk."
_TOO_DEEP = f"lists and objects are nested more than {MAX_JSON_DEPTH} levels deep"
_FLATTER = "Make the row flatter, or write the nested part as text."


class BadRow(ValueError):
    """A row that cannot be used. `DatasetRows.data_error` adds path and line and converts it to a DataError."""

    def __init__(self, column: str | None, message: str, remedy: str) -> None:
        self.column, self.message, self.remedy = column, message, remedy
        super().__init__(message)


class DataError(ValueError):
    """A dataset, a file or a row that cannot be used.

    Attributes:
        path: file, folder or hub name.
        place: `line 12` or `row 12` (rows count from 0); None if the error concerns the whole file.
        column: the column that the error concerns; None if it concerns no single column.
        remedy: what the user can do about it.
    """

    def __init__(
        self, path: str, message: str, remedy: str, *, place: str | None = None, column: str | None = None
    ) -> None:
        self.path, self.place, self.column, self.message, self.remedy = path, place, column, message, remedy
        where = [path, *([place] if place else []), *([f"column {column!r}"] if column else [])]
        super().__init__(f"{', '.join(where)}: {message}. {remedy}")


class HubDataUnreachable(DataError):
    """A hub dataset is not on this machine, and the hub cannot be reached."""


class DatasetRows(ABC):
    """A sequence of rows with named columns."""

    path: str
    columns: tuple[str, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> DatasetRow: ...

    def place(self, row: int) -> tuple[str, str]:
        """Returns the path and the line or row number of a row, for error messages."""
        return self.path, f"row {row}"

    def digest(self) -> str:
        """Returns a digest of the content of at most `DIGESTED_ROWS` rows at even distances. Of values that JSON lacks,
        only bytes count. Empty if the rows are a function of the config."""
        found = hashlib.sha256()
        for row in range(0, len(self), -(-len(self) // DIGESTED_ROWS)):
            found.update(json.dumps(self[row], default=_digest_of_value, skipkeys=True).encode())
        return found.hexdigest()[:32]

    def data_error(self, row: int, bad: BadRow) -> DataError:
        """Returns the error to raise about a row."""
        path, place = self.place(row)
        return DataError(path, bad.message, bad.remedy, place=place, column=bad.column)


def _digest_of_value(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else type(value).__name__


def name_hint(name: str, names: Sequence[str]) -> str:
    """Returns a hint to end an error message with: the name that was probably meant, or all names."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Available: {', '.join(sorted(names)) or 'none'}."


class JsonLines(DatasetRows):
    """A file with one JSON object per line. The file stays on disk; only the byte offsets of its lines are in memory.

    All lines are parsed once, when the file is opened, to find errors. Blank lines are skipped.
    """

    def __init__(self, path: Path, file: BinaryIO | None = None, limit: int | None = None) -> None:
        """
        Args:
            file: the opened file, if it is not the one at `path` itself.
        """
        self.path = str(path)
        self._decode = msgspec.json.Decoder().decode
        self._file = file if file is not None else path.open("rb")
        # Eight bytes each: of a million lines, lists would take 100 MiB more.
        starts, stops, lines, columns = array("q"), array("q"), array("q"), dict[str, None]()
        at = 0
        for number, line in enumerate(iter(lambda: self._file.readline(MAX_ROW_BYTES + 1), b""), start=1):
            if len(line) > MAX_ROW_BYTES:
                problem = f"the line is longer than {MAX_ROW_BYTES >> 20} MiB, the limit for a row"
                raise DataError(self.path, problem, "Leave it out, or split it.", place=f"line {number}")
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
        self._starts, self._stops, self._lines = (np.frombuffer(each, np.int64) for each in (starts, stops, lines))
        self.columns = tuple(columns)

    def _parse(self, line: bytes, number: int) -> DatasetRow:
        try:
            row = self._decode(line)
            if may_be_deeper(line, MAX_JSON_DEPTH) and is_deeper(row, MAX_JSON_DEPTH):
                raise RecursionError
        except RecursionError:
            raise DataError(self.path, _TOO_DEEP, _FLATTER, place=f"line {number}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            remedy = "Each line must be one JSON object."
            if number == 1 and line.lstrip().startswith(b"["):
                remedy = "To read the file as one JSON array, rename it to end in .json."
            raise DataError(self.path, f"not JSON: {error}", remedy, place=f"line {number}") from error
        if not isinstance(row, dict):
            what = f"expected an object with named columns, found {type(row).__name__}"
            raise DataError(self.path, what, "Each line must be one JSON object.", place=f"line {number}")
        return row

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> DatasetRow:
        start, stop = int(self._starts[row]), int(self._stops[row])
        # pread and not a memory map: a file that shrinks under a map ends the process with SIGBUS.
        return self._parse(os.pread(self._file.fileno(), stop - start, start), int(self._lines[row]))

    def place(self, row: int) -> tuple[str, str]:
        return self.path, f"line {self._lines[row]}"


class JsonArray(DatasetRows):
    """A JSON file that holds an array of objects. It is parsed into memory as a whole."""

    def __init__(self, path: Path, file: BinaryIO, limit: int | None = None) -> None:
        self.path = str(path)
        content = file.read().removeprefix(b"\xef\xbb\xbf")
        try:
            rows = msgspec.json.decode(content)
        except RecursionError:
            raise DataError(self.path, _TOO_DEEP, _FLATTER) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            remedy = "The file must hold an array of objects, or one object per line."
            raise DataError(self.path, f"not JSON: {error}", remedy, place=_line_of_error(error, content)) from error
        self._rows: list[DatasetRow] = rows[:limit]
        for number, row in enumerate(self._rows):
            if not isinstance(row, dict):
                what = f"expected an object with named columns, found {type(row).__name__}"
                raise DataError(self.path, what, "The file must hold an array of objects.", place=f"row {number}")
            if is_deeper(row, MAX_JSON_DEPTH):
                raise DataError(self.path, _TOO_DEEP, _FLATTER, place=f"row {number}")
        if not self._rows:
            raise DataError(self.path, "the array is empty", "Write at least one object.")
        self.columns = tuple(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> DatasetRow:
        return dict(self._rows[row])


class CsvRows(DatasetRows):
    """A CSV file with a header. It is parsed into memory as a whole. All values are text, as they stand in the file: a
    guessed number would lose leading zeros of an answer."""

    def __init__(self, path: Path, file: BinaryIO, limit: int | None = None) -> None:
        self.path = str(path)
        try:
            csv.field_size_limit(MAX_ROW_BYTES)  # Python's own limit of 131,072 is less than a long document
            reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
            self.columns = tuple(next(reader, ()))
            self._rows: list[list[str]] = []
            self._lines: list[int] = []
            end = reader.line_num
            for values in reader:
                line, end = end + 1, reader.line_num
                if values:
                    self._rows.append(self._checked(values, line))
                    self._lines.append(line)
                if len(self._rows) == limit:
                    break
        except (csv.Error, UnicodeDecodeError) as error:
            place = f"line {reader.line_num}" if isinstance(error, csv.Error) else None
            raise DataError(self.path, f"not CSV: {error}", "Write it again, in UTF-8.", place=place) from error
        if len(set(self.columns)) != len(self.columns) or not all(self.columns):
            raise DataError(
                self.path, f"the header {','.join(self.columns)!r} has equal names, or none", "Name each column."
            )
        if not self._rows:
            raise DataError(self.path, "the file has no rows", "Write a header, and one row per line.")

    def _checked(self, values: list[str], line: int) -> list[str]:
        if len(values) != len(self.columns):
            problem = f"expected {count_noun(len(self.columns), 'value')}, as in the header, found {len(values)}"
            raise DataError(self.path, problem, "Quote values that contain commas.", place=f"line {line}")
        return values

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> DatasetRow:
        return dict(zip(self.columns, self._rows[row], strict=True))

    def place(self, row: int) -> tuple[str, str]:
        return self.path, f"line {self._lines[row]}"


def uncompressed_file(path: Path) -> BinaryIO:
    """Returns a temporary file with the content of a gzip file, which is deleted when it is closed.

    Raises:
        DataError: the file is no gzip file, damaged, or its content is too large.
    """
    folder = Path(tempfile.gettempdir())
    most, why = _uncompressed_limit(path, folder)
    copy = tempfile.TemporaryFile()  # noqa: SIM115  # the rows read from it as long as they live
    try:
        with gzip.open(path) as source:
            while block := source.read(2**20):
                if copy.tell() + len(block) > most:
                    raise DataError(
                        str(path), f"its content has more than {most:,} bytes, the limit: {why}", _UNCOMPRESS
                    )
                copy.write(block)
        copy.seek(0)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        copy.close()
        raise DataError(str(path), f"cannot be read as a gzip file: {error}", "Compress it again.") from error
    except OSError as error:
        copy.close()
        if error.errno not in FULL_ERRNOS:
            raise
        problem = f"its content cannot be written to a temporary file: {refusal_reason(error.errno, folder)}"
        raise DataError(str(path), problem, _UNCOMPRESS) from error
    except DataError:
        copy.close()
        raise
    return copy


def _uncompressed_limit(path: Path, folder: Path) -> tuple[int, str]:
    """The most bytes that a gzip file may hold whose content is written to the folder, and why."""
    free, size = free_space(folder)[0], path.stat().st_size
    usable = free - free // 10
    if (most := max(MIN_UNCOMPRESSED_BYTES, MAX_COMPRESSION * size)) < usable:
        return most, f"data is not compressed to less than 1/{MAX_COMPRESSION} of its size"
    return usable, f"{folder} has {free:,} bytes free"


def _line_of_error(error: Exception, content: bytes) -> str | None:
    digits = str(error).rpartition("byte ")[2].rstrip(")")
    if not digits.isdecimal():
        return None
    newlines = content[: int(digits)].count(b"\n")
    return f"line {newlines + 1}"


class TableRows(DatasetRows):
    """An Arrow table or a Hugging Face dataset. Columns stay in Arrow memory; a row is converted when it is read."""

    def __init__(self, path: str, columns: Sequence[str], source: Any, limit: int | None = None) -> None:
        if _has_images(getattr(source, "features", None)):
            source = source.with_format("arrow")  # or every image would be decoded whenever its row is read
        self.path, self.columns, self._source = path, tuple(columns), source
        self._count = min(len(source), limit or len(source))
        if self._count == 0:
            raise DataError(path, "the dataset has no rows", "Choose another split or file.")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> DatasetRow:
        if not 0 <= row < self._count:
            raise IndexError(f"row {row} of {self._count}")
        try:
            if hasattr(self._source, "slice"):
                return dict(self._source.slice(row, 1).to_pylist()[0])
            found = self._source[row]
            return dict(found) if isinstance(found, dict) else dict(found.to_pylist()[0])
        except (ValueError, OSError) as error:  # such as text that is not UTF-8, which Arrow does not look at before
            raise self.data_error(row, BadRow(None, f"it cannot be read: {error}", "Write the file again.")) from error


def _has_images(feature: Any) -> bool:
    """Whether columns of a Hugging Face dataset, or parts of them, are images."""
    if isinstance(feature, Mapping):
        return any(map(_has_images, feature.values()))
    if isinstance(feature, list):
        return any(map(_has_images, feature))
    inner = getattr(feature, "feature", None)
    return type(feature).__name__ == "Image" or (inner is not None and _has_images(inner))


class ConcatenatedRows(DatasetRows):
    """Several files as one sequence of rows."""

    def __init__(self, path: str, parts: Sequence[DatasetRows], limit: int | None = None) -> None:
        self.path, self._parts = path, list(parts)
        self._ends = list(accumulate(len(part) for part in parts))
        self._count = min(self._ends[-1], limit or self._ends[-1])
        self.columns = tuple(dict.fromkeys(name for part in parts for name in part.columns))

    def _find(self, row: int) -> tuple[DatasetRows, int]:
        if not 0 <= row < self._count:
            raise IndexError(f"row {row} of {self._count}")
        part = bisect_right(self._ends, row)
        return self._parts[part], row - (self._ends[part - 1] if part else 0)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> DatasetRow:
        part, inner = self._find(row)
        return part[inner]

    def place(self, row: int) -> tuple[str, str]:
        part, inner = self._find(row)
        return part.place(inner)
