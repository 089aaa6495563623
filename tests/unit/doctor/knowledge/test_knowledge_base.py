"""The knowledge base: its schema, and each rule against its own examples."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.doctor.knowledge.knowledge_base import (
    KNOWLEDGE_FOLDER,
    FailureRule,
    InvalidRule,
    bound_repeats,
    load_knowledge,
)
from lockstep.doctor.knowledge.regex_literals import required_literals
from lockstep.doctor.logs.prefilter import Prefilter

RULES = load_knowledge()
FILTER = Prefilter(RULES.by_literal)


def _examples(positive: bool) -> list[object]:
    return [
        pytest.param(rule, text, id=f"{rule.id}-{at}")
        for rule in RULES.rules
        for at, text in enumerate(rule.signature.examples if positive else rule.signature.non_examples)
    ]


@pytest.mark.parametrize(("rule", "text"), _examples(positive=True))
def test_a_rule_matches_its_examples(rule: FailureRule, text: str) -> None:
    assert rule.match(text), text
    if rule.signature.match == "line":
        found = {each.id for literal in FILTER.texts(text) for each in RULES.by_literal[literal]}
        assert rule.id in found, "the prefilter does not let it through"


@pytest.mark.parametrize(("rule", "text"), _examples(positive=False))
def test_a_rule_matches_none_of_its_counter_examples(rule: FailureRule, text: str) -> None:
    assert not rule.match(text), text


LONG_LINE = 16 << 10
"""Characters of a line that are read."""
SLOWEST_S = 0.5
"""Far more than any rule takes, and far less than one whose time grows with the square of a line's length."""


def _long_lines(rule: FailureRule) -> Iterator[str]:
    """Lines that make a regular expression try many ways to match: repeated characters, and repeated beginnings of the
    rule's own example."""
    example = rule.signature.examples[0][:400] if rule.signature.examples else "Error"
    for text in (" ", "0", "a", "_", ".", "/", "[", example):
        yield text * (LONG_LINE // len(text))
    for end in (len(example) // 3, 2 * len(example) // 3):
        start = example[: end + 1]
        yield from (start + last * (LONG_LINE - len(start)) for last in (" ", "0", start[-1]))


def test_no_rule_takes_long_for_a_long_line() -> None:
    slow = {}
    for rule in RULES.rules:
        for line in _long_lines(rule):
            began = time.process_time()
            rule.match(line)
            if (seconds := time.process_time() - began) > SLOWEST_S:
                slow[rule.id] = f"{seconds:.1f} s for {line[:40]}..."
                break
    assert slow == {}


@pytest.mark.parametrize(
    ("given", "bounded"),
    [
        (r"\w+: a\+ [\w.-]+? [^\]]*x", r"\w{1,200}: a\+ [\w.-]{1,200}? [^\]]{0,200}x"),
        (r"\S*b \\w+ \]+ .*", r"\S{0,200}b \\w+ \]+ .*"),
    ],
)
def test_only_repeated_classes_are_bounded(given: str, bounded: str) -> None:
    assert bound_repeats(given) == bounded


def test_every_class_has_a_file_with_texts_and_a_cause() -> None:
    from typing import get_args

    from lockstep.doctor.knowledge.knowledge_schema import FailureClass

    missing = set(get_args(FailureClass)) - set(RULES.about) - {"unknown"}
    assert not missing


@pytest.mark.parametrize(
    ("text", "file", "why"),
    [
        ("class: nonsense\ntitle: a\nexplanation: b\nsignatures: []", "a.yaml: class", "Input should be"),
        (
            "class: benign\ntitle: a\nexplanation: b\nsignatures: [{id: x, patern: abcd}]",
            "rule 'x': patern",
            "not a known",
        ),
        ("class: benign\ntitle: a\nexplanation: b\nsignatures: [{id: x, pattern: 'ab(c'}]", "rule 'x'", "unterminated"),
        ("class: benign\ntitle: a\nexplanation: b\nsignatures: [{id: x, pattern: 'a.c'}]", "rule 'x'", "no text of 4"),
        ("class: benign\ntitle: a\nexplanation: b\nsignatures: [{id: x, pattern: abcd, needs: [y]}]", "'x'", "no rule"),
        (
            "class: benign\ntitle: a\nexplanation: b\nsignatures: [{id: x, pattern: abcd, culprit: {group: rank}}]",
            "rule 'x'",
            "no group 'rank'",
        ),
        ("signatures: [{id: x, pattern: abcd, role: cause}]", "a.yaml", "needs a class"),
        ("[1, 2]", "a.yaml", "mapping"),
        ("a: [", "a.yaml", "not valid YAML"),
    ],
)
def test_an_invalid_file_is_rejected_with_file_rule_and_key(tmp_path: Path, text: str, file: str, why: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InvalidRule, match=why) as caught:
        load_knowledge(tmp_path)
    assert file in str(caught.value)


def test_an_id_may_be_used_once_in_a_folder_and_replaced_from_another(tmp_path: Path) -> None:
    rule = "signatures: [{id: address-in-use, pattern: other words}]"
    (tmp_path / "a.yaml").write_text(f"class: port_in_use\ntitle: a\nexplanation: b\n{rule}")
    assert load_knowledge(tmp_path).by_id["address-in-use"].match("other words")
    assert RULES.by_id["address-in-use"].match("Address already in use")
    (tmp_path / "b.yaml").write_text(f"class: port_in_use\ntitle: a\nexplanation: b\n{rule}")
    with pytest.raises(InvalidRule, match="is also used in"):
        load_knowledge(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"Bus error", ("bus error",)),
        (r"Root Cause:\n +rank", ("root cause:",)),
        (r"(?:abcd|efgh) \d+", ("abcd ", "efgh ")),
        (r"\b(?:run|job) (?:is )?done\b", ("job done", "job is done", "run done", "run is done")),
        (r"rank \d+ has fallen", (" has fallen",)),
        (r"x*Address already", ("address already",)),
        (r"[Tt]imed out after \d+", ("timed out after ",)),
        (r"(?i)NAME or Service", ("name or service",)),
        (r"ab.{0,5}long words here|other", ("long words here", "other")),
    ],
)
def test_literals_of_a_pattern(pattern: str, expected: tuple[str, ...]) -> None:
    assert required_literals(pattern) == expected


@pytest.mark.parametrize("pattern", [r"a.b", r"\d+", r"(?:abcdef|\w)", r"(?:abcdef)?"])
def test_a_pattern_without_literals_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="no text of 4"):
        required_literals(pattern)


def test_the_package_has_the_knowledge_as_data() -> None:
    assert len(list(KNOWLEDGE_FOLDER.glob("*.yaml"))) >= 36
