"""Finds the failure that explains what a job's logs show.

The log-odds of a hypothesis are the fitted weights of the factors that hold. The explanation is the cheapest set of
hypotheses that covers the lines that ended the job: one that covers many lines is preferred to several that each cover
one, and one that no line needs is left out. The likeliest of the set is the answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import yaml

from lockstep.config.yaml_text import parse_yaml
from lockstep.doctor.judge.factors import PROOF, UNMISTAKABLE, answer_factors, factor_text
from lockstep.doctor.judge.hypotheses import FailureHypothesis, JobEvidence, Site, strength_of
from lockstep.watch.diagnosis.inference import Calibration, FactorWeight, add_up, cheapest_cover, surprise

WEIGHTS_FILE = Path(__file__).with_name("weights.yaml")
UNKNOWN_CONFIDENCE = 0.5
MAX_CONFIDENCE = 0.97
MAX_UNSURE_CONFIDENCE = 0.79
"""Without a factor of `UNMISTAKABLE`, or if all its lines follow from another failure: logs cannot tell a cause from
one that they do not show."""
MAX_OUTSIDE_CONFIDENCE = 0.55
"""For lines dated outside the job: clocks may differ, and a fault may persist."""
_MAX_OTHERS, _MAX_REASONS = 3, 3
_RAISED_PROBABILITY = 0.45
"""Probability that an exception which no signature names is the cause."""


@dataclass(frozen=True, slots=True)
class JudgeWeights:
    """The log-odds of factors and of the sources of culprits, and the calibration."""

    factors: Mapping[str, FactorWeight]
    culprits: Mapping[str, float]
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer, how sure it is, and what else may be.

    Attributes:
        confidence: The probability that the class is right.
        others: Further hypotheses with their confidences: those that explain other lines first, then the likeliest.
        proven: Whether a factor of `PROOF` holds.
        reasons: What the factors say that decided, the weightiest first.
    """

    best: FailureHypothesis
    confidence: float
    others: list[tuple[FailureHypothesis, float]]
    proven: bool = False
    reasons: tuple[str, ...] = ()


@cache
def load_weights() -> JudgeWeights:
    """Reads `weights.yaml`."""
    read = parse_yaml(WEIGHTS_FILE.read_text(encoding="utf-8"), str(WEIGHTS_FILE), yaml.SafeLoader)
    calibration = Calibration(read["calibration"]["slope"], read["calibration"]["offset"], MAX_CONFIDENCE)
    factors = {name: FactorWeight(weight) for name, weight in (read["factors"] | read["rare_factors"]).items()}
    return JudgeWeights(factors, read["culprits"] | read["rare_culprits"], calibration)


def judge_hypotheses(job: JobEvidence, weights: JudgeWeights) -> Judgement:
    """Finds the best explanation of a job."""
    answers = [answer_factors(each, job) for each in job.hypotheses]
    log_odds = [add_up(0.0, each, weights.factors) for each in answers]
    chosen = _explanation(job, log_odds)
    order = sorted(range(len(log_odds)), key=lambda at: (at not in chosen, -log_odds[at], job.hypotheses[at].since))
    named = bool(order) and log_odds[order[0]] > 0.0
    sure = [_confidence(at, log_odds, answers[at], weights) for at in order]
    limit = sure[0] if named else UNKNOWN_CONFIDENCE
    ranked = [(job.hypotheses[at], min(each, limit)) for at, each in zip(order, sure, strict=True)]
    if not named:
        unknown = job.unclassified
        unknown.signed = [] if unknown.proposed or not order else job.hypotheses[order[0]].signed
        return Judgement(unknown, UNKNOWN_CONFIDENCE, ranked[:_MAX_OTHERS])
    held = [name for name, answer in answers[order[0]].items() if answer and weights.factors[name].yes > 0]
    held = sorted(held, key=lambda name: -weights.factors[name].yes)[:_MAX_REASONS]
    return Judgement(*ranked[0], ranked[1 : 1 + _MAX_OTHERS], any(map(answers[order[0]].get, PROOF)),
                     tuple(map(factor_text, held)))  # fmt: skip


def _confidence(at: int, log_odds: Sequence[float], answers: Mapping[str, bool | None], weights: JudgeWeights) -> float:
    """Returns the probability of a hypothesis, against all others and "unknown", whose log-odds are 0."""
    rivals = [0.0, *log_odds[:at], *log_odds[at + 1 :]]
    found = weights.calibration.confidence(log_odds[at] - float(np.logaddexp.reduce(rivals)))
    sure = any(map(answers.get, UNMISTAKABLE)) and not answers.get("explained")
    found = found if sure else min(found, MAX_UNSURE_CONFIDENCE)
    return min(found, MAX_OUTSIDE_CONFIDENCE) if answers.get("outside") else found


def _explanation(job: JobEvidence, log_odds: Sequence[float]) -> list[int]:
    """Returns the hypotheses of the cheapest cover of what ended the job.

    A line left over costs as much as it is improbable without its cause. Every hypothesis covers the end of the job.
    """
    lines = _lines_to_explain(job)
    covers = np.array([[True, *_covered(one, list(lines), job)] for one in job.hypotheses], dtype=bool)
    left_over = [math.inf, *(-math.log(1 - min(probability, MAX_CONFIDENCE)) for probability in lines.values())]
    return cheapest_cover(covers, [surprise(each) for each in log_odds], left_over)


def _lines_to_explain(job: JobEvidence) -> dict[Site, float]:
    """Returns the lines that ended the job, each with the probability that its class is the cause: the first line of
    each signature, those of what the detectors found, and exceptions, of a chain the first."""
    lines = [(site, _RAISED_PROBABILITY) for site in job.unnamed]
    for candidate in (candidate for each in job.hypotheses for candidate in each.proposed):
        lines += [((each.file, each.line), candidate.weight) for each in candidate.facts if each.line is not None]
    causes = {each.rule.id: each for each in reversed(job.causes) if job.stopped(each)}
    lines += [((each.file, each.line), strength_of(each)) for each in causes.values()]
    found: dict[Site, float] = {}
    for site, probability in lines:
        first = job.first_of_chain(site)
        found[first] = max(found.get(first, 0.0), probability)
    return found


def _covered(one: FailureHypothesis, lines: Sequence[Site], job: JobEvidence) -> list[bool]:
    """Returns which lines would follow from a hypothesis: its own, those that its signatures explain, and later
    exceptions that no signature names; from a good end, whatever was before."""
    if one.cls == "benign":
        return ["ended_well" in job.history.traits] * len(lines)
    follow = one.sites | job.explained_by(one)
    if any(map(job.stopped, one.signed)):
        follow |= {site for site in job.unnamed if one.since[0] <= (job.raised[site] or math.inf)}
    first = {job.first_of_chain(site) for site in follow}
    return [each in first for each in lines]
