"""The knowledge base and the live diagnosis give one exception the same failure class."""

import re
from typing import get_args

import pytest

from lockstep.doctor.knowledge.knowledge_base import load_knowledge
from lockstep.doctor.knowledge.knowledge_schema import FailureClass
from lockstep.watch.diagnosis import failure_classes
from lockstep.watch.diagnosis.failure_classes import class_of_error

EXAMPLES = [
    (rule.cls, rule.id, example)
    for rule in load_knowledge().rules
    if rule.signature.role == "cause" and rule.cls is not None
    if not (rule.signature.frames or rule.signature.needs)
    for example in rule.signature.examples
    if re.search(r"(?:Error|Exception)\b", example)
]
"""Exceptions that name a class by themselves, without the frames above them or other lines."""


@pytest.mark.parametrize(("cls", "rule", "example"), EXAMPLES)
def test_no_example_of_a_rule_proves_another_class(cls: str, rule: str, example: str) -> None:
    assert class_of_error(example) in ("", cls), rule


def test_examples_are_recognised() -> None:
    assert sum(class_of_error(example) == cls for cls, _, example in EXAMPLES) >= 35


def test_the_table_speaks_the_same_vocabulary() -> None:
    classes = set(get_args(FailureClass))
    assert {name for name, _ in failure_classes._ERROR_CLASSES} <= classes
    assert failure_classes.CLASS_FIXES.keys() <= classes
