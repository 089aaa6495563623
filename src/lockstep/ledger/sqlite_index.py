"""The SQLite index of a run: one writer, any number of readers, and a fence against stale writers.

The journal mode depends on the file system of the folder.
"""

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from lockstep.base.disk_errors import file_size_limit, free_space, refusal_reason
from lockstep.base.filesystems import is_on_local_disk
from lockstep.data.samples import Rollouts
from lockstep.ledger import json_values
from lockstep.ledger.durable_files import write_refused_error
from lockstep.ledger.errors import IndexDamaged, LedgerBusy, LedgerError, LedgerReadOnly, NotARun, StaleGeneration

SCHEMA_VERSION = 2
FIRST_STEPS = {1: 0, SCHEMA_VERSION: 1}
"""The number of the first step in names of files and rows of metrics, by format. A run keeps its format."""
T = TypeVar("T")
BUSY_TIMEOUT_S = 10.0
"""How long a write waits for readers before it fails with LedgerBusy."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, version INTEGER NOT NULL, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL,
  groups INTEGER NOT NULL, completions INTEGER NOT NULL, generation INTEGER NOT NULL, at REAL NOT NULL,
  removed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE prompts (uid TEXT PRIMARY KEY, step INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX prompts_of_step ON prompts (step);
CREATE TABLE commits (step INTEGER PRIMARY KEY, stats TEXT NOT NULL, generation INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT NOT NULL, metric REAL, generation INTEGER NOT NULL,
  at REAL NOT NULL);
CREATE TABLE evaluations (step INTEGER PRIMARY KEY, metrics TEXT NOT NULL, samples TEXT NOT NULL,
  generation INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE metrics (step INTEGER PRIMARY KEY, "values" TEXT NOT NULL, generation INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE events (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, fields TEXT NOT NULL, generation INTEGER NOT NULL,
  at REAL NOT NULL);
"""
_LATER_TABLES = (
    """draws (step INTEGER NOT NULL, round INTEGER NOT NULL, start INTEGER NOT NULL, count INTEGER NOT NULL,
  generation INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (step, round)) WITHOUT ROWID""",
    "samples (step INTEGER PRIMARY KEY, samples TEXT NOT NULL, generation INTEGER NOT NULL, at REAL NOT NULL)",
    """loads (step INTEGER NOT NULL, role TEXT NOT NULL, speeds TEXT NOT NULL, load TEXT NOT NULL,
  generation INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (step, role)) WITHOUT ROWID""",
    """metric_blocks (first INTEGER PRIMARY KEY, last INTEGER NOT NULL, count INTEGER NOT NULL, sums TEXT NOT NULL,
  thin BLOB NOT NULL, rows BLOB NOT NULL, generation INTEGER NOT NULL, at REAL NOT NULL)""",
    """load_blocks (first INTEGER PRIMARY KEY, last INTEGER NOT NULL, sums BLOB NOT NULL, rows BLOB NOT NULL,
  generation INTEGER NOT NULL, at REAL NOT NULL)""",
)
"""Tables that runs of earlier versions lack."""
# sqlite.org/rescode.html: errors of writes without room on the disk, or beyond the process's file size limit.
_FULL_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_CANTOPEN,  # a journal needs an inode
}


@dataclass(frozen=True, slots=True)
class StoredStep:
    """The content of a step file."""

    rollouts: Rollouts
    extra: dict[str, Any]
    """Other values that were passed to `record_rollouts` (packing seed, position in the data, ...)."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    step: int
    """The last step trained into it, from 0. Later steps are trained again from their step files."""
    path: Path
    metric: float | None
    """The metric that `keep_best` compares; higher is better."""
    at: float


@dataclass(frozen=True, slots=True)
class CommitRow:
    step: int
    at: float
    generation: int
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MetricsRow:
    step: int
    at: float
    generation: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class CompletionSample:
    """A completion of a step or of an evaluation, as text."""

    prompt: str
    completion: str
    answer: Any = None
    reward: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    """Values of the reward's terms and `exact_match`, by name."""
    uid: str = ""
    """The prompt's uid, by which two evaluations can be compared."""
    finish: str = "stop"
    messages: list[dict[str, Any]] | None = None
    """All turns after the prompt; None without an environment."""
    number: int = 0
    """The completion's number in its group, from 0."""
    images: list[dict[str, Any]] = field(default_factory=list)
    """The prompt's images, and after them those of an environment, each with `source`, `digest`, `size` and `resized`
    (width and height)."""


@dataclass(frozen=True, slots=True)
class SamplesRow:
    step: int
    at: float
    samples: list[CompletionSample]
    """A few completions of the step."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    step: int
    at: float
    metrics: dict[str, float]
    samples: list[CompletionSample]


@dataclass(frozen=True, slots=True)
class EventRow:
    at: float
    """Seconds since the epoch."""
    generation: int
    kind: str
    fields: dict[str, Any]


class LedgerIndex:
    """One connection to the index, for one thread. Every public method may raise LedgerFull, LedgerBusy or
    IndexDamaged."""

    def __init__(self, path: Path, connection: sqlite3.Connection, generation: int) -> None:
        self.path, self.generation = path, generation
        self.first_step = FIRST_STEPS[int(_read_meta(connection, "schema"))]
        self._connection = connection

    @classmethod
    def create(cls, path: Path, config: str) -> None:
        """Creates an index with generation 0, which no process uses, and closes it."""
        with _sqlite_errors(path):
            connection = sqlite3.connect(path, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode = TRUNCATE")
                connection.execute("PRAGMA synchronous = FULL")
                meta = {"schema": str(SCHEMA_VERSION), "generation": "0", "published": "-1", "config": config}
                statements = "".join(
                    f"INSERT INTO meta VALUES ('{key}', {_quoted(value)});" for key, value in meta.items()
                )
                connection.executescript(f"BEGIN;{_SCHEMA}{statements}COMMIT;")
            finally:
                connection.close()

    @classmethod
    def write(cls, path: Path) -> "LedgerIndex":
        """Opens the index for writing and claims the next generation, so that writes of earlier generations are
        refused."""
        with _sqlite_errors(path):
            connection = sqlite3.connect(
                f"{_uri(path)}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None
            )
            try:
                _check_schema(path, connection)
                connection.execute(f"PRAGMA journal_mode = {journal_mode_for(path.parent)}")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("BEGIN IMMEDIATE")
                for table in _LATER_TABLES:
                    connection.execute(f"CREATE TABLE IF NOT EXISTS {table}")
                generation = _read_number(path, connection, "generation") + 1
                connection.execute("UPDATE meta SET value = ? WHERE key = 'generation'", (str(generation),))
                connection.execute("COMMIT")
            except BaseException:
                connection.close()
                raise
        return cls(path, connection, generation)

    @classmethod
    def read(cls, path: Path) -> "LedgerIndex":
        """Opens the index read-only, also while another process writes, or on a read-only file system."""
        with _sqlite_errors(path):
            try:
                connection = _open_read_only(path, "mode=ro")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK and os.access(path, os.W_OK):
                    _roll_back(path)
                    return cls.read(path)
                # SQLite cannot create its log in a read-only folder. Without a log there is no writer.
                log = path.with_name(path.name + "-wal")
                if os.access(path.parent, os.W_OK) or (log.exists() and log.stat().st_size > 0):
                    raise
                connection = _open_read_only(path, "mode=ro&immutable=1")
            generation = _read_number(path, connection, "generation")
        return cls(path, connection, generation)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """All `rows` in the block are of one moment, whatever another process writes meanwhile."""
        with _sqlite_errors(self.path):
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("ROLLBACK")

    def has_table(self, name: str) -> bool:
        """Whether there is a table; a run of an earlier version that was only read since lacks some."""
        return bool(self.rows("SELECT 1 FROM sqlite_master WHERE name = ?", name))

    def rows(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        with _sqlite_errors(self.path):
            return self._connection.execute(sql, arguments).fetchall()

    def parse(self, text: str, kind: type[T]) -> T:
        """The value of a column that `json_values.dumps` wrote. Raises IndexDamaged if it is anything else."""
        try:
            value = json_values.loads(text)
        except ValueError as error:
            raise IndexDamaged(self.path, str(error)) from error
        if not isinstance(value, kind):
            raise IndexDamaged(self.path, f"it holds a {type(value).__name__} where a {kind.__name__} belongs")
        return value

    def meta(self, key: str) -> str:
        with _sqlite_errors(self.path):
            return _read_meta(self._connection, key)

    @contextlib.contextmanager
    def transaction(self) -> Iterator["IndexTransaction"]:
        """Opens a transaction, which is durable at the end of the block. Raises StaleGeneration if another process has
        claimed the run."""
        with _sqlite_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                current = _read_number(self.path, self._connection, "generation")
                if current != self.generation:
                    raise StaleGeneration(self.path.parent, self.generation, current)
                yield IndexTransaction(self._connection, self.generation)
                self._connection.execute("COMMIT")
            except BaseException:
                # After some errors, such as a full disk, SQLite has rolled back already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def copy(self, target: Path, change: tuple[str, Any]) -> None:
        """Writes a consistent copy of the index, with a change, also while another process writes.

        Args:
            change: a statement and its argument.
        """
        with _sqlite_errors(target):
            connection = sqlite3.connect(target, isolation_level=None)
            try:
                self._connection.backup(connection)
                connection.execute("PRAGMA journal_mode = TRUNCATE")
                connection.execute(change[0], (change[1],))
            finally:
                connection.close()

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()


class IndexTransaction:
    """Writes within one transaction. Each row gets the time and the generation."""

    def __init__(self, connection: sqlite3.Connection, generation: int) -> None:
        self._connection, self._generation = connection, generation

    def put(self, table: str, at: float | None = None, **columns: Any) -> None:
        """Inserts a row, or replaces the one with the same key."""
        row = {**columns, "generation": self._generation, "at": time.time() if at is None else at}
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("?" * len(row))
        self.execute(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", *row.values())

    def execute(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, arguments).fetchall()

    def set_meta(self, key: str, value: str) -> None:
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)


def allot_positions(transaction: IndexTransaction, step: int, round: int, count: int) -> tuple[int, int]:
    """Returns (first position, number of positions) of a round of a step: those allotted to it before, or else `count`
    new ones after all that were ever allotted."""
    found = transaction.execute("SELECT start, count FROM draws WHERE step = ? AND round = ?", step, round)
    if found:
        return int(found[0][0]), int(found[0][1])
    start = int(transaction.execute("SELECT coalesce(max(start + count), 0) FROM draws")[0][0])
    transaction.put("draws", step=step, round=round, start=start, count=count)
    return start, count


def journal_mode_for(folder: Path, mountinfo: str | None = None) -> str:
    """Returns `WAL` for a local disk, and `TRUNCATE` (a rollback journal) for a network file system or an unknown
    one."""
    return "WAL" if is_on_local_disk(folder, mountinfo) else "TRUNCATE"


@contextlib.contextmanager
def _sqlite_errors(path: Path) -> Iterator[None]:
    """Converts SQLite's errors to the ledger's."""
    try:
        yield
    except UnicodeDecodeError as error:  # of a damaged text, or of SQLite's message about damaged SQL of the schema
        raise IndexDamaged(path, f"it has text that is not UTF-8 ({error})") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code in _FULL_CODES and (no_room := _full_error(path, code)) is not None:
            raise no_room from error
        if code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LedgerBusy(path, BUSY_TIMEOUT_S) from error
        if code is not None and code & 0xFF == sqlite3.SQLITE_READONLY:
            mounted_read_only = os.statvfs(path.parent).f_flag & os.ST_RDONLY
            why = refusal_reason(errno.EROFS, path) if mounted_read_only else _NO_WRITE_ACCESS
            raise LedgerReadOnly(path, why) from error
        if isinstance(error, sqlite3.OperationalError | sqlite3.DatabaseError) and not isinstance(
            error, sqlite3.ProgrammingError | sqlite3.IntegrityError
        ):
            raise IndexDamaged(path, str(error)) from error
        raise


_NO_WRITE_ACCESS = "this user may not write it: give it write access to the run's folder and to all files in it"


def _full_error(path: Path, code: int) -> LedgerError | None:
    """Returns the error for a write without room; None if it failed for another reason, such as a broken disk. SQLite
    does not say which limit of the file system was reached."""
    free, inodes, all_inodes = free_space(path)
    if code == sqlite3.SQLITE_CANTOPEN and not (all_inodes and not inodes and path.exists()):
        return None
    if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN):
        if file_size_limit() is not None:
            return write_refused_error(path, None, errno.EFBIG)
        if free >= 1 << 20 and (inodes or not all_inodes):
            return None
    return write_refused_error(path, None, errno.ENOSPC)


def _open_read_only(path: Path, options: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{_uri(path)}?{options}", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        _check_schema(path, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _roll_back(path: Path) -> None:
    """Rolls back the transaction of a killed writer, which a read-only connection cannot do."""
    connection = sqlite3.connect(f"{_uri(path)}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        _read_meta(connection, "generation")
    finally:
        connection.close()


def _check_schema(path: Path, connection: sqlite3.Connection) -> None:
    try:
        version = _read_number(path, connection, "schema")
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB or "no such table" in str(error):
            raise NotARun(path.parent, f"{path.name} is not a ledger ({error})") from error
        raise
    if version not in FIRST_STEPS:
        raise NotARun(path.parent, f"its ledger has format {version}, this lockstep reads {SCHEMA_VERSION} and earlier")


def _read_meta(connection: sqlite3.Connection, key: str) -> str:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    if row is None:
        raise sqlite3.DatabaseError(f"the table meta has no {key!r}")
    return str(row[0])


def _read_number(path: Path, connection: sqlite3.Connection, key: str) -> int:
    text = _read_meta(connection, key)
    try:
        return int(text)
    except ValueError:
        raise IndexDamaged(path, f"the table meta has {key} {text[:40]!r}, which is no number") from None


def _uri(path: Path) -> str:
    return f"file:{quote(str(path.absolute()))}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
