"""Compacts the metrics of a long run: rows of steps that stay as they are become compressed blocks of a thousand.

A block has all of its rows, every tenth one apart (enough for a chart), and the sums that a summary needs. So a report
of 100,000 steps reads a few megabytes. A row of a step that is in a block is not written again: `unpack_from` turns
blocks back into rows when a run goes back to such a step.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.base.json_text import parse_json
from lockstep.ledger.sqlite_index import IndexTransaction, LedgerIndex

BLOCK_STEPS = 1000
"""Steps of a block."""
THIN = 10
"""Every so many steps, a row of a block is kept apart."""
SUMMED = ("rollout/tokens",)
"""Metrics whose sums a block has, besides the times of stages."""

Row = tuple[int, float, int, str]
"""Step, time, generation, and the values as JSON."""


@dataclass(frozen=True, slots=True)
class MetricTotals:
    """Sums over the metrics of steps."""

    count: int
    """The number of steps with metrics."""
    sums: dict[str, float]
    """By metric: times of stages, and those of `SUMMED`."""


def compact(transaction: IndexTransaction, before: int, most: int) -> int:
    """Makes blocks of steps below `before`, at most so many, and returns how many. The statistics of their commits,
    which the metrics repeat, are deleted."""
    found = transaction.execute("SELECT coalesce(min(step), 0), coalesce(max(last), -1) FROM metrics, "
                                "(SELECT max(last) AS last FROM metric_blocks)")  # fmt: skip
    first = max(int(found[0][0]), int(found[0][1]) + 1) // BLOCK_STEPS * BLOCK_STEPS
    made = 0
    while made < most and first + BLOCK_STEPS <= before:
        last = first + BLOCK_STEPS - 1
        rows = transaction.execute(
            'SELECT step, at, generation, "values" FROM metrics WHERE step BETWEEN ? AND ? ORDER BY step', first, last
        )
        if rows:
            _put_block(transaction, first, last, rows)
            transaction.execute("DELETE FROM metrics WHERE step BETWEEN ? AND ?", first, last)
            transaction.execute("UPDATE commits SET stats = '{}' WHERE step BETWEEN ? AND ?", first, last)
            made += 1
        first += BLOCK_STEPS
    return made


def unpack_from(transaction: IndexTransaction, step: int) -> None:
    """Turns the blocks with this step and later ones into rows again."""
    for first, packed in transaction.execute("SELECT first, rows FROM metric_blocks WHERE last >= ?", step):
        for number, at, generation, values in _unpacked(packed):
            transaction.execute("INSERT OR IGNORE INTO metrics VALUES (?, ?, ?, ?)", number, values, generation, at)
        transaction.execute("DELETE FROM metric_blocks WHERE first = ?", first)


def metric_texts(index: LedgerIndex, after: int, before: int, most: int | None) -> list[Row]:
    """Returns the rows of the steps between, by step; if there are more than `most`, some at even distances and the
    last."""
    blocks = index.has_table("metric_blocks")
    span = after, before
    count = index.rows("SELECT count(*) FROM metrics WHERE step > ? AND step < ?", *span)[0][0]
    where = "FROM metric_blocks WHERE last > ? AND first < ?"
    count += index.rows(f"SELECT coalesce(sum(count), 0) {where}", *span)[0][0] if blocks else 0
    stride = 1 if most is None or count <= most else THIN * -(-count // (THIN * most))
    column = "rows" if stride == 1 else "thin"
    found: list[Row] = []
    for (packed,) in index.rows(f"SELECT {column} {where} ORDER BY first", *span) if blocks else ():
        found += [row for row in _unpacked(packed) if after < row[0] < before and row[0] % stride == 0]
    sql = 'SELECT step, at, generation, "values" FROM metrics WHERE step > ? AND step < ?'
    last = "(SELECT max(step) FROM metrics WHERE step < ?)"
    rows = index.rows(f"{sql} AND (step % ? = 0 OR step = {last}) ORDER BY step", *span, stride, before)
    if stride > 1 and not rows:  # the last is in a block
        for (packed,) in index.rows(f"SELECT rows {where} ORDER BY first DESC LIMIT 1", *span):
            newest = [row for row in _unpacked(packed) if after < row[0] < before][-1:]
            found += [row for row in newest if row not in found[-1:]]
    return [*found, *((step, at, generation, values) for step, at, generation, values in rows)]


def newest_with(index: LedgerIndex, metric: str, before: int) -> Row | None:
    """Returns the newest row below a step that has a metric."""
    name = f'%"{metric}":%'
    sql = 'SELECT step, at, generation, "values" FROM metrics WHERE step < ? AND "values" LIKE ? ORDER BY step DESC'
    if rows := index.rows(f"{sql} LIMIT 1", before, name):
        step, at, generation, values = rows[0]
        return step, at, generation, values
    firsts = "SELECT first FROM metric_blocks WHERE first < ? ORDER BY first DESC"
    for (first,) in index.rows(firsts, before) if index.has_table("metric_blocks") else ():
        [(packed,)] = index.rows("SELECT rows FROM metric_blocks WHERE first = ?", first)
        known = [row for row in _unpacked(packed) if row[0] < before and f'"{metric}":' in row[3]]
        if known:
            return known[-1]
    return None


def metric_totals(index: LedgerIndex, before: int) -> MetricTotals:
    """Returns the sums over all steps below this one."""
    count, sums = 0, dict[str, float]()
    sql = "SELECT last, count, sums, CASE WHEN last < ? THEN NULL ELSE rows END FROM metric_blocks WHERE first < ?"
    for last, number, text, packed in index.rows(sql, before, before) if index.has_table("metric_blocks") else ():
        if last < before:
            count, sums = count + number, _added(sums, index.parse(text, dict))
        else:
            part = [row[3] for row in _unpacked(packed) if row[0] < before]
            count, sums = count + len(part), _added(sums, _sums(part))
    texts = [row[0] for row in index.rows('SELECT "values" FROM metrics WHERE step < ? ORDER BY step', before)]
    return MetricTotals(count + len(texts), _added(sums, _sums(texts)))


def count_blocks(index: LedgerIndex) -> int:
    """The number of blocks."""
    return int(index.rows("SELECT count(*) FROM metric_blocks")[0][0]) if index.has_table("metric_blocks") else 0


def _put_block(transaction: IndexTransaction, first: int, last: int, rows: list[tuple[Any, ...]]) -> None:
    thin = [row for row in rows if row[0] % THIN == 0]
    transaction.put(
        "metric_blocks",
        first=first,
        last=last,
        count=len(rows),
        sums=json.dumps(_sums(row[3] for row in rows)),
        thin=_packed(thin),
        rows=_packed(rows),
    )


def _packed(rows: Iterable[tuple[Any, ...]]) -> bytes:
    return zlib.compress(json.dumps([list(row) for row in rows], separators=(",", ":")).encode(), 6)


def _unpacked(packed: bytes) -> list[Row]:
    try:
        return [(step, at, generation, values) for step, at, generation, values in json.loads(zlib.decompress(packed))]
    except (zlib.error, ValueError, TypeError) as error:  # the index makes an IndexDamaged of it
        raise sqlite3.DatabaseError(f"a block of metrics cannot be unpacked: {error}") from error


_decode = msgspec.json.Decoder(dict[str, Any]).decode


def _sums(texts: Iterable[str]) -> dict[str, float]:
    """Sums of the times of stages, and of other metrics that summaries add up."""
    sums: dict[str, float] = {}
    for text in texts:
        try:
            values = _decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError):  # NaN, which Python writes and msgspec refuses
            values = _parsed(text)
        for name, value in values.items():
            if (name.startswith("time/") or name in SUMMED) and isinstance(value, int | float):
                sums[name] = sums.get(name, 0.0) + value
    return sums


def _parsed(text: str) -> dict[str, Any]:
    try:
        return dict(parse_json(text, "a row of metrics"))
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(f"a row of metrics cannot be read: {error}") from error


def _added(sums: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {**sums, **{name: sums.get(name, 0.0) + float(value) for name, value in more.items()}}
