"""Dumps are untrusted: no dump executes code, and a hostile one ends only the process that reads it."""

import contextlib
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.dump_files import Comm, dump, steps
from lockstep.watch.dumps.decode import DumpDecoder
from lockstep.watch.dumps.dump_files import UnreadableDump, find_dump_files
from lockstep.watch.dumps.dump_parser import DAMAGED_INPUT_ERRORS, NotADump, loads_restricted
from lockstep.watch.dumps.explain_dumps import read_traces

SMALL = steps(2, [Comm("0", (0, 1), "default_pg")], 6).play()
GOOD = pickle.dumps(dump(SMALL, 0), 2)
CALLED: list[str] = []


def touch(word: str) -> str:
    CALLED.append(word)
    return word


class Evil:
    def __reduce__(self) -> Any:
        return touch, ("called",)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(plain, st.integers(0, 5))
def test_plain_data_is_read_in_every_pickle_protocol(value: Any, protocol: int) -> None:
    made = pickle.dumps(value, protocol)
    if protocol < 3 and (b"\nbytes\n" in made or b"_codecs" in made):
        return  # bytes need a class or a function there
    assert loads_restricted(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [Evil(), {"entries": [Evil()]}, touch, Path("x"), 1j, os.system],
    ids=["object", "nested", "function", "path", "complex", "builtin"],
)
def test_no_global_is_resolved_and_no_callable_is_called(value: Any, protocol: int) -> None:
    CALLED.clear()
    with pytest.raises(pickle.UnpicklingError, match="which no dump of the flight recorder does"):
        loads_restricted(pickle.dumps(value, protocol))
    assert CALLED == []


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cos\nsystem\n.", b"(S'x'\nios\nsystem\n.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"\x82\x01.", b"P1\n.",
        b"K\x01Q.", b"]\x81.", b"]}b.", b"(](R.", b"\x97.", b"]\x98.",
    ],
    ids=repr,
)  # fmt: skip
def test_every_opcode_that_needs_more_than_plain_data_is_refused(opcodes: bytes) -> None:
    with pytest.raises(DAMAGED_INPUT_ERRORS):
        loads_restricted(opcodes)


@given(st.data())
def test_a_damaged_dump_is_decoded_or_refused(data: st.DataObject) -> None:
    """For cut, changed and repeated bytes the decoder returns a trace or raises `NotADump`."""
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(0, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    if any(content[at] in b"rp" and content[at + 4] > 0 for at in range(2, len(content) - 4)):
        return  # may ask for gigabytes: below, in a process of its own
    with contextlib.suppress(NotADump):
        DumpDecoder().read(bytes(content))


@given(plain)
def test_other_content_is_decoded_or_refused(value: Any) -> None:
    try:
        DumpDecoder().read(
            pickle.dumps({"entries": value, "pg_config": value, "pg_status": value, "version": value}, 4)
        )
    except NotADump as error:
        assert str(error)


def deep_key() -> bytes:
    """A dictionary whose key is nested a million deep: hashing it overflows the stack of the interpreter."""
    return b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s."


def exploding() -> bytes:
    """Fifty lists, each twice in the next: 2^50 leaves in 300 bytes."""
    lists = b"]q\xc8" + b"".join(b"](h%ch%ceq%c" % (200 + n, 200 + n, 201 + n) for n in range(50))
    entry = pickle.dumps(dump(SMALL, 0)["entries"][0], 2)[2:-1]
    sizes = b"X\x0b\x00\x00\x00input_sizesh\xfas"
    return b"\x80\x02" + lists + b"}(X\x07\x00\x00\x00entries](" + entry + sizes + b"eu."


BOMBS = {
    "memo": b"\x80\x02]r" + struct.pack("<I", 2**32 - 2) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "deep key": deep_key(),
    "deep list": b"\x80\x02" + b"]" * 2_000_000 + b"a" * 1_999_999 + b".",
    "deep json": b'{"pg_config":0,"entries":' + b"[" * 1_000_000,
    "exploding": exploding(),
    "long number": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",
}


def test_hostile_dumps_end_only_their_reader_and_are_reported(tmp_path: Path) -> None:
    for number, bomb in enumerate(BOMBS.values()):
        (tmp_path / f"nccl_trace_rank_{number}").write_bytes(bomb)
    good = range(len(BOMBS), len(BOMBS) + 4)
    for number in good:
        (tmp_path / f"nccl_trace_rank_{number}").write_bytes(GOOD)
    found = find_dump_files(tmp_path)
    assert len(found) == len(BOMBS) + 4
    began = time.monotonic()
    results = {file.rank: result for file, result in read_traces(found, {}, readers=2, memory=256 << 20, file_s=6.0)}
    assert time.monotonic() - began < 60
    assert [rank for rank, result in sorted(results.items()) if not isinstance(result, UnreadableDump)] == list(good)
    for result in (results[rank] for rank in range(len(BOMBS))):
        assert isinstance(result, UnreadableDump) and result.why


def test_a_reader_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """Eight thousand keys with equal hashes take seconds; here they may take less."""
    keys = [n * (2**61 - 1) for n in range(1, 12_001)]
    slow = b"\x80\x02X\x09\x00\x00\x00pg_config0" + pickle.dumps(dict.fromkeys(keys), 2)[2:]
    (tmp_path / "trace_0").write_bytes(slow)
    (tmp_path / "trace_1").write_bytes(GOOD)
    files = sorted(find_dump_files(tmp_path), key=lambda file: file.rank or 0)
    results = {file.rank: result for file, result in read_traces(files, {}, readers=1, file_s=0.05)}
    assert isinstance(results[0], UnreadableDump) and "timed out" in results[0].why
    assert not isinstance(results[1], UnreadableDump)


def test_a_file_larger_than_a_share_of_the_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "trace_0"
    with path.open("wb") as file:
        file.write(b"\x80\x02")
        file.truncate(200 << 20)
    ((_, result),) = read_traces(find_dump_files(tmp_path), {}, memory=512 << 20)
    assert isinstance(result, UnreadableDump) and "is too large (200 MiB; at most 128 MiB are read)" in result.why
