"""The process that reads dumps: `python -m lockstep.watch.dumps.worker MEMORY_BYTES`.

For each file a line of JSON comes in on standard input: its path, and whether all of its calls are wanted. An answer
goes out on standard output: two lengths (`<II`), a JSON object of the first and numbers of the second. It is a process
of its own because a hostile file may take all memory, all time, or crash the interpreter (a dictionary's key nested a
million deep does): then this one ends and the file is named.
"""

import dataclasses
import gc
import json
import os
import resource
import struct
import sys
from array import array
from typing import Any, BinaryIO

from lockstep.watch.dumps.decode import Decoder
from lockstep.watch.dumps.trace import Group, NotADump, Trace

HEADER = struct.Struct("<II")
COLUMNS = (("digests", "Q"), ("sequence", "q"), ("signature", "Q"), ("created", "q"), ("site", "i"))
SHARE = 4
"""A file may have this part of the memory at most: what is in it is larger when unpacked."""
_CPU_S = 3600


def main() -> None:
    memory = int(sys.argv[1])
    _limit(memory)
    gc.disable()  # thousands of small objects, none in cycles: collecting would take longer than reading
    decoder, told = Decoder(), 0
    send(sys.stdout.buffer, {"ready": os.getpid()}, b"")
    for line in sys.stdin:
        try:
            path, full = json.loads(line)
            trace = decoder.read(_bytes(path, memory // SHARE), full)
            about, blob = pack(trace)
            calls = list(decoder.calls.items())
            about["calls"], told = calls[told:], len(calls)
        except (NotADump, OSError, MemoryError) as error:
            about, blob = {"error": str(error) or "needs too much memory"}, b""
            gc.collect()
        send(sys.stdout.buffer, about, blob)


def pack(trace: Trace) -> tuple[dict[str, Any], bytes]:
    """A trace as JSON and the numbers of its groups behind one another."""
    about = {each.name: getattr(trace, each.name) for each in dataclasses.fields(trace)}
    about["groups"], columns = [], []
    for group in trace.groups:
        fields = {each.name: getattr(group, each.name) for each in dataclasses.fields(group)}
        mine = [fields.pop(name) for name, _ in COLUMNS]
        about["groups"].append(fields | {"lengths": [len(column) for column in mine]})
        columns += mine
    return about, b"".join(column.tobytes() for column in columns)


def unpack(about: dict[str, Any], blob: bytes | memoryview) -> Trace:
    """The inverse of `pack`."""
    groups, at, view = [], 0, memoryview(blob)
    for fields in about["groups"]:
        columns = {}
        for (name, kind), count in zip(COLUMNS, fields.pop("lengths"), strict=True):
            column = columns[name] = array(kind)
            size = count * column.itemsize
            column.frombytes(view[at : at + size])
            at += size
        fields["waits"] = [(what, since) for what, since in fields["waits"]]
        groups.append(Group(**(fields | columns)))
    return Trace(**about | {"groups": groups})


def send(file: BinaryIO, about: dict[str, Any], blob: bytes) -> None:
    text = json.dumps(about).encode()
    file.write(HEADER.pack(len(text), len(blob)))
    file.write(text)
    file.write(blob)
    file.flush()


def _bytes(path: str, most: int) -> bytes:
    """A file's content.

    Raises:
        NotADump: It is larger than `most` bytes.
    """
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib takes as long to import as a dump to read
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise NotADump(f"is larger ({size >> 20} MiB) than what is read ({most >> 20} MiB)")
        return file.read(most)


def _limit(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))


if __name__ == "__main__":
    main()
