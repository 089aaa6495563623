"""The failure class whose texts resemble a line, and the tier of a rule."""

import time
from pathlib import Path

import pytest

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.doctor.knowledge.knowledge_base import load_knowledge
from lockstep.doctor.knowledge.lexical_similarity import DescribedFailure, LexicalIndex, words_of
from tests.unit.doctor.job_logs import raised, steps, write

_INDEX = LexicalIndex(
    [
        DescribedFailure("port_in_use", "The server cannot bind port 4711: address already taken by another process"),
        DescribedFailure("port_in_use", "bind: address already taken"),
        DescribedFailure("storage_fault", "write failed: the disk of the server is full"),
        DescribedFailure("benign", "bind failed, next port tried"),
    ]
)


def test_words_are_in_lower_case_without_paths_and_numbers() -> None:
    assert words_of("OSError at /data/run/x.bin: writeBlock 17 failed")[:5] == ["os", "error", "at", "write", "block"]
    assert "block #" in words_of("writeBlock 17 failed")


def test_the_class_with_similar_texts_comes_first() -> None:
    found = _INDEX.similar_classes("worker 3: bind to port 80 impossible, address already taken")
    assert found[0].cls == "port_in_use" and found[0].text == "bind: address already taken"
    assert found[0].similarity > 2 * sum(each.similarity for each in found[1:])
    assert [each.cls for each in _INDEX.similar_classes("zebra quagga")] == []


def test_a_long_line_takes_no_time() -> None:
    began = time.process_time()
    for line in ("x" * 16_000, "a/" * 8_000, "ab. " * 4_000):
        _INDEX.similar_classes(line)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("rule", "tier"),
    [
        ("no-route-to-host", "generic"),
        ("resource-unavailable", "generic"),
        ("ray-port-used", "exact"),
        ("fact-world", "structure"),
    ],
)
def test_the_tier_of_a_rule_follows_from_its_patterns(rule: str, tier: str) -> None:
    assert load_knowledge().by_id[rule].tier == tier


def test_a_wording_that_no_rule_knows_is_compared_with_the_examples(tmp_path: Path) -> None:
    last = "StorageFailure: filesystem refuses blocks, no space left on volume, disk quota exceeded"
    lines = [line for line in raised(1, last) if "Failure" not in line] + [f"[rank1]: app.{last}"]
    verdict = explain([write(tmp_path / "new", job=[*steps(1, 9), *lines])]).verdict
    assert verdict.cause == "storage_fault" and [each.rank for each in verdict.culprits] == [1]
    verdict = explain([write(tmp_path / "known", job=[*steps(1, 9), *raised(1, "KeyError: 'quota'")])]).verdict
    assert verdict.cause == "rank_exception_masked"
