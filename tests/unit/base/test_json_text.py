"""JSON from outside is read within bounds, or refused with source, line and remedy."""

import json
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.base.json_text import MalformedJson, is_deeper, parse_json, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@given(VALUES)
def test_what_python_reads_is_read_alike(value: object) -> None:
    assert parse_json(json.dumps(value), "x") == parse_json(json.dumps(value).encode(), "x") == value


@given(VALUES, st.integers(0, 6))
def test_depth_is_exact(value: object, limit: int) -> None:
    assert is_deeper(value, limit) == (depth(value) > limit)
    if depth(value) > limit:
        with pytest.raises(MalformedJson, match=f"more than {limit} levels"):
            parse_json(json.dumps(value), "x", max_depth=limit)
    else:
        parse_json(json.dumps(value), "x", max_depth=limit)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"a": 1,\n "b": }', 2, "is not JSON: Expecting value at column 7"),
        (b'{"a": 1,\n "b": "\xff"}', 2, "is not UTF-8 text"),
        ("[" * 100_000, 0, "nested more than 100 levels deep; make it flatter"),
        ("[" * 900 + "]" * 900, 0, "nested more than 100 levels deep"),
        ('{"a":' * 200 + "1" + "}" * 200, 0, "nested more than 100 levels deep"),
        ("1" * 10_000, 0, "is not JSON that can be used"),
        (" " * (65 << 20), 0, "68,157,440 bytes of JSON, and the limit is 67,108,864"),
    ],
    ids=["broken", "bytes", "open", "lists", "objects", "number", "size"],
)
def test_anything_else_is_refused(text: str | bytes, line: int, words: str) -> None:
    with pytest.raises(MalformedJson) as caught:
        parse_json(text, "some file")
    assert caught.value.line == line and words in str(caught.value) and str(caught.value).startswith("some file")


def test_brackets_in_strings_do_not_count() -> None:
    assert parse_json(json.dumps(["[{" * 500]), "x") == ["[{" * 500]


def test_of_a_file_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(tmp_path / "a.json") == [1]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MalformedJson, match="/dev/zero: is larger than 1,000 bytes"):
        read_json(Path("/dev/zero"), max_bytes=1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
