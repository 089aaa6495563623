"""What people read about a run: metrics, evaluations, samples and events, as rows of the index."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from lockstep.ledger import json_values, metric_blocks
from lockstep.ledger.errors import IndexDamaged
from lockstep.ledger.sqlite_index import (
    CompletionSample,
    EvaluationRow,
    EventRow,
    LedgerIndex,
    MetricsRow,
    SamplesRow,
)


class RunRecords:
    """The part of the ledger that reports are made from. Nothing in it affects the run. Steps are indices, as in
    `Ledger`."""

    def __init__(self, index: LedgerIndex) -> None:
        self._index = index

    def record_evaluation(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[CompletionSample] = ()
    ) -> None:
        """Records an evaluation of the weights after `step` (-1: before the first), and replaces an earlier one."""
        shown = json_values.dumps([dataclasses.asdict(sample) for sample in samples], "samples")
        with self._index.transaction() as transaction:
            transaction.put(
                "evaluations", step=step, metrics=json_values.dumps(dict(metrics), "metrics"), samples=shown
            )

    def evaluation(self, step: int) -> EvaluationRow | None:
        """Returns the evaluation of the weights after a step (-1: before the first); None if there was none."""
        return next((row for row in self.evaluations(after=step - 1, before=step + 1)), None)

    def evaluations(self, after: int | None = None, before: int | None = None) -> list[EvaluationRow]:
        """Returns the evaluations by step, only of steps later than `after` and earlier than `before`."""
        where = _step_range(after, before)
        rows = self._index.rows(f"SELECT step, at, metrics, samples FROM evaluations {where} ORDER BY step")
        found = []
        for step, at, metrics, stored in rows:
            found.append(EvaluationRow(step, at, self._index.parse(metrics, dict), self._parse_samples(stored)))
        return found

    def evaluation_metrics(self) -> list[EvaluationRow]:
        """Returns all evaluations, by step, of which only the first and the last one with samples have them."""
        sampled = "SELECT {}(step) FROM evaluations WHERE samples != '[]'"
        shown = f"step IN (({sampled.format('min')}), ({sampled.format('max')}))"
        case = f"CASE WHEN {shown} THEN samples ELSE '[]' END"
        rows = self._index.rows(f"SELECT step, at, metrics, {case} FROM evaluations ORDER BY step")
        return [EvaluationRow(step, at, self._index.parse(metrics, dict), self._parse_samples(stored))
                for step, at, metrics, stored in rows]  # fmt: skip

    def record_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Keeps a few completions of a step, which stay when its step file is deleted."""
        kept = json_values.dumps([dataclasses.asdict(sample) for sample in samples], "samples")
        with self._index.transaction() as transaction:
            transaction.put("samples", step=step, samples=kept)

    def sampled_steps(self) -> list[int]:
        """Returns the steps of which completions were kept; none of a run of a version that kept none."""
        if not self._index.has_table("samples"):
            return []
        return [row[0] for row in self._index.rows("SELECT step FROM samples ORDER BY step")]

    def evaluated_steps(self) -> list[int]:
        """Returns the steps after which evaluations kept completions; -1 before the first step."""
        return [row[0] for row in self._index.rows("SELECT step FROM evaluations WHERE samples <> '[]' ORDER BY step")]

    def samples(self, steps: Collection[int] | None = None) -> list[SamplesRow]:
        """Returns the completions that were kept, by step: of all steps, or of some."""
        chosen = self.sampled_steps() if steps is None else sorted({*steps} & {*self.sampled_steps()})
        sql = "SELECT step, at, samples FROM samples WHERE step = ?"
        rows = [row for step in chosen for row in self._index.rows(sql, step)]
        return [SamplesRow(step, at, self._parse_samples(stored)) for step, at, stored in rows]

    def _parse_samples(self, stored: str) -> list[CompletionSample]:
        try:
            return [CompletionSample(**sample) for sample in self._index.parse(stored, list)]
        except TypeError as error:
            raise IndexDamaged(self._index.path, f"the samples of a step have other fields: {error}") from error

    def record_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Adds values to the metrics of a step, and replaces those with the same names."""
        with self._index.transaction() as transaction:
            if transaction.execute("SELECT 1 FROM metric_blocks WHERE last >= ?", step):
                metric_blocks.unpack_from(transaction, step)
            found = transaction.execute('SELECT "values" FROM metrics WHERE step = ?', step)
            merged = {**(self._index.parse(found[0][0], dict) if found else {}), **row}
            transaction.put("metrics", step=step, values=json_values.dumps(merged, "metrics"))

    def metrics_rows(
        self, after: int | None = None, before: int | None = None, most: int | None = None
    ) -> list[MetricsRow]:
        """Returns the metrics by step, only of steps later than `after` and earlier than `before`. If there are more
        than `most`, returns some at even distances, and the last."""
        span = -2 if after is None else after, 2**62 if before is None else before
        with self._index.snapshot():
            found = metric_blocks.metric_texts(self._index, *span, most)
        return [self._metrics_row(row) for row in found]

    def has_metrics(self) -> bool:
        """Whether there are metrics of any step."""
        with self._index.snapshot():
            return (
                bool(self._index.rows("SELECT 1 FROM metrics LIMIT 1")) or metric_blocks.count_blocks(self._index) > 0
            )

    def newest_metrics(self, name: str, before: int) -> MetricsRow | None:
        """Returns the newest row of a step earlier than `before` that has the metric."""
        with self._index.snapshot():
            found = metric_blocks.newest_with(self._index, name, before)
        return None if found is None else self._metrics_row(found)

    def metric_totals(self, before: int) -> metric_blocks.MetricTotals:
        """Returns the sums over the steps earlier than `before`."""
        with self._index.snapshot():
            return metric_blocks.metric_totals(self._index, before)

    def _metrics_row(self, row: metric_blocks.Row) -> MetricsRow:
        step, at, generation, values = row
        return MetricsRow(step, at, generation, self._parse_values(values))

    def _parse_values(self, text: str) -> dict[str, float]:
        try:  # a third of the time of `json`, but it knows neither NaN nor infinities
            return msgspec.json.decode(text, type=dict[str, int | float])
        except (msgspec.MsgspecError, UnicodeError):
            return self._index.parse(text, dict)

    def record_event(self, kind: str, **fields: Any) -> None:
        """Records an event with the current time."""
        with self._index.transaction() as transaction:
            transaction.put("events", kind=kind, fields=json_values.dumps(fields, kind))

    def events(self) -> list[EventRow]:
        """Returns all events, oldest first."""
        rows = self._index.rows("SELECT at, generation, kind, fields FROM events ORDER BY id")
        return [
            EventRow(at, generation, kind, self._index.parse(fields, dict)) for at, generation, kind, fields in rows
        ]


def _step_range(after: int | None, before: int | None) -> str:
    """The condition of a query for some steps."""
    parts = [f"step > {int(after)}"] if after is not None else []
    parts += [f"step < {int(before)}"] if before is not None else []
    return f"WHERE {' AND '.join(parts)}" if parts else ""
