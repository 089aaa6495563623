"""Changes of the evidence that must not change a verdict, and changes that may only lower its confidence."""

import random

import pytest
from evidence_changes import permuted, renamed, shifted, with_healthy, without_some
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from job_simulator import FAULTS, Case, simulate

from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.verdict import Verdict

SURE = 0.8


@st.composite
def cases(draw: st.DrawFn) -> Case:
    case = simulate(draw(st.sampled_from(FAULTS)), draw(st.integers(0, 400)), draw(st.sampled_from([6.0, 100.0])))
    assume(case is not None)
    assert case is not None
    return case


def simulated(fault: str, seed: int) -> Case:
    case = simulate(fault, seed, 6.0)
    assert case is not None
    return case


def essence(verdicts: list[Verdict]) -> list[tuple[object, ...]]:
    """The verdicts without names and order, for comparison."""
    return sorted(
        (
            str(each.kind), str(each.level), round(each.confidence, 6), each.cause,
            tuple(sorted((c.rank is None, c.rank or 0) for c in each.culprits)),
        )
        for each in verdicts
    )  # fmt: skip


def accused(verdicts: list[Verdict]) -> set[tuple[str, str, float]]:
    return {(c.name, str(v.kind), v.confidence) for v in verdicts for c in v.culprits}


def told(evidence: Evidence) -> list[tuple[object, ...]]:
    return essence(diagnose(evidence))


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 2**32))
@example(simulated("extra", 18), 1)
@example(simulated("extra", 237), 1)
@example(simulated("skip", 97), 0)
def test_order_does_not_matter(case: Case, seed: int) -> None:
    assert told(permuted(case.evidence, random.Random(seed))) == told(case.evidence)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from([-50.0, 1000.0, 1e6]))
def test_the_clock_does_not_matter(case: Case, by: float) -> None:
    assert told(shifted(case.evidence, by)) == told(case.evidence)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_names_do_not_matter(case: Case) -> None:
    assert told(renamed(case.evidence)) == told(case.evidence)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(2, 9))
def test_healthy_others_do_not_matter(case: Case, count: int) -> None:
    assert told(with_healthy(case.evidence, count)) == told(case.evidence)


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_less_evidence_makes_no_innocent_guilty(case: Case, seed: int) -> None:
    verdicts = diagnose(without_some(case.evidence, random.Random(seed)))
    guilty = {name for name, _, sure in accused(verdicts) if sure >= SURE}
    assert guilty <= case.truth.culprits, [each.explanation for each in verdicts]


@settings(max_examples=40, deadline=None)
@given(cases())
def test_verdicts_are_well_formed(case: Case) -> None:
    for each in diagnose(case.evidence):
        assert 0.0 < each.confidence <= 0.95
        assert each.explanation.endswith(".")
        assert "{" not in each.explanation
        assert each.json()["kind"] == str(each.kind)


@pytest.mark.slow
def test_less_evidence_in_many_cases() -> None:
    wrong = []
    for number in range(4000):
        rng = random.Random(number)
        case = simulate(rng.choice(FAULTS), number, rng.choice([6.0, 100.0]))
        if case is None:
            continue
        verdicts = diagnose(without_some(case.evidence, rng))
        if {name for name, _, sure in accused(verdicts) if sure >= SURE} - case.truth.culprits:
            wrong.append((number, case.fault, [each.explanation for each in verdicts]))
    assert not wrong, (len(wrong), wrong[:5])
