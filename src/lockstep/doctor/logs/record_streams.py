"""Turns the files of log collectors and structured loggers into plain lines, which the parser reads like any log.

A line of JSON becomes the lines of its message, with time, rank and pod in the prefixes of launchers; a JSON document,
such as a service's answer, the lines of its records, oldest first. Parts of lines that a container runtime wrote are
joined. What is no record stays as it is.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator

from lockstep.doctor.logs.line_origin import origin_of_line
from lockstep.doctor.logs.log_records import (
    MAX_RECORD_BYTES,
    LogRecord,
    in_order,
    json_in_log,
    newest_first,
    records_of,
)

_SAMPLE_BYTES, _SAMPLE_LINES, _MIN_RECORDS = 64 << 10, 200, 3
_MAX_DOCUMENT_BYTES, _MAX_VALUES = 64 << 20, 4_000_000
"""Of a JSON document, which is held in memory; larger ones stay text."""
_MAX_PREFIX_BYTES = 300
_RUNTIME = re.compile(rb"(?P<head>\d{4}-\d\d-\d\dT\S{8,40} (?:stdout|stderr)) (?P<mark>[FP]) (?P<text>.*)", re.DOTALL)
"""A line of a container runtime: F ends a line, P is a part of one."""
_PART = re.compile(rb"^\d{4}-\d\d-\d\dT\S{8,40} (?:stdout|stderr) P ", re.MULTILINE)
_MESSAGE_NAME = re.compile(rb'"(?:\w*[Mm]essage|\w*[Ll]og|MESSAGE|msg|line|event|values|textPayload|body|_raw)" ?:')
_MAX_JOINED_BYTES = 64 << 10
_BLOCK_LINES = 10_000
_DECODER = json.JSONDecoder()


def plain_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Passes the blocks of a source on, with messages in place of records if the beginning of the source has some."""
    stream = iter(blocks)
    head = next(stream, None)
    if head is None:
        return
    form = _form_of(head)
    if form == "document":
        yield from _of_document(head, stream)
    elif form == "lines":
        yield from _by_line(head, stream)
    else:
        yield head
        yield from stream


def _form_of(head: bytes) -> str:
    """Returns `lines` or `document` if a source has records; "" if it is text."""
    sample = head[:_SAMPLE_BYTES]
    first = sample.lstrip()[:1]
    if first not in b"{[" and b'{"' not in sample and b" P " not in sample:
        return ""
    lines = [each for each in sample.split(b"\n")[:_SAMPLE_LINES] if each.strip()]
    found = [record for each in lines for record in _records(each)]
    if len(found) >= min(_MIN_RECORDS, len(lines)) > 0:
        times = [record.when for record in found if record.when is not None]
        one_answer = len(lines) == 1 and len(found) > 1
        reverse = newest_first(times)
        return "document" if one_answer or (reverse and first == b"{") else "lines"
    if first and first in b"{[" and _MESSAGE_NAME.search(sample):
        return "document"
    return "lines" if _RUNTIME.match(sample) and _PART.search(head) else ""


def _records(line: bytes) -> list[LogRecord]:
    """Returns the records on a line, which may begin with prefixes."""
    at = line.find(b"{", 0, _MAX_PREFIX_BYTES)
    if at < 0 or len(line) > MAX_RECORD_BYTES or not _is_prefix(line[:at]):
        return []
    value = json_in_log(line[at:].decode("utf-8", "replace"))
    return list(records_of(value)) if isinstance(value, dict) else []


def _is_prefix(before: bytes) -> bool:
    text = before.decode("utf-8", "replace")
    return not text.strip() or origin_of_line(text, ())[1] >= len(text.rstrip())


def _by_line(head: bytes, stream: Iterator[bytes]) -> Iterator[bytes]:
    """Replaces the records of a stream line by line."""
    parts: dict[bytes, bytes] = {}
    rest = b""
    for block in itertools.chain((head,), stream):
        end = block.rfind(b"\n") + 1
        if end:
            lines = (rest + block[:end]).split(b"\n")[:-1]
            rest = block[end:]
            for at in range(0, len(lines), _BLOCK_LINES):
                yield b"".join(b"%b\n" % _replaced(each, parts) for each in lines[at : at + _BLOCK_LINES])
        else:
            rest += block
        if len(rest) > MAX_RECORD_BYTES:
            yield rest
            rest = b""
    last = _replaced(rest, parts) if rest else b""
    yield b"\n".join([*([last] if rest else []), *(b"%b F %b" % each for each in parts.items())])


def _replaced(line: bytes, parts: dict[bytes, bytes]) -> bytes:
    """Returns what takes the place of a line, without the final newline.

    Args:
        parts: Of each stream of a container, the line that is not complete yet; updated.
    """
    runtime = _RUNTIME.match(line) if line[:2] == b"20" else None
    if runtime is not None:
        key = runtime["head"].rsplit(b" ", 1)[1]
        began = parts.pop(key, b"")
        joined = began + runtime["text"] if len(began) < _MAX_JOINED_BYTES else began
        if runtime["mark"] == b"P":
            parts[key] = joined
            return b""
        if began:
            line = b"%b F %b" % (runtime["head"], joined)
    found = _records(line)
    if not found:
        return line
    prefix = line[: line.index(b"{")]
    return b"\n".join(prefix + each.encode("utf-8", "replace") for record in found for each in record.lines())


def _of_document(head: bytes, stream: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the lines of the records in a document, or in several, one after another."""
    held, size = [head], len(head)
    for block in stream:
        held.append(block)
        size += len(block)
        if size > _MAX_DOCUMENT_BYTES:
            break
    whole = b"".join(held)
    records = _records_of_documents(whole) if size <= _MAX_DOCUMENT_BYTES else []
    if not records:
        yield whole
        yield from stream
        return
    for at in range(0, len(records), _BLOCK_LINES):
        lines = (line for record in records[at : at + _BLOCK_LINES] for line in record.lines())
        yield "".join(f"{each}\n" for each in lines).encode("utf-8", "replace")


def _records_of_documents(whole: bytes) -> list[LogRecord]:
    """Returns the records of all documents in a text, in order; none if it is not all JSON, or one has no record."""
    if sum(map(whole.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        return []
    text, at = whole.decode("utf-8", "replace"), 0
    found: list[LogRecord] = []
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        records = [*records_of(value)]
        if not records:
            return []
        found += records
    return in_order(found)
