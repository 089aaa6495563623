"""Verdicts are published once, again when they change, and withdrawn when they no longer hold."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lockstep.watch.diagnosis.verdict import Culprit, StalledCollective, Verdict, VerdictKind, VerdictLevel
from lockstep.watch.supervisor.verdict_tracker import VerdictChange, VerdictTracker

NOTICE = Verdict(VerdictKind.ABSENT, VerdictLevel.NOTICE, (Culprit(1, "policy", "a", 7),), explanation="since 3 s")


def told(tracker: VerdictTracker, verdicts: list[Verdict], at: float) -> list[tuple[int, VerdictChange, VerdictLevel]]:
    return [(each.number, each.change, each.verdict.level) for each in tracker.update(verdicts, at)]


def test_an_unchanged_verdict_is_published_once() -> None:
    tracker = VerdictTracker()
    assert told(tracker, [NOTICE], 0.0) == [(1, VerdictChange.NEW, VerdictLevel.NOTICE)]
    assert told(tracker, [replace(NOTICE, explanation="since 4 s", confidence=0.5)], 1.0) == []


def test_changes_are_published_under_the_same_number() -> None:
    tracker = VerdictTracker()
    tracker.update([NOTICE], 0.0)
    somewhere = replace(NOTICE, culprits=(replace(NOTICE.culprits[0], where="score() at reward.py:31"),))
    assert told(tracker, [somewhere], 1.0) == [(1, VerdictChange.UPDATED, VerdictLevel.NOTICE)]
    confirmed = replace(somewhere, level=VerdictLevel.CONFIRMED)
    assert told(tracker, [confirmed], 2.0) == [(1, VerdictChange.UPDATED, VerdictLevel.CONFIRMED)]
    assert tracker.standing == [confirmed]


def test_a_confirmed_verdict_stays_confirmed() -> None:
    tracker = VerdictTracker()
    tracker.update([replace(NOTICE, level=VerdictLevel.CONFIRMED)], 0.0)
    assert told(tracker, [NOTICE], 0.5) == []
    assert tracker.standing[0].level is VerdictLevel.CONFIRMED


def test_a_proof_is_not_replaced_by_a_guess_about_the_same_process() -> None:
    """Collecting evidence about an inactive process may make it active for a moment."""
    tracker = VerdictTracker(hold_s=1.5)
    confirmed = replace(NOTICE, level=VerdictLevel.CONFIRMED, confidence=0.78)
    tracker.update([confirmed], 0.0)
    guess = replace(NOTICE, kind=VerdictKind.SLOW, confidence=0.3)
    assert told(tracker, [guess], 0.2) == []
    assert tracker.standing == [confirmed]
    tracker.acted(1)
    assert told(tracker, [guess], 0.4) == []
    assert tracker.standing == [replace(confirmed, level=VerdictLevel.ACT)]
    assert told(tracker, [guess], 1.8) == [], "it still holds"
    assert told(tracker, [], 3.4) == [(1, VerdictChange.WITHDRAWN, VerdictLevel.ACT)]


def test_a_verdict_that_no_longer_holds_is_withdrawn() -> None:
    tracker = VerdictTracker(hold_s=1.5)
    tracker.update([NOTICE], 0.0)
    assert told(tracker, [], 1.0) == []
    assert told(tracker, [NOTICE], 1.4) == []
    assert told(tracker, [], 3.0) == [(1, VerdictChange.WITHDRAWN, VerdictLevel.NOTICE)]
    assert told(tracker, [NOTICE], 4.0) == [(2, VerdictChange.NEW, VerdictLevel.NOTICE)]


def test_a_death_is_published_once() -> None:
    tracker = VerdictTracker(hold_s=1.0)
    dead = replace(NOTICE, kind=VerdictKind.DEAD, level=VerdictLevel.CONFIRMED)
    assert told(tracker, [dead], 0.0) == [(1, VerdictChange.NEW, VerdictLevel.CONFIRMED)]
    assert told(tracker, [], 2.0) == [(1, VerdictChange.WITHDRAWN, VerdictLevel.CONFIRMED)]
    assert told(tracker, [dead], 3.0) == []
    successor = replace(dead, culprits=(Culprit(1, "policy", "a", 8),))
    assert told(tracker, [dead, successor], 4.0) == [(2, VerdictChange.NEW, VerdictLevel.CONFIRMED)]


def test_a_certain_culprit_is_not_replaced_by_two_uncertain_ones() -> None:
    """A released rank has ended, so the later diagnosis has less evidence."""
    tracker = VerdictTracker(hold_s=1.5)
    where = StalledCollective("fsdp", 412, "all_reduce")
    sure = replace(NOTICE, kind=VerdictKind.MISMATCH, level=VerdictLevel.CONFIRMED, collective=where, confidence=0.95)
    doubt = replace(sure, culprits=(*sure.culprits, Culprit(2, "policy", "a", 8)), confidence=0.45)
    assert told(tracker, [sure], 0.0) == [(1, VerdictChange.NEW, VerdictLevel.CONFIRMED)]
    assert told(tracker, [doubt], 1.0) == [] == told(tracker, [doubt], 2.0) == told(tracker, [sure], 3.0)
    elsewhere = replace(doubt, collective=replace(where, seq=500))
    assert told(tracker, [sure, elsewhere], 4.0) == [(2, VerdictChange.NEW, VerdictLevel.CONFIRMED)]


def test_two_stalls_have_two_numbers() -> None:
    other = Verdict(VerdictKind.IN_FLIGHT, VerdictLevel.NOTICE, collective=StalledCollective("fsdp", 4))
    later = replace(other, collective=StalledCollective("fsdp", 5))
    tracker = VerdictTracker()
    assert [each[0] for each in told(tracker, [NOTICE, other], 0.0)] == [1, 2]
    assert [each[0] for each in told(tracker, [NOTICE, later], 0.5)] == [3]


def test_an_action_sets_the_level_from_then_on() -> None:
    tracker = VerdictTracker()
    (first,) = tracker.update([replace(NOTICE, level=VerdictLevel.CONFIRMED)], 0.0)
    tracker.acted(first.number)
    assert tracker.standing[0].level is VerdictLevel.ACT


@given(st.lists(st.sets(st.integers(0, 3)), max_size=30))
def test_every_new_verdict_is_withdrawn_once(diagnoses: list[set[int]]) -> None:
    tracker, open_cases = VerdictTracker(hold_s=1.0), set()
    for at, culprits in enumerate(diagnoses):
        verdicts = [replace(NOTICE, culprits=(Culprit(each, "policy"),)) for each in sorted(culprits)]
        for each in tracker.update(verdicts, float(at)):
            if each.change is VerdictChange.NEW:
                assert each.number not in open_cases
                open_cases.add(each.number)
            elif each.change is VerdictChange.WITHDRAWN:
                open_cases.remove(each.number)
        assert len(open_cases) == len(tracker.standing) >= len(culprits)
