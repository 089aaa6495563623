"""Completions against JSON Schemas."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_samples import batch, prompt

from lockstep.config.reward import JsonSchemaReward
from lockstep.rewards.json_schema import JsonSchemaVerifier, read_schema
from lockstep.rewards.reward_terms import build_term, check_terms
from lockstep.rewards.scoring_messages import TermError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "mail": {"type": "string", "format": "date"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def score(completion: str, schema: Any = PERSON, **options: Any) -> float:
    term = JsonSchemaReward(definition=schema, **options)
    (value,) = build_term(term, "x").score(batch([prompt()], [[completion]]), lambda _: None).values
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"name": "a", "age": 3}', 1.0),
        (' \n{"age": 3, "name": "a", "mail": "2024-02-29"}\n', 1.0),
        ('{"name": "a", "age": 3, "mail": "2023-02-29"}', 0.0),
        ('{"name": "a", "age": -1}', 0.0),
        ('{"name": "a"}', 0.0),
        ('{"name": "a", "age": 3, "x": 1}', 0.0),
        ('{"name": "a", "age": NaN}', 0.0),
        ('Here: {"name": "a", "age": 3}', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ("[" * 5_000 + "]" * 5_000, 0.0),
        ("1" * 10_000, 0.0),
    ],
)
def test_whole_completions(completion: str, value: float) -> None:
    assert score(completion) == value


def test_fenced_blocks() -> None:
    good, bad = '{"name": "a", "age": 3}', "{}"
    assert score(f"Sure:\n```json\n{good}\n```\nDone.", extract="fenced") == 1.0
    assert score(f"```\n{bad}\n```\n  ```json\n  {good}\n  ```", extract="fenced") == 1.0
    assert score(f"```json\n{good}\n```\n```json\n{bad}\n```", extract="fenced") == 0.0, "the last block is scored"
    assert score(good, extract="fenced") == 0.0
    assert score(f"```json\n{good}", extract="fenced") == 0.0, "not closed"


def test_partial_credit() -> None:
    assert score('{"name": "a", "age": 3}', partial=0.3) == 1.0
    assert score('{"name": "a"}', partial=0.3) == pytest.approx(0.1)
    assert score('{"name": "a", "age": 3, "x": 1}', partial=0.3) == pytest.approx(0.2)
    assert score("{}", partial=0.3) == score("[1]", partial=0.3) == score("no", partial=0.3) == 0.0
    assert score('[1, "a", 2, 3]', {"items": {"type": "integer"}}, partial=1.0) == 0.75


def test_references_stay_within_the_schema(tmp_path: Path) -> None:
    schema = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    assert score('{"a": 1}', schema) == 1.0
    assert score('{"a": "x"}', schema, partial=1.0) == 0.0
    for reference in ("#/$defs/none", "http://elsewhere.invalid/schema.json", "other.json"):
        with pytest.raises(TermError, match="cannot be resolved"):
            check_terms([JsonSchemaReward(definition={"$ref": reference})], tmp_path)
    recursive = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert score('{"next": {"next": {}}}', recursive) == 1.0 and score('{"next": {"nxt": {}}}', recursive) == 0.0


def test_the_schema_selects_the_draft() -> None:
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}
    assert score("3", old) == 0.0 and score("4", old) == 1.0


@pytest.mark.parametrize(
    ("schema", "words"),
    [({"type": "strin"}, "type: 'strin'"), ({"properties": {"a": {"minimum": "x"}}}, r"properties\.a\.minimum")],
)
def test_an_invalid_schema_is_refused(tmp_path: Path, schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"not a valid JSON Schema: {words}"):
        JsonSchemaReward(definition=schema)
    (tmp_path / "s.json").write_text(json.dumps(schema))
    with pytest.raises(TermError, match=f"s.json: not a valid JSON Schema: {words}"):
        check_terms([JsonSchemaReward(file="s.json")], tmp_path)


def test_schemas_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(PERSON))
    term = JsonSchemaReward(file="s.json")
    check_terms([term], tmp_path)
    assert read_schema(term, tmp_path) == PERSON
    (tmp_path / "s.json").write_text("{")
    for file, words in (("s.json", "Expecting"), ("none.json", "cannot be read")):
        with pytest.raises(TermError, match=words):
            check_terms([JsonSchemaReward(file=file)], tmp_path)
    with pytest.raises(ValueError, match="either as definition or as file"):
        JsonSchemaReward()
    with pytest.raises(ValueError, match="either as definition or as file"):
        JsonSchemaReward(definition={}, file="s.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_a_schema_that_allows_everything_accepts_exactly_json(value: Any) -> None:
    anything = JsonSchemaVerifier({}, "whole", 0.0)
    assert anything.score(json.dumps(value)) == 1.0
    assert anything.score(json.dumps(value) + "}") == 0.0
