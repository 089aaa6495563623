"""The process that reads dumps: `python -m lockstep.watch.dumps.reader_process MEMORY_BYTES`.

For each file the parent writes a line of JSON to standard input: the path, and whether all calls are needed. The answer
on standard output consists of two lengths (`<II`), a JSON object of the first length and binary columns of the second.

A hostile file may need too much memory or time, or crash the interpreter, as a dictionary key nested a million levels
deep does. That ends only this process, and the parent reports the file as unreadable.
"""

import dataclasses
import gc
import json
import os
import resource
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, BinaryIO

from lockstep.watch.dumps.decode import DumpDecoder
from lockstep.watch.dumps.dump_parser import NotADump
from lockstep.watch.dumps.traces import CommunicatorTrace, PendingEntry, RankTrace

ANSWER_HEADER = struct.Struct("<II")
TRACE_COLUMNS = (("digests", "Q"), ("sequence", "q"), ("signature", "Q"), ("created", "q"), ("site", "i"))
FILE_MEMORY_SHARE = 4
"""A file may be as large as the memory divided by this number; its content needs more when unpacked."""
_CPU_S = 3600


def main() -> None:
    memory = int(sys.argv[1])
    _limit_resources(memory)
    gc.disable()  # decoding makes many objects without cycles; collecting garbage would take longer than decoding
    decoder, sent = DumpDecoder(), 0
    send_answer(sys.stdout.buffer, {"ready": os.getpid()}, b"")
    for line in sys.stdin:
        try:
            path, full = json.loads(line)
            trace = decoder.read(_read_bounded(path, memory // FILE_MEMORY_SHARE), full)
            content, blob = pack_trace(trace)
            calls = list(decoder.calls.items())
            content["calls"], sent = calls[sent:], len(calls)
        except (NotADump, OSError, MemoryError) as error:
            content, blob = {"error": str(error) or "needs too much memory"}, b""
            gc.collect()
        send_answer(sys.stdout.buffer, content, blob)


def pack_trace(trace: RankTrace) -> tuple[dict[str, Any], bytes]:
    """Packs a trace into a JSON object and the concatenated columns of its communicators."""
    content = {each.name: getattr(trace, each.name) for each in dataclasses.fields(trace)}
    content["groups"], columns = [], []
    for group in trace.groups:
        fields = {each.name: getattr(group, each.name) for each in dataclasses.fields(group)}
        group_columns = [fields.pop(name) for name, _ in TRACE_COLUMNS]
        fields["transfers"] = list(map(dataclasses.astuple, group.transfers))
        fields["pending"] = group.pending and dataclasses.astuple(group.pending)
        content["groups"].append(fields | {"lengths": [len(column) for column in group_columns]})
        columns += group_columns
    return content, b"".join(column.tobytes() for column in columns)


def unpack_trace(content: dict[str, Any], blob: bytes | memoryview) -> RankTrace:
    """The inverse of `pack_trace`."""
    groups, at, view = [], 0, memoryview(blob)
    for fields in content["groups"]:
        columns = {}
        for (name, kind), count in zip(TRACE_COLUMNS, fields.pop("lengths"), strict=True):
            column = columns[name] = array(kind)
            size = count * column.itemsize
            column.frombytes(view[at : at + size])
            at += size
        fields["transfers"] = [_unpack_pending(each) for each in fields["transfers"]]
        fields["pending"] = _unpack_pending(fields["pending"]) if fields["pending"] else None
        groups.append(CommunicatorTrace(**(fields | columns)))
    return RankTrace(**content | {"groups": groups})


def _unpack_pending(values: Sequence[Any]) -> PendingEntry:
    order, since, started, parts = values
    return PendingEntry(order, since, started, tuple(parts))


def send_answer(file: BinaryIO, content: dict[str, Any], blob: bytes) -> None:
    """Writes one answer."""
    text = json.dumps(content).encode()
    file.write(ANSWER_HEADER.pack(len(text), len(blob)))
    file.write(text)
    file.write(blob)
    file.flush()


def _read_bounded(path: str, most: int) -> bytes:
    """Reads a file.

    Raises:
        NotADump: the file is larger than `most` bytes.
    """
    with open(path, "rb") as file:  # noqa: PTH123 - importing pathlib takes as long as reading a dump
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise NotADump(f"is too large ({size >> 20} MiB; at most {most >> 20} MiB are read)")
        return file.read(most)


def _limit_resources(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))


if __name__ == "__main__":
    main()
