"""Verdicts about jobs with known causes, without the signatures that only one job fires; and how that is measured."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.case_corpus import OWN_CASES, SET_ASIDE, read_corpus
from benchmarks.diagnosis import (
    ReadCase,
    answer,
    by_case,
    by_family,
    calibration_error,
    calibration_lines,
    function_effects,
    left_out_answers,
    own_rules,
    read_cases,
    share,
    wilson_interval,
)
from lockstep.doctor.judge.log_diagnosis import judge_job, read_job
from lockstep.doctor.knowledge.knowledge_base import KnowledgeBase, load_knowledge

FLOORS: dict[tuple[str, Callable[[ReadCase], object]], tuple[int, int]] = {
    ("development", by_case): (17, 8),
    ("development", by_family): (15, 6),
    ("held_out", by_case): (17, 9),
    ("held_out", by_family): (15, 7),
    ("ran", by_case): (214, 54),
    ("ran", by_family): (198, 49),
    ("set_aside", by_case): (58, 15),
    ("set_aside", by_family): (56, 15),
    ("second_set_aside", by_case): (37, 5),
    ("second_set_aside", by_family): (33, 5),
    ("third_set_aside", by_case): (81, 23),
    ("third_set_aside", by_family): (69, 23),
    ("fourth_set_aside", by_case): (92, 39),
    ("fourth_set_aside", by_family): (85, 36),
    ("fifth_set_aside", by_case): (128, 62),
    ("fifth_set_aside", by_family): (124, 58),
    ("sixth_set_aside", by_case): (101, 49),
    ("sixth_set_aside", by_family): (97, 42),
    ("seventh_set_aside", by_case): (88, 29),
    ("seventh_set_aside", by_family): (79, 24),
    ("threads_communication", by_case): (51, 28),
    ("threads_communication", by_family): (34, 17),
    ("eighth_set_aside", by_case): (89, 31),
    ("eighth_set_aside", by_family): (86, 31),
    ("threads_failures", by_case): (46, 6),
    ("threads_failures", by_family): (43, 6),
}
"""Right classes and culprits of a corpus, with the signatures of each case or family left out. They may only rise."""


@pytest.fixture(scope="module")
def rules() -> KnowledgeBase:
    return load_knowledge()


@pytest.fixture(scope="module")
def cases(rules: KnowledgeBase) -> list[ReadCase]:
    return read_cases([OWN_CASES / "development"], rules)


@pytest.mark.parametrize(
    ("corpus", "group"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each[0] in ("ran", *SET_ASIDE) else []) for each in FLOORS],
)
def test_verdicts_do_not_rest_on_signatures_of_one_case(
    corpus: str, group: Callable[[ReadCase], object], rules: KnowledgeBase
) -> None:
    answers = left_out_answers(read_cases([OWN_CASES / corpus], rules), rules, group)
    classes, _, culprits, _ = share(answers)
    wrong = [each.case.name for each in answers if not each.class_right or each.culprits_right is False]
    assert (classes, culprits) == FLOORS[corpus, group], f"a floor to raise, or a fall: wrong are {wrong}"


def test_a_share_has_the_interval_of_wilson() -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263 and 0 of 20, by the score method."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_a_left_out_signature_is_one_that_does_not_exist(cases: list[ReadCase], rules: KnowledgeBase) -> None:
    own = own_rules(cases, by_case)
    for read in cases:
        gone = own[by_case(read)]
        fewer = replace(rules, rules=tuple(each for each in rules.rules if each.id not in gone))
        real = judge_job(read_job([str(read.case.folder)], fewer), fewer).verdict
        found = answer(read, rules, gone).verdict
        assert (found.cause, found.culprits) == (real.cause, real.culprits), read.case.name


def test_the_calibration_error_is_the_mean_gap_between_confidence_and_success(
    cases: list[ReadCase], rules: KnowledgeBase
) -> None:
    assert calibration_error(np.array([0.95, 0.95, 0.35, 1.0]), np.array([1.0, 0.0, 1.0, 1.0])) == pytest.approx(
        (abs(2.9 - 2) + abs(0.35 - 1)) / 4
    )
    answers = left_out_answers(cases, rules, by_case)
    assert calibration_lines(answers) == calibration_lines(answers)


@pytest.mark.slow
def test_a_function_that_decides_cases_has_an_effect(cases: list[ReadCase], rules: KnowledgeBase) -> None:
    plain = [answer(read, rules) for read in cases]
    effects = {each.name: each for each in function_effects(cases, rules, plain, "factors.ended_well")}
    assert effects["factors.ended_well: none"].classes_gained < 0
    assert [answer(read, rules).said for read in cases] == [each.said for each in plain]


def test_a_folder_without_causes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no corpus of cases"):
        read_corpus(tmp_path)
