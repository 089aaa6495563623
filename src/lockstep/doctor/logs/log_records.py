"""Finds message, time, level, rank and host in a record of a log collector or a structured logger, by names of fields.

One table serves all products: Docker, Kubernetes, Fluent Bit, Google Cloud, CloudWatch, Loki, Elasticsearch, journald,
structlog, python-json-logger and others differ in how they name and nest the same few fields.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.doctor.logs.record_fields import PARTY_NAMES
from lockstep.doctor.logs.timestamps import TimestampParser

MAX_RECORD_BYTES = 1 << 20
"""Longer lines stay text."""
_MAX_DEPTH, _MAX_FIELDS = 5, 256
_COLLECTED = ("log", "textpayload", "raw", "logmessage", "logentry", "logline")
_WRITTEN = ("message", "msg", "line", "body", "event")
"""Names of the message: those only of collectors, and those of loggers, too. Here and below in small letters only."""
_NAMES = {
    "time": ("timestamp", "time", "ts", "asctime", "datetime", "date", "timegenerated", "realtimetimestamp", "t"),
    "level": ("level", "levelname", "severity", "loglevel", "lvl"),
    "rank": ("rank", "globalrank"),
    "pod": ("pod", "podname", "kubernetespodname"),
    "host": ("host", "hostname", "node", "nodename"),
    "party": PARTY_NAMES,
    "stream": ("stream", "iostream"),
    "error": ("excinfo", "exctext", "exception", "traceback", "stacktrace", "errorstacktrace", "stack", "stackinfo"),
}
_PURPOSES = {name: purpose for purpose, names in _NAMES.items() for name in names}
_CONTEXT = ("kubernetes", "resource", "labels", "metadata", "stream", "host", "k", "node", "attributes", "extra")
"""Fields in which a pod, host or rank may be."""
_INSIDE = ("jsonpayload", "log", "message", "event", "result", "source", "record", "payload", "fields", "body")
"""Fields that may hold the record itself."""
_UNINTERESTING = frozenset((
    "ingestiontime", "eventid", "logstreamname", "loggroupname", "id", "insertid", "logname", "receivetimestamp",
    "version", "logger", "name", "module", "lineno", "funcname", "filename", "pathname", "file", "path", "function",
    "caller", "process", "processname", "thread", "threadname", "taskname", "pid", "created", "msecs",
    "relativecreated", "tag", "p", "traceid", "spanid", "flags", "type", "offset", "namespace",
    "container", "stringvalue",
))  # fmt: skip
"""Where and how a record was made, which no rule reads."""
_HOST = re.compile(r"[A-Za-z0-9][\w.-]{0,252}")
_LEVEL = re.compile(r"(?i)warn(?:ing)?|error|critical|fatal")
_EARLIEST_S, _LATEST_S = 631_152_000, 4_102_444_800
"""From 1990 to 2100."""
_UNITS = (1, 1_000, 1_000_000, 1_000_000_000)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record.

    Attributes:
        texts: The lines of its message, then those of its traceback.
        when: Seconds since 1970; None if the record has no time, or one that is no date of a job.
        stream: `stdout` or `stderr`.
    """

    texts: tuple[str, ...]
    when: float | None = None
    level: str = ""
    rank: int | None = None
    host: str = ""
    stream: str = "stdout"

    def lines(self) -> Iterator[str]:
        """Yields the lines with prefixes that `line_origin` reads: of kubectl, torchrun and the container runtime."""
        host = f"[pod/{self.host}/log] " if self.host else ""
        rank = f"[rank{self.rank}]: " if self.rank is not None else ""
        when = f"{_date(self.when)} " if self.when is not None else ""
        prefix = f"{host}{rank}{when}{self.stream} F "
        level = f"[{self.level}] " if self.level else ""
        for text in self.texts:
            yield f"{prefix}{level}{text}"
            level = ""


def json_in_log(text: str) -> Any:
    """The value of a JSON text in a log; None if it is invalid, or nested too deep."""
    try:
        return parse_json(text, "a record")
    except MalformedJson:
        return None


def records_of(value: Any, depth: int = 0) -> Iterator[LogRecord]:
    """Yields the records in a value of JSON: a record, a list of them, or an answer of a service that holds them."""
    if isinstance(value, list):
        for each in value if depth < _MAX_DEPTH else ():
            yield from records_of(each, depth + 1)
    elif isinstance(value, dict):
        found = record_of(value)
        if found is not None:
            yield found
            return
        pairs = value.get("values")
        if isinstance(pairs, list) and isinstance(value.get("stream"), dict):
            yield from (
                each
                for pair in _forward(pairs, _nanoseconds)
                if (each := _record_of_pair(pair, value["stream"])) is not None
            )
            return
        for each in value.values() if depth < _MAX_DEPTH else ():
            if isinstance(each, list | dict):
                yield from records_of(each, depth + 1)


def record_of(value: Mapping[str, Any], depth: int = 0) -> LogRecord | None:
    """Returns the record that a JSON object is; None if it has no message, or nothing says that it is a log's.

    Args:
        depth: The number of records around it, of which each is a log's.
    """
    found = _fields_of(value)
    message, inner, collected = _message_of(value, depth)
    if inner is None and message is None:
        return None
    when, level = _seconds(found.get("time")), _level(found.get("level"))
    host = _host(found.get("pod")) or _host(found.get("host"))
    rank = _rank(found.get("rank"))
    if inner is not None:
        return LogRecord(
            inner.texts, inner.when if when is None else when, inner.level, rank if inner.rank is None else inner.rank,
            inner.host or host, _stream(found, inner.stream),
        )  # fmt: skip
    assert message is not None
    if not (depth or collected or when is not None or "level" in found or host):
        return None
    texts = message.rstrip("\r\n").split("\n")
    if not collected:
        texts[0] += _further(value, found)
    error = found.get("error")
    if isinstance(error, str) and error.strip():
        texts += error.rstrip("\r\n").split("\n")
    return LogRecord(tuple(texts), when, "" if collected else level, rank, host, _stream(found))


def in_order(records: list[LogRecord]) -> list[LogRecord]:
    """Returns records oldest first, if all have a time: services answer with the newest first. Those of pods are
    merged by time."""
    if any(each.when is None for each in records):
        return records
    found = _forward(records, lambda each: each.when)
    return sorted(found, key=lambda each: each.when or 0.0) if len({each.host for each in found}) > 1 else found


def newest_first(times: Sequence[Any]) -> bool:
    """Whether times begin with the newest: most of their changes are falls."""
    changes = [one > other for one, other in pairwise(times) if one != other]
    return 2 * changes.count(True) > len(changes)


def _forward(items: list[Any], when: Callable[[Any], Any]) -> list[Any]:
    """Reverses items that begin with their newest, so that those of one time stay in order."""
    return items[::-1] if newest_first([when(each) for each in items]) else items


def _nanoseconds(pair: Any) -> str:
    return str(pair[0]) if isinstance(pair, list) and pair else ""


def _record_of_pair(pair: Any, labels: Mapping[str, Any]) -> LogRecord | None:
    """Returns the record of Loki's pair of time and line."""
    if not (isinstance(pair, list) and len(pair) >= 2 and isinstance(pair[1], str)):
        return None
    return record_of({"time": pair[0], "log": pair[1], "labels": labels})


@lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    """Returns the letters of a field's name, in small letters: `@timestamp` and `time_stamp` are the same field."""
    return "".join(each for each in name[:64].lower() if "a" <= each <= "z")


def _fields_of(value: Mapping[str, Any], depth: int = 0, left: list[int] | None = None) -> dict[str, Any]:
    """Returns the fields of a record by purpose; what is nested counts less."""
    left = [_MAX_FIELDS] if left is None else left
    found: dict[str, Any] = {}
    nested: list[Mapping[str, Any]] = []
    for name, each in value.items():
        left[0] -= 1
        if left[0] < 0:
            break
        plain = _plain(name)
        if isinstance(each, dict):
            if plain in _CONTEXT:
                nested.append(each)
            continue
        purpose = _PURPOSES.get(plain)
        if purpose is not None and each is not None and (depth == 0 or purpose in ("pod", "host", "rank")):
            found.setdefault(purpose, each)
        elif depth and plain == "name" and "host" not in found:
            found["host"] = each
    for inner in nested if depth < _MAX_DEPTH else ():
        for purpose, each in _fields_of(inner, depth + 1, left).items():
            found.setdefault(purpose, each)
    return found


def _message_of(value: Mapping[str, Any], depth: int) -> tuple[str | None, LogRecord | None, bool]:
    """Returns the message, or the record that takes its place, and whether only a collector has such a field."""
    named = {_plain(name): each for name, each in value.items()} if len(value) <= _MAX_FIELDS else {}
    for name in (*_COLLECTED, *_WRITTEN):
        each = named.get(name)
        if isinstance(each, str):
            text = each.lstrip()
            inner = json_in_log(text) if text.startswith("{") and depth < _MAX_DEPTH else None
            found = record_of(inner, depth + 1) if isinstance(inner, dict) else None
            return each, found, name in _COLLECTED or isinstance(value.get("labels"), dict)
    for name in _INSIDE if depth < _MAX_DEPTH else ():
        each = named.get(name)
        if isinstance(each, dict):
            found = record_of(each, depth + 1)
            if found is not None:
                return None, found, True
    return None, None, False


def _further(value: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns the other fields that a logger was given, such as `step=10 error="..."`."""
    party = found.get("party")
    texts = [f"level={found.get('level') or 'info'}", f"service={party}"] if isinstance(party, str) and party else []
    for name, each in list(value.items())[:_MAX_FIELDS]:
        plain = _plain(name)
        known = plain in _PURPOSES or plain in _WRITTEN or plain in _UNINTERESTING
        if not known and isinstance(each, str | int | float) and len(str(each)) <= 2000:
            shown = json.dumps(each, ensure_ascii=False) if isinstance(each, str) and not each.isalnum() else each
            texts.append(f"{name}={shown}")
    return "".join(f" {each}" for each in texts)


def _stream(found: Mapping[str, Any], otherwise: str = "stdout") -> str:
    return found["stream"] if found.get("stream") in ("stdout", "stderr") else otherwise


def _level(value: Any) -> str:
    """Returns a level of trouble in capitals, "" for others."""
    return value.upper() if isinstance(value, str) and _LEVEL.fullmatch(value) else ""


def _rank(value: Any) -> int | None:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else None


def _host(value: Any) -> str:
    return value if isinstance(value, str) and _HOST.fullmatch(value) else ""


def _seconds(value: Any) -> float | None:
    """Returns seconds since 1970, from a date or a number of seconds to nanoseconds; None if a job cannot have it."""
    if isinstance(value, str):
        if not re.fullmatch(r"\d{10,19}(?:\.\d{1,9})?", value):
            at = TimestampParser().read(value[:64]) if re.match(r"\d{4}[-/]", value) else None
            return at if at is not None and _EARLIEST_S <= at < _LATEST_S else None
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _EARLIEST_S <= value < _LATEST_S * 1e9:
        return None
    return next((value / unit for unit in _UNITS if _EARLIEST_S <= value / unit < _LATEST_S), None)


def _date(at: float) -> str:
    whole = int(at)
    return f"{_date_of_second(whole)}.{int((at - whole) * 1e6):06d}Z"


@lru_cache(maxsize=64)
def _date_of_second(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
