"""Writes metrics to JSON lines and TensorBoard, and to slow sinks in the background. `trackers` has more sinks.

A resumed run repeats the steps after the newest checkpoint. A sink opened with `resume_after` drops or replaces the
rows of later steps, so that every reader sees one row per step.
"""

import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from lockstep.base import waits
from lockstep.base.folders import create_file, make_folder, open_file
from lockstep.base.json_text import parse_json
from lockstep.base.secrets import redact_text
from lockstep.base.wait_state import WaitTimeout
from lockstep.ledger.durable_files import disk_full_as_ledger_error
from lockstep.ledger.sqlite_index import CompletionSample
from lockstep.report.completion_samples import sample_markdown


class MetricSink(Protocol):
    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Writes one row, visible to readers on return. `at`: seconds since the epoch; None: now."""

    def write_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Writes completions of a step, where the sink takes texts."""

    def close(self, reason: str = "") -> None:
        """Idempotent. `reason`: how the run ended, as in its summary."""


class JsonlSink:
    """`metrics.jsonl`: one object per row with `step`, `time` and the values; NaN and infinities are null."""

    def __init__(self, path: Path, resume_after: int | None = None) -> None:
        """`resume_after`: keep rows up to this step (None: all rows). An incomplete last line is dropped."""
        self._path = path
        if os.path.lexists(path):
            os.close(open_file(path))  # refuses a link
            _trim_rows(path, resume_after)
        with disk_full_as_ledger_error(path, None):
            self._file = os.fdopen(open_file(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        row = {"step": step, "time": round(time.time() if at is None else at, 3)}
        numbers = {name: float(value) for name, value in values.items()}
        row |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}  # type: ignore[misc]
        line = json.dumps(row, allow_nan=False) + "\n"
        with disk_full_as_ledger_error(self._path, len(line)):
            self._file.write(line)
            self._file.flush()

    def write_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Does nothing: the file has numbers only."""

    def close(self, reason: str = "") -> None:
        _close_file(self._file)


class TensorBoardSink:
    """Writes event files for `tensorboard --logdir`, in the caller's thread, because TensorBoard's own writer joins its
    thread without a time limit."""

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        """`resume_after`: tells TensorBoard to discard the later steps of earlier event files."""
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns() % 10**9}"
        )
        self._path = folder / name
        with disk_full_as_ledger_error(self._path, None):
            make_folder(folder)
            self._file = os.fdopen(create_file(self._path), "wb")
        self._records = RecordWriter(self._file)
        self._event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resume_after is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._event(event_pb2.Event(wall_time=time.time(), step=resume_after + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        summary = summary_pb2.Summary(
            value=[summary_pb2.Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        )
        self._event(event_pb2.Event(wall_time=time.time() if at is None else at, step=step, summary=summary))

    def write_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Writes one text, which TensorBoard shows in its tab for texts."""
        text = "\n\n---\n\n".join(sample_markdown(sample) for sample in samples)
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        value = summary_pb2.Summary.Value(
            tag="samples",
            metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
            tensor=tensor_pb2.TensorProto(
                dtype=types_pb2.DT_STRING,
                string_val=[text.encode()],
                tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)]),
            ),
        )
        self._event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=[value])))

    def close(self, reason: str = "") -> None:
        _close_file(self._file)

    def _event(self, event: event_pb2.Event) -> None:
        data = event.SerializeToString()
        with disk_full_as_ledger_error(self._path, len(data)):
            self._records.write(data)
            self._file.flush()


class MetricSinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        for sink in self._sinks:
            sink.write(step, values, at)

    def write_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        for sink in self._sinks:
            sink.write_samples(step, samples)

    def close(self, reason: str = "") -> None:
        for sink in self._sinks:
            sink.close(reason)


def open_sinks(
    folder: Path, *, tensorboard: bool = True, resume_after: int | None = None, others: Sequence[MetricSink] = ()
) -> MetricSinks:
    """Opens the sinks of a run's folder: `metrics.jsonl`, optionally `tensorboard/`, and `others`."""
    sinks: list[MetricSink] = [JsonlSink(folder / "metrics.jsonl", resume_after)]
    if tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", resume_after))
    return MetricSinks([*sinks, *others])


def _close_file(file: IO[Any]) -> None:
    """Closes a file. If a row is still in its buffer, there was no space for it; `write` has reported that, and closing
    must not mask the error."""
    with contextlib.suppress(OSError):
        file.close()


def _trim_rows(path: Path, resume_after: int | None) -> None:
    """Drops rows past `resume_after`, which are at the end, and an incomplete last line."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = _line_start(file, end)
            file.seek(start)
            line = file.read(end - start)
            if line.endswith(b"\n") and _is_kept(line, resume_after):
                break
            end = start
        file.truncate(end)


def _line_start(file: IO[bytes], end: int) -> int:
    """Where the line begins that ends at `end`."""
    at, before = end - 1, 0
    while at > 0:
        before = max(at - 65_536, 0)
        file.seek(before)
        found = file.read(at - before).rfind(b"\n")
        if found >= 0:
            return before + found + 1
        at = before
    return 0


def _is_kept(line: bytes, resume_after: int | None) -> bool:
    try:
        step = parse_json(line, "metrics.jsonl")["step"]
    except (ValueError, KeyError, TypeError):
        return False
    return resume_after is None or int(step) <= resume_after


log = logging.getLogger(__name__)

MAX_QUEUED_ROWS = 10_000
"""Rows beyond this number are dropped and counted."""
CLOSE_S = 30.0
"""Time limit for writing the last rows at the end of a run."""


@dataclass(frozen=True, slots=True)
class _QueuedRow:
    step: int
    values: dict[str, float]
    at: float | None


@dataclass(frozen=True, slots=True)
class _QueuedSamples:
    step: int
    samples: Sequence[CompletionSample]


@dataclass(frozen=True, slots=True)
class _QueuedClose:
    reason: str


class BackgroundSink:
    """Passes rows to a sink in a thread, which runs only while there are rows.

    An exception of the sink is logged once, without secrets, and not raised: a tracker that is down neither stops nor
    slows a run.
    """

    def __init__(self, name: str, open_sink: Callable[[], MetricSink], known_secrets: tuple[str, ...] = ()) -> None:
        """`open_sink` makes the sink; the thread calls it immediately."""
        self.name, self._open_sink, self._known_secrets = name, open_sink, known_secrets
        self._sink: MetricSink | None = None
        self._waiting: deque[_QueuedRow | _QueuedSamples | _QueuedClose] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._logged = self._ended = self._broken = False
        self._lost = 0
        with self._lock:
            self._wake()

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """Queues the row and returns immediately."""
        with self._lock:
            if self._queue(_QueuedRow(step, dict(values), at)):
                return
            self._lost += not self._ended

    def write_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Queues the samples and returns immediately."""
        with self._lock:
            self._queue(_QueuedSamples(step, tuple(samples)))

    def close(self, reason: str = "") -> None:
        """Waits up to `CLOSE_S` for the last rows. Idempotent."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._waiting.append(_QueuedClose(reason))
                self._wake()
            thread = self._thread
        if thread is not None:
            try:
                waits.join(thread, waits_for=self.name, why="its last metrics", timeout_s=CLOSE_S)
            except WaitTimeout:
                self._lost += sum(isinstance(each, _QueuedRow) for each in tuple(self._waiting))
                log.warning("%s did not accept the last metrics within %g s", self.name, CLOSE_S)
        lost, self._lost = self._lost, 0
        if lost:
            log.warning("%s is missing %d rows of metrics; metrics.jsonl has all rows", self.name, lost)

    def _queue(self, item: _QueuedRow | _QueuedSamples) -> bool:
        """Returns whether there was room. The caller holds the lock."""
        if self._ended or self._broken or len(self._waiting) >= MAX_QUEUED_ROWS:
            return False
        self._waiting.append(item)
        self._wake()
        return True

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, name=self.name, daemon=True)
            self._thread.start()

    def _drain(self) -> None:
        while True:
            sink = self._open()
            with self._lock:
                if sink is None:
                    self._lost += sum(isinstance(each, _QueuedRow) for each in self._waiting)
                    self._waiting.clear()
                if not self._waiting or sink is None:
                    self._thread = None
                    return
                item = self._waiting.popleft()
            try:
                if isinstance(item, _QueuedClose):
                    sink.close(item.reason)
                elif isinstance(item, _QueuedSamples):
                    sink.write_samples(item.step, item.samples)
                else:
                    sink.write(item.step, item.values, item.at)
            except Exception as error:  # noqa: BLE001 - an exception of a tracker must not stop the run
                self._lost += isinstance(item, _QueuedRow)
                self._log_error("failed", error)

    def _open(self) -> MetricSink | None:
        if self._sink is None and not self._broken:
            try:
                self._sink = self._open_sink()
            except Exception as error:  # noqa: BLE001 - an exception of a tracker must not stop the run
                self._broken = True
                self._log_error("cannot be used", error)
        return self._sink

    def _log_error(self, what: str, error: Exception) -> None:
        if self._logged:
            return
        self._logged = True
        why = redact_text(f"{type(error).__name__}: {error}", self._known_secrets)
        log.warning("%s %s (%s); the run continues, its metrics are in metrics.jsonl", self.name, what, why)
