"""Digests of calls: equal for equal calls, whoever makes them in which order and pauses when, and for no others."""

import random

from hypothesis import given
from hypothesis import strategies as st

from lockstep.watch.agent.call_windows import KEPT_WINDOWS, WINDOW, CallDigest, CallWindows, first_difference
from lockstep.watch.beacon.call_follower import FollowedCall

SIGNATURES = st.integers(0, 2**64 - 1)


def made(signatures: list[int], lead: int = 0) -> list[FollowedCall]:
    return [FollowedCall(n, n + lead, n, each) for n, each in enumerate(signatures, 1)]


def digests(calls: list[FollowedCall], steps: list[int]) -> list[CallDigest]:
    """Those of a host that takes them after so many calls each, and at last when it pauses."""
    windows, found, at = CallWindows(), list[CallDigest](), 0
    for step in [*steps, len(calls)]:
        for call in calls[at : at + step]:
            windows.add(call)
        at = min(len(calls), at + step)
        found += windows.take()
    return [*found, *windows.take()]


STEPS = st.lists(st.integers(0, 70), max_size=12)


@given(signatures=st.lists(SIGNATURES, min_size=1, max_size=300), steps=STEPS)
def test_every_call_is_covered_once_the_host_pauses(signatures: list[int], steps: list[int]) -> None:
    found = digests(made(signatures), steps)
    ends = {each.last for each in found}
    assert {*range(WINDOW, len(signatures) + 1, WINDOW), len(signatures)} <= ends
    assert len(ends) == len(found), "each digest is reported once"


@given(
    signatures=st.lists(SIGNATURES, min_size=1, max_size=300), steps=st.tuples(STEPS, STEPS), seed=st.integers(0, 99),
)  # fmt: skip
def test_equal_calls_have_equal_digests(signatures: list[int], steps: tuple[list[int], list[int]], seed: int) -> None:
    calls = made(signatures)
    shuffled = calls.copy()  # members of a host are at different calls, a few of them apart
    for start in range(0, len(shuffled), WINDOW):
        part = shuffled[start : start + WINDOW]
        random.Random(seed).shuffle(part)
        shuffled[start : start + WINDOW] = part
    ours, theirs = (dict(digests(each, step)) for each, step in zip((calls, shuffled), steps, strict=True))
    assert all(ours[last] == theirs[last] for last in ours.keys() & theirs.keys())
    assert first_difference(calls, shuffled) is None


@given(
    signatures=st.lists(SIGNATURES, min_size=1, max_size=300), wrong=st.integers(0, 299), other=SIGNATURES,
    steps=st.tuples(STEPS, STEPS),
)  # fmt: skip
def test_a_single_different_call_is_found(
    signatures: list[int], wrong: int, other: int, steps: tuple[list[int], list[int]]
) -> None:
    wrong %= len(signatures)
    differing = [*signatures[:wrong], other, *signatures[wrong + 1 :]]
    ours, theirs = (dict(digests(made(each), step)) for each, step in zip((signatures, differing), steps, strict=True))
    found = [CallDigest(last, ours[last]) for last in ours.keys() & theirs.keys() if ours[last] != theirs[last]]
    assert bool(found) == (other != signatures[wrong])
    assert all(each.first <= wrong + 1 <= each.last for each in found)
    for each in found:
        mine, other_hosts = (made(some)[each.first - 1 : each.last] for some in (signatures, differing))
        assert first_difference(mine, other_hosts) == wrong + 1


def test_calls_of_different_numbers_prove_no_difference() -> None:
    assert first_difference(made([1, 2, 3]), made([7, 8, 9], lead=1)) is None
    assert first_difference(made([1, 2, 3]), []) is None


def test_a_window_with_a_missing_call_has_no_digest() -> None:
    windows, calls = CallWindows(), made(list(range(1000)))
    for call in calls:
        if call.issued != 40:
            windows.add(call)
    windows.take()
    assert [each.last for each in windows.take()] == [1000]
    windows.add(calls[39])  # a member that is behind has made it
    assert [each.last for each in windows.take()] == [2 * WINDOW]


def test_few_incomplete_windows_are_kept() -> None:
    windows = CallWindows()
    for call in made(list(range(100 * WINDOW))):
        if call.issued % WINDOW:
            windows.add(call)
    assert len(windows._windows) <= KEPT_WINDOWS and not windows.take()
