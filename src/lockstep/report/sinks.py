"""Where metrics go: a file of JSON lines and TensorBoard. `trackers` has more behind the same protocol.

A resumed run does its steps after the newest checkpoint again; a sink opened with `resume_after` drops or supersedes
the rows past that step, so that every reader sees one row per step."""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from lockstep.ledger.files import replace, room_for


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        """One row; visible to readers on return. `at`: seconds since the epoch, now when None."""

    def close(self, reason: str = "") -> None:
        """Idempotent. `reason`: how the run ended, as its summary says it."""


class JsonlSink:
    """`metrics.jsonl`: one object per row with `step`, `time` and the values; NaN and infinities are null."""

    def __init__(self, path: Path, resume_after: int | None = None) -> None:
        """`resume_after`: keep rows up to this step (None: the file's rows all stay; a torn last line goes)."""
        self._path = path
        if path.exists():
            _trim(path, resume_after)
        with room_for(path, None):
            self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        row = {"step": step, "time": round(time.time() if at is None else at, 3)}
        numbers = {name: float(value) for name, value in values.items()}
        row |= {name: value if math.isfinite(value) else None for name, value in numbers.items()}  # type: ignore[misc]
        line = json.dumps(row, allow_nan=False) + "\n"
        with room_for(self._path, len(line)):
            self._file.write(line)
            self._file.flush()

    def close(self, reason: str = "") -> None:
        _close(self._file)


class TensorBoardSink:
    """Event files that `tensorboard --logdir` reads. Written in the caller's thread: TensorBoard's own writer hands
    over to a thread that it joins without a bound."""

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        """`resume_after`: tells TensorBoard to forget what earlier event files say about later steps."""
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns() % 10**9}"
        )
        self._path = folder / name
        with room_for(self._path, None):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
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

    def close(self, reason: str = "") -> None:
        _close(self._file)

    def _event(self, event: event_pb2.Event) -> None:
        data = event.SerializeToString()
        with room_for(self._path, len(data)):
            self._records.write(data)
            self._file.flush()


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        for sink in self._sinks:
            sink.write(step, values, at)

    def close(self, reason: str = "") -> None:
        for sink in self._sinks:
            sink.close(reason)


def open_sinks(
    folder: Path, *, tensorboard: bool = True, resume_after: int | None = None, others: Sequence[Sink] = ()
) -> Sinks:
    """The sinks of a run's folder, `metrics.jsonl` and where wanted `tensorboard/`, and others besides."""
    sinks: list[Sink] = [JsonlSink(folder / "metrics.jsonl", resume_after)]
    if tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", resume_after))
    return Sinks([*sinks, *others])


def _close(file: IO[Any]) -> None:
    """Every row was flushed as it was written. What is left is one that found no room, which `write` has told; that
    there still is none must not take the place of that error."""
    with contextlib.suppress(OSError):
        file.close()


def _trim(path: Path, resume_after: int | None) -> None:
    """Drops rows past `resume_after` and what a killed writer left of its last line; rewrites only if it must."""
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    kept = b"".join(line for line in lines if line.endswith(b"\n") and _belongs(line, resume_after))
    if kept != data:
        replace(path, kept)


def _belongs(line: bytes, resume_after: int | None) -> bool:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return False
    return resume_after is None or int(step) <= resume_after
