"""Terms: names, verifiers over a batch, and the weighted sum."""

import numpy as np
import pytest
from reward_samples import batch, prompt

from lockstep.config.reward import ExactMatchReward, FunctionReward, LengthPenalty, MathReward, RegexReward
from lockstep.rewards import verifiers
from lockstep.rewards.reward_terms import build_term, term_names, weighted_rewards
from lockstep.rewards.reward_values import BadReward


def score(term, texts, prompts):
    finished = []
    return build_term(term, "x").score(batch(prompts, texts), finished.append), finished


def test_names_are_unique_and_in_order():
    terms = [
        MathReward(),
        MathReward(),
        MathReward(name="mine"),
        FunctionReward(path="a.py:f"),
        FunctionReward(path="p.q:f"),
        FunctionReward(path="p.q:f"),
        ExactMatchReward(),
    ]
    found = term_names(terms)
    assert found == ["math", "math_2", "mine", "f", "f_2", "f_3", "exact_match"]


def test_verifiers_over_a_batch():
    rows = [prompt(0, answer="4"), prompt(1, answer="7")]
    texts = [["4", "5"], ["7", "x 7"]]
    assert score(ExactMatchReward(), texts, rows)[0].values == [1.0, 0.0, 1.0, 0.0]
    assert score(ExactMatchReward(extract=r"\d"), texts, rows)[0].values == [1.0, 0.0, 1.0, 1.0]
    assert score(RegexReward(pattern=r"\d"), texts, rows)[0].values == [1.0, 1.0, 1.0, 0.0]
    scores, finished = score(LengthPenalty(soft=1, hard=3), texts, rows)
    assert scores.values == [0.0, 0.0, 0.0, -1.0]  # tokens are characters here
    assert finished == [1, 1, 1, 1]
    scores, _ = score(MathReward(), texts, rows)
    assert scores.values == [1.0, 0.0, 1.0, 1.0]
    assert scores.extras == {"undecided": [0.0] * 4}


def test_undecided_math_is_counted(monkeypatch):
    monkeypatch.setattr(verifiers, "MATH_LIMIT_S", 0.3)
    scores, _ = score(MathReward(), [["$9^{9^{9}}$", "3"]], [prompt(answer="3")])
    assert scores.values == [0.0, 1.0]
    assert scores.extras == {"undecided": [1.0, 0.0]}


@pytest.mark.parametrize("term", [ExactMatchReward(), MathReward()])
def test_a_row_without_an_answer_is_an_error(term):
    rows = [prompt(0, answer="4"), prompt(1, response="7")]
    with pytest.raises(BadReward, match=r"no answer .*response.*answer_column") as caught:
        score(term, [["4"], ["7"]], rows)
    assert caught.value.position == 1


def test_an_unreadable_math_answer_names_the_sample():
    with pytest.raises(BadReward, match="cannot be parsed by math-verify") as caught:
        score(MathReward(), [["4"], ["7"]], [prompt(0, answer="4"), prompt(1, answer=" ")])
    assert caught.value.position == 1


def test_weighted_sum():
    nan = np.nan
    values = [np.array([1.0, 0.0, nan]), np.array([0.5, nan, -1.0])]
    total = weighted_rewards(values, [2.0, 0.5])
    assert total.dtype == np.float32
    assert total.tolist() == [2.25, 0.0, -0.5]


def test_a_sample_without_any_term_is_an_error():
    with pytest.raises(BadReward, match="no term applies") as caught:
        weighted_rewards([np.array([1.0, np.nan]), np.array([np.nan, np.nan])], [1.0, 1.0])
    assert caught.value.position == 1


def test_a_sum_beyond_float32_is_an_error():
    with pytest.raises(BadReward, match="not finite in float32") as caught:
        weighted_rewards([np.array([1.0, 3e38]), np.array([1.0, 3e38])], [1.0, 1.0])
    assert caught.value.position == 1
