"""Verifiers against cases worked out by hand, and their time limits against hostile completions."""

import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.rewards import verifiers
from lockstep.rewards.verifiers import UnreadableAnswer, exact_match, math_equal, overlong_penalty, regex_match


@pytest.mark.parametrize(
    ("completion", "answer", "options", "expected"),
    [
        (" 42\n", "42", {}, 1.0),
        ("42", 42, {}, 1.0),
        ("42.", "42", {}, 0.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("<answer>1</answer> no, <answer> 2 </answer>", "2", {"extract": r"<answer>(.*?)</answer>"}, 1.0),
        ("<answer>2</answer> no, <answer>1</answer>", "2", {"extract": r"<answer>(.*?)</answer>"}, 0.0),
        ("first 7 then 8", "8", {"extract": r"\d+"}, 1.0),
        ("no digits", "8", {"extract": r"\d+"}, 0.0),
        ("no digits", "None", {"extract": r"(\d+)"}, 0.0),
        ("b", "None", {"extract": r"(a)|b"}, 0.0),
        ("", "", {}, 1.0),
    ],
)
def test_exact_match(completion, answer, options, expected):
    assert exact_match(completion, answer, **options) == expected


def test_regex_modes():
    assert regex_match("<a>x</a>", r"<a>.*</a>") == 1.0
    assert regex_match("well <a>x</a>", r"<a>.*</a>") == 0.0
    assert regex_match("well <a>x</a>", r"<a>.*</a>", "search") == 1.0
    assert regex_match("", r"x", "search") == 0.0


def test_overlong_penalty_follows_dapo():
    # L_max 20480, L_cache 4096, the numbers of the paper (section 3.4)
    assert overlong_penalty(16384, 16384, 20480) == 0.0
    assert overlong_penalty(16384 + 1024, 16384, 20480) == -0.25
    assert overlong_penalty(20480, 16384, 20480) == -1.0
    assert overlong_penalty(20481, 16384, 20480) == -1.0
    assert overlong_penalty(0, 16384, 20480) == 0.0


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 3000))
def test_overlong_penalty_falls_steadily(soft, span, length):
    here, longer = overlong_penalty(length, soft, soft + span), overlong_penalty(length + 1, soft, soft + span)
    assert -1.0 <= longer <= here <= 0.0
    assert here - longer <= 1.0 / span + 1e-12


@pytest.mark.parametrize(
    ("completion", "answer", "tolerance", "expected"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", None, 1.0),
        ("so it is \\boxed{\\frac{1}{2}}", "\\frac{2}{4}", None, 1.0),
        ("the answer is 2", "\\frac{1}{2}", None, 0.0),
        ("1 and then 42.", 42, None, 1.0),
        ("1,234", "1234", None, 1.0),
        ("$x=5$", "5", None, 1.0),
        ("$(x+1)^2$", "x^2+2x+1", None, 1.0),
        ("I cannot say", "5", None, 0.0),
        ("", "5", None, 0.0),
        ("3.1416", "\\pi", None, 0.0),
        ("3.1416", "\\pi", 1e-4, 1.0),
        ("3.1416", "\\pi", 1e-7, 0.0),
        ("100001", "100000", 1e-4, 1.0),
        ("100011", "100000", 1e-4, 0.0),
        ("0.05", "0", 0.1, 1.0),
        ("$x+1$", "$1+x$", 0.1, 1.0),
    ],
)
def test_math(completion, answer, tolerance, expected):
    assert math_equal(completion, answer, tolerance) == expected


@pytest.mark.parametrize("answer", ["", "  "])
def test_an_answer_that_is_not_an_expression_is_refused(answer):
    with pytest.raises(UnreadableAnswer, match="cannot be parsed"):
        math_equal("3", answer)


def test_a_hostile_expression_is_undecided_in_bounded_time(monkeypatch):
    monkeypatch.setattr(verifiers, "MATH_LIMIT_S", 0.5)
    before, handler = time.monotonic(), signal.getsignal(signal.SIGALRM)
    assert math_equal("$9^{9^{9}}$", "3") is None
    assert time.monotonic() - before < 2.5
    assert signal.getsignal(signal.SIGALRM) is handler


def test_an_alarm_of_the_caller_survives():
    heard = []
    handler = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        assert math_equal("$1/2$", "0.5") == 1.0
        deadline = time.monotonic() + 3
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
        assert heard
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def test_math_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(math_equal("$1/4$", "0.25")))
    thread.start()
    thread.join(30)
    assert found == [1.0]
