"""YAML from outside is read within bounds, or refused with source, line and remedy."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.yaml_text import MAX_YAML_DEPTH, MalformedYaml, compose_yaml, parse_yaml, read_yaml_text


def chain(first: str, link: str) -> str:
    """Twelve values, each of which contains the one before it nine times."""
    lines = [f"a{n}: &a{n} {link.format(', '.join(9 * [f'*a{n - 1}']))}\n" for n in range(1, 12)]
    return f"a0: &a0 {first}\n" + "".join(lines)


LAUGHS = chain("[lol, lol]", "[{}]")
MERGES = chain("{k: v}", "{{<<: [{}]}}")
LOADERS = [
    yaml.SafeLoader,
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    getattr(yaml, "CBaseLoader", yaml.BaseLoader),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="ascii", exclude_categories=["Cc"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abcdef"), inner, max_size=4),
)


@given(VALUES)
def test_what_the_library_reads_is_read_alike(value: object) -> None:
    assert parse_yaml(yaml.safe_dump(value), "x") == value


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: [1,\n", 3, "is not valid YAML"),
        ("[" * 100_000, 1, "nested more than 60 levels deep; make it flatter"),
        ("- " * 100_000, 1, "nested more than 60 levels deep"),
        ("".join(" " * n + "a:\n" for n in range(100)), MAX_YAML_DEPTH + 1, "nested more than 60 levels deep"),
        (LAUGHS, 6, "stands for more than 100,000 values, those behind aliases included; write fewer"),
        (MERGES, 6, "stands for more than 100,000 values"),
        ("a: &a [1, *a]", 1, "an alias stands for a value that contains the alias itself"),
        ("a: &a {b: *a}", 1, "contains the alias itself"),
        ("[1, " * 50 + "&a [1]" + "]" * 50 + "\n", 0, ""),
        ("\x01", 0, "is not valid YAML"),
        ("x" * (5 << 20), 0, "is larger than 4 MiB"),
    ],
    ids=[
        "broken",
        "open",
        "sequences",
        "mappings",
        "laughs",
        "merges",
        "cycle",
        "cycle of keys",
        "deep enough",
        "bytes",
        "size",
    ],
)
def test_anything_else_is_refused_at_once(text: str, line: int, words: str, loader: Any) -> None:
    began = time.process_time()
    if not words:
        assert parse_yaml(text, "x", loader)
        return
    with pytest.raises(MalformedYaml) as caught:
        parse_yaml(text, "some file", loader)
    assert words in str(caught.value) and str(caught.value).startswith("some file")
    assert not line or caught.value.line == line
    assert time.process_time() - began < 5.0


def test_nodes_have_lines_and_the_same_bounds() -> None:
    node = compose_yaml("a: 1\nb: 2\n", "x")
    assert isinstance(node, yaml.MappingNode) and node.value[1][0].start_mark.line == 1
    assert compose_yaml("", "x") is None and parse_yaml("", "x") is None
    with pytest.raises(MalformedYaml):
        compose_yaml(LAUGHS, "x")


def test_of_a_file_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\nb: \xff\n")
    with pytest.raises(MalformedYaml, match="line 2: is not UTF-8"):
        read_yaml_text(file)
    with pytest.raises(MalformedYaml, match="/dev/zero: is larger than 4 MiB"):
        read_yaml_text(Path("/dev/zero"))
