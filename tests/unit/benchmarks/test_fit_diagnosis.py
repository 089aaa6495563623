"""The weights of verdicts about logs: how they are fitted, and that the committed ones are those that judge."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.fit_diagnosis import CULPRIT_PRIORS, PRIORS, Choice, fit, fit_calibration
from lockstep.doctor.judge.factors import BENIGN_FACTORS, FAULT_FACTORS, PROOF, UNMISTAKABLE
from lockstep.doctor.judge.scoring import WEIGHTS_FILE, load_weights

MAX_FITTED = 29


def test_the_committed_weights_are_those_that_judge() -> None:
    read = yaml.safe_load(WEIGHTS_FILE.read_text(encoding="utf-8"))
    weights = load_weights()
    assert {name: each.yes for name, each in weights.factors.items()} == read["factors"] | read["rare_factors"]
    assert weights.culprits == read["culprits"] | read["rare_culprits"]
    assert (weights.calibration.slope, weights.calibration.offset) == tuple(read["calibration"].values())


def test_every_factor_has_a_weight_and_few_are_fitted() -> None:
    read = yaml.safe_load(WEIGHTS_FILE.read_text(encoding="utf-8"))
    factors = set(FAULT_FACTORS) | set(BENIGN_FACTORS)
    assert set(read["factors"]) | set(read["rare_factors"]) == factors
    assert not set(read["factors"]) & set(read["rare_factors"]) and {*PROOF, *UNMISTAKABLE} <= factors
    assert (set(read["factors"]), set(read["culprits"])) == (set(PRIORS), set(CULPRIT_PRIORS))
    assert not set(read["culprits"]) & set(read["rare_culprits"])
    assert sum(len(read[part]) for part in ("factors", "culprits", "calibration")) <= MAX_FITTED


def _choice(right: list[bool], features: list[list[float]]) -> Choice:
    return Choice(Path(), np.array(features), np.zeros(len(right)), np.array(right))


def test_a_factor_of_right_hypotheses_gains_weight_and_one_that_no_case_has_keeps_its_prior() -> None:
    choices = [_choice([True, False], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])] * 20
    choices.append(_choice([False, False], [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    weights = fit(choices, np.array([0.0, 0.0, -2.0]))
    assert weights[0] > 0.5 > -0.5 > weights[1] and weights[2] == pytest.approx(-2.0)


def test_a_calibration_gives_the_share_of_right_answers() -> None:
    log_odds = np.repeat([0.0, 2.0], 100)
    right = np.concatenate([np.arange(100) < 30, np.arange(100) < 90]).astype(float)
    slope, offset = fit_calibration(log_odds, right)
    chance = 1 / (1 + np.exp(-(slope * np.array([0.0, 2.0]) + offset)))
    assert chance == pytest.approx([0.3, 0.9], abs=0.01)
