"""Thins the loads of ranks of a long run: of a hundred steps every tenth one stays, compressed, with the sums over all.

A step of 64 ranks has 5 KB of loads, so that 20,000 of them would take 99 MB. Unlike blocks of metrics, these cannot be
turned back into the rows of all steps: what a summary shows are sums, some steps at even distances, and the newest
steps, none of which is thinned.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.base.json_text import parse_json
from lockstep.ledger.sqlite_index import IndexTransaction, LedgerIndex

BLOCK_STEPS = 100
"""Steps of a block, at most."""
THIN = 10
"""The loads of every so many steps of a block are kept."""

Row = tuple[int, str, str, str]
"""Step, role, speeds and loads as JSON."""


@dataclass(frozen=True, slots=True)
class LoadSums:
    """The loads of a role over the steps in which it had the same number of ranks. Lists have one value per rank."""

    steps: int
    known: list[bool]
    """Whether the seconds of all of these steps are known."""
    work_s: list[float]
    blocked_s: list[float]
    tokens: list[float]
    memory: list[float]
    """The largest."""

    def plus(self, more: "LoadSums") -> "LoadSums":
        """The sums with those of further steps."""
        pairs = (self.work_s, more.work_s), (self.blocked_s, more.blocked_s), (self.tokens, more.tokens)
        work, blocked, tokens = ([one + other for one, other in zip(*pair, strict=True)] for pair in pairs)
        known = [one and other for one, other in zip(self.known, more.known, strict=True)]
        memory = [max(pair) for pair in zip(self.memory, more.memory, strict=True)]
        return LoadSums(self.steps + more.steps, known, work, blocked, tokens, memory)

    def scaled(self, share: float) -> "LoadSums":
        """The sums over a part of the steps, if all had the same loads."""
        work, blocked, tokens = (
            [share * value for value in values] for values in (self.work_s, self.blocked_s, self.tokens)
        )
        return replace(self, steps=round(share * self.steps), work_s=work, blocked_s=blocked, tokens=tokens)


def compact(transaction: IndexTransaction, before: int, most: int) -> int:
    """Makes blocks of steps below `before`, at most so many, and returns how many."""
    oldest = transaction.execute("SELECT min(step) FROM loads")[0][0]
    if oldest is None:
        return 0
    newest = transaction.execute("SELECT coalesce(max(last), -1) FROM load_blocks")[0][0]
    first, made = max(int(oldest), int(newest) + 1), 0
    while made < most and (last := (first // BLOCK_STEPS + 1) * BLOCK_STEPS - 1) < before:
        rows: list[Any] = transaction.execute(
            "SELECT step, role, speeds, load FROM loads WHERE step BETWEEN ? AND ? AND load != 'null' "
            "ORDER BY step, role", first, last
        )  # fmt: skip
        if rows:
            sums: dict[str, list[LoadSums]] = {}
            for _, role, _, load in rows:
                sums[role] = added(sums.get(role, []), sums_of_step(load))
            _put_block(transaction, first, last, [row for row in rows if row[0] % THIN == 0], sums)
            made += 1
        transaction.execute("DELETE FROM loads WHERE step <= ?", last)
        first = last + 1
    return made


def cut_after(transaction: IndexTransaction, step: int) -> None:
    """Takes the steps after this one out of the blocks. The sums of a block that loses only a part of its steps become
    smaller in proportion, because those of its single steps are not known."""
    sql = "SELECT first, last, sums, rows FROM load_blocks WHERE last > ?"
    for first, last, sums, rows in transaction.execute(sql, step):
        transaction.execute("DELETE FROM load_blocks WHERE first = ?", first)
        if first <= step:
            share = (step - first + 1) / (last - first + 1)
            kept = {role: [each.scaled(share) for each in found] for role, found in _sums_of_roles(sums).items()}
            _put_block(transaction, first, step, [row for row in _rows(rows) if row[0] <= step], kept)


def last_thinned(index: LedgerIndex) -> int:
    """The last step of the blocks; -1 if there are none."""
    known = index.has_table("load_blocks")
    return int(index.rows("SELECT coalesce(max(last), -1) FROM load_blocks")[0][0]) if known else -1


def kept_rows(index: LedgerIndex, before: int) -> Iterator[Row]:
    """Yields the rows that the blocks keep of steps below `before`, newest first."""
    sql = "SELECT rows FROM load_blocks WHERE first < ? ORDER BY first DESC"
    for (packed,) in index.rows(sql, before) if index.has_table("load_blocks") else ():
        yield from (row for row in reversed(_rows(packed)) if row[0] < before)


def block_sums(index: LedgerIndex) -> dict[str, list[LoadSums]]:
    """Returns the sums over the steps of all blocks by role, one for each number of ranks that it had."""
    found: dict[str, list[LoadSums]] = {}
    known = index.has_table("load_blocks")
    for (packed,) in index.rows("SELECT sums FROM load_blocks ORDER BY first") if known else ():
        for role, sums in _sums_of_roles(packed).items():
            for each in sums:
                found[role] = added(found.get(role, []), each)
    return found


def sums_of_step(load: str) -> LoadSums:
    """Returns the loads of a step, which are JSON, as sums."""
    with _damage("the loads of a step cannot be read"):
        values = parse_json(load, "the loads of a step")
        known = [min(pair) >= 0 for pair in zip(values["work_s"], values["blocked_s"], strict=True)]
        return LoadSums(1, known, *(values[name] for name in ("work_s", "blocked_s", "tokens", "memory")))


def added(found: Sequence[LoadSums], more: LoadSums) -> list[LoadSums]:
    """Returns sums, one for each number of ranks, with those of further steps, which come last."""
    with _damage("the sums of loads are no numbers by rank"):
        ranks = len(more.known)
        same = [each for each in found if len(each.known) == ranks]
        return [*(each for each in found if len(each.known) != ranks), same[0].plus(more) if same else more]


def _put_block(
    transaction: IndexTransaction, first: int, last: int, rows: Sequence[Row], sums: Mapping[str, list[LoadSums]]
) -> None:
    stored = {role: [asdict(each) for each in found] for role, found in sums.items()}
    transaction.put(
        "load_blocks", first=first, last=last, sums=_packed(stored), rows=_packed([list(row) for row in rows])
    )


def _sums_of_roles(packed: bytes) -> dict[str, list[LoadSums]]:
    with _damage("a block of loads has other sums"):
        return {role: [LoadSums(**each) for each in found] for role, found in _unpacked(packed).items()}


def _rows(packed: bytes) -> list[Row]:
    with _damage("a block of loads has other rows"):
        return [(step, role, speeds, load) for step, role, speeds, load in _unpacked(packed)]


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)


def _unpacked(packed: bytes) -> Any:
    return json.loads(zlib.decompress(packed))


@contextmanager
def _damage(problem: str) -> Iterator[None]:
    """Raises the error of which the index makes an IndexDamaged if a stored value has another form."""
    try:
        yield
    except (zlib.error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise sqlite3.DatabaseError(f"{problem}: {type(error).__name__} {error}") from error
