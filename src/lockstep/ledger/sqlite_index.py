"""The SQLite index of a run: one writer, any number of readers, and a fence against stale writers.

The journal mode depends on the file system of the folder.
"""

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from lockstep.data.samples import Rollouts
from lockstep.ledger.durable_files import disk_full_error
from lockstep.ledger.errors import IndexDamaged, LedgerBusy, LedgerFull, NotARun, StaleGeneration

# fmt: off
_NETWORK_FILESYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fhgfs", "fuse", "gfs", "gfs2", "glusterfs", "gpfs",
    "lustre", "mmfs", "ncpfs", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb2", "smb3",
    "smbfs", "vboxsf", "virtiofs", "wekafs",
})
# fmt: on

SCHEMA_VERSION = 1
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
_DRAWS_TABLE = """
CREATE TABLE IF NOT EXISTS draws (step INTEGER NOT NULL, round INTEGER NOT NULL, start INTEGER NOT NULL,
  count INTEGER NOT NULL, generation INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (step, round)) WITHOUT ROWID"""
# sqlite.org/rescode.html: errors of writes without room on the disk, or beyond the process's file size limit.
_FULL_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_TRUNCATE,
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
    """The last step trained into it. Later steps are trained again from their step files."""
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
class EvaluationSample:
    """A completion of an evaluation, as text."""

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


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    step: int
    at: float
    metrics: dict[str, float]
    samples: list[EvaluationSample]


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
                connection.execute(_DRAWS_TABLE)  # runs that earlier versions created lack this table
                generation = int(_read_meta(connection, "generation")) + 1
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
            generation = int(_read_meta(connection, "generation"))
        return cls(path, connection, generation)

    def rows(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        with _sqlite_errors(self.path):
            return self._connection.execute(sql, arguments).fetchall()

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
                current = int(_read_meta(self._connection, "generation"))
                if current != self.generation:
                    raise StaleGeneration(self.path.parent, self.generation, current)
                yield IndexTransaction(self._connection, self.generation)
                self._connection.execute("COMMIT")
            except BaseException:
                # After some errors, such as a full disk, SQLite has rolled back already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

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


def is_network_filesystem(kind: str) -> bool:
    """Returns whether a file system type (`nfs4`, `fuse.sshfs`, ...) may be shared between hosts.

    True for `fuse.*`, whose storage is unknown, but not for `fuseblk`, a local disk."""
    return kind in _NETWORK_FILESYSTEMS or kind.startswith("fuse.")


def mounted_filesystem(path: PurePosixPath, mountinfo: str) -> str | None:
    """Returns the type of the file system that holds the absolute `path`, from the text of /proc/self/mountinfo
    (proc(5)); None if no mount point matches. Of two mounts at one mount point, the later one is visible."""
    best: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        left, found, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not found or len(fields) < 5 or not kinds:
            continue
        point = PurePosixPath(_unescape_mount(fields[4]))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), kinds[0])
    return None if best is None else best[1]


def journal_mode_for(folder: Path, mountinfo: str | None = None) -> str:
    """Returns `WAL` for a local disk, and `TRUNCATE` (a rollback journal) for a network file system or an unknown
    one."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return "TRUNCATE"
    kind = mounted_filesystem(PurePosixPath(folder.resolve()), mountinfo)
    return "TRUNCATE" if kind is None or is_network_filesystem(kind) else "WAL"


def _unescape_mount(text: str) -> str:
    """Decodes blanks and backslashes, which mountinfo writes in octal: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


@contextlib.contextmanager
def _sqlite_errors(path: Path) -> Iterator[None]:
    """Converts SQLite's errors to the ledger's."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code in _FULL_CODES and (no_room := _full_error(path, code)) is not None:
            raise no_room from error
        if code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LedgerBusy(path, BUSY_TIMEOUT_S) from error
        if isinstance(error, sqlite3.OperationalError | sqlite3.DatabaseError) and not isinstance(
            error, sqlite3.ProgrammingError | sqlite3.IntegrityError
        ):
            raise IndexDamaged(path, str(error)) from error
        raise


def _full_error(path: Path, code: int) -> LedgerFull | None:
    """Returns the error for a write without room; None if it failed for another reason, such as a broken disk."""
    error = disk_full_error(path, None, limited=code != sqlite3.SQLITE_FULL)
    plausible = code == sqlite3.SQLITE_FULL or error.limit is not None or error.free < 1 << 20
    return error if plausible else None


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
        version = int(_read_meta(connection, "schema"))
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB or "no such table" in str(error):
            raise NotARun(path.parent, f"{path.name} is not a ledger ({error})") from error
        raise
    if version != SCHEMA_VERSION:
        raise NotARun(path.parent, f"its ledger has format {version}, this lockstep reads {SCHEMA_VERSION}")


def _read_meta(connection: sqlite3.Connection, key: str) -> str:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row[0])


def _uri(path: Path) -> str:
    return f"file:{quote(str(path.absolute()))}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
