"""Fits the weights of `lockstep explain`: `python -m benchmarks.fit_diagnosis CORPUS ...`.

Every case is read once and taken twice: with all signatures, and without those that match in no other case. The
probabilities of a case's hypotheses, "unknown" among them with log-odds 0, are the softmax of their log-odds; the fit
maximises the probability of the right ones, with a penalty on the distance from `PRIORS`. The weights of the sources of
culprits are fitted the same way, over the sets of parties that could be named. `rare_factors` and `rare_culprits`,
which hardly any case shows, keep the value they have. Confidence is calibrated on the cases without their own
signatures, each judged with weights fitted on the others. The result replaces `doctor/judge/weights.yaml`; it depends
on the cases only.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from benchmarks.case_corpus import own_corpora
from benchmarks.diagnosis import ReadCase, by_case, own_rules, read_cases, without
from lockstep.doctor.judge.culprits import list_suspects
from lockstep.doctor.judge.factors import answer_factors
from lockstep.doctor.judge.hypotheses import NO_FAULT
from lockstep.doctor.judge.job_history import build_history
from lockstep.doctor.judge.log_diagnosis import gather_evidence
from lockstep.doctor.judge.scoring import MAX_CONFIDENCE, MAX_UNSURE_CONFIDENCE, WEIGHTS_FILE, load_weights
from lockstep.doctor.knowledge.knowledge_base import KnowledgeBase, load_knowledge
from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind, VerdictLevel

PRIORS = {
    "exact": 4.0, "likely": 2.5, "possible": 1.5, "faint": 0.0, "several": 1.0, "structure": 3.5, "hinted": 1.5,
    "guessed": 0.5, "same_line": -1.0, "first": 1.2, "survived": -2.5, "victim": -1.0, "explained": -2.0,
    "ended_well": 3.5, "running": 2.0, "healthy": 0.7, "troubled": -2.5, "faulty": -2.5,
}  # fmt: skip
CULPRIT_PRIORS = {
    "structure": 8.0, "captured": 4.0, "raised": 3.0, "missing": 3.0, "line": 2.0, "first_failed": -1.0,
    "other_rule": -2.5, "everyone": -4.0, "named": -0.5,
}  # fmt: skip
"""What is expected of a factor or source before any case is seen."""
PENALTY = 6.0
STEPS, FEWER_STEPS = 25, 6
_MASKED = -1e9


@dataclass(frozen=True, slots=True)
class Choice:
    """What was to be chosen from in one case.

    Attributes:
        features: 1 where a factor holds `[options, factors]`.
        fixed: What the log-odds have beside the fitted weights `[options]`.
        right: Whether an option is right `[options]`.
    """

    case: Path
    features: np.ndarray
    fixed: np.ndarray
    right: np.ndarray


def class_choice(read: ReadCase, rules: KnowledgeBase, left_out: frozenset[str], names: Sequence[str]) -> Choice:
    """Returns the choice between the hypotheses of a case, the last of which is "unknown".

    Where a case names a fault of which the logs have only a hint, "unknown" is right unless the fault is a hypothesis.
    """
    record, known = without(read, rules, left_out)
    job = gather_evidence(build_history(record.logs), known)
    rare = load_weights().factors
    features, fixed, right = [], [], []
    for one in job.hypotheses:
        answers = answer_factors(one, job)
        features.append([float(answers.get(name) is True) for name in names])
        fixed.append(sum(rare[name].yes for name, answer in answers.items() if answer and name not in names))
        right.append(one.cls in read.case.classes and read.case.sufficiency != "none")
    unknown = read.case.class_right(Verdict(VerdictKind.UNKNOWN, VerdictLevel.NOTICE, cause="unknown"))
    features.append([0.0] * len(names))
    return Choice(read.case.folder, np.array(features), np.array([*fixed, 0.0]),
                  np.array([*right, unknown and not any(right)]))  # fmt: skip


def culprit_choices(
    read: ReadCase, rules: KnowledgeBase, left_out: frozenset[str], names: Sequence[str]
) -> list[Choice]:
    """Returns the choice between the sets of parties, for the hypotheses that have the right class."""
    record, known = without(read, rules, left_out)
    rare, history, found = load_weights().culprits, build_history(record.logs), []
    for one in gather_evidence(history, known).hypotheses if read.case.culprits else ():
        suspects = list_suspects(one, history) if one.cls in read.case.classes and one.cls not in NO_FAULT else []
        right = [bool(read.case.culprits_right(Verdict(VerdictKind.UNKNOWN, VerdictLevel.NOTICE, each.parties)))
                 for each in suspects]  # fmt: skip
        if any(right):
            features = np.array([[float(name in each.reasons) for name in names] for each in suspects])
            fixed = [sum(rare[name] for name in each.reasons if name not in names) for each in suspects]
            found.append(Choice(read.case.folder, features, np.array(fixed), np.array(right)))
    return found


def fit(
    choices: Sequence[Choice], priors: np.ndarray, start: np.ndarray | None = None, steps: int = STEPS
) -> np.ndarray:
    """Returns the weights by Newton steps. Choices without a right option count for nothing.

    Args:
        priors: `[factors]`.
        start: Where to begin `[factors]`.
    """
    choices = [each for each in choices if each.right.any()]
    most = max(len(each.right) for each in choices)
    features, fixed, right = (np.zeros((len(choices), most, *shape)) for shape in ((len(priors),), (), ()))
    fixed[:] = _MASKED
    for at, each in enumerate(choices):
        count = len(each.right)
        features[at, :count], fixed[at, :count], right[at, :count] = each.features, each.fixed, each.right
    weights = (priors if start is None else start).copy()
    for _ in range(steps):
        log_odds = features @ weights + fixed
        chance = np.exp(log_odds - log_odds.max(axis=1, keepdims=True))
        chance /= chance.sum(axis=1, keepdims=True)
        among = chance * right
        among /= among.sum(axis=1, keepdims=True)
        slope = np.einsum("nh,nhk->k", among - chance, features) - PENALTY * (weights - priors)
        mean = np.einsum("nh,nhk->nk", chance, features)
        flat = features.reshape(-1, len(priors))
        curve = (flat * chance.reshape(-1, 1)).T @ flat - mean.T @ mean + PENALTY * np.eye(len(priors))
        weights = weights + np.linalg.solve(curve, slope)
    return weights


def log_odds_of_best(choice: Choice, weights: np.ndarray) -> tuple[float, int]:
    """Returns the log-odds of the likeliest option against all others, and which it is."""
    log_odds = choice.features @ weights + choice.fixed
    best = int(log_odds[:-1].argmax()) if len(log_odds) > 1 and log_odds[:-1].max() > 0 else len(log_odds) - 1
    return float(log_odds[best] - np.logaddexp.reduce(np.delete(log_odds, best))) if len(log_odds) > 1 else 0.0, best


def fit_calibration(log_odds: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Returns slope and offset of the logistic regression of `right` on log-odds, with a slight pull to 1 and 0."""
    inputs = np.stack([log_odds, np.ones(len(log_odds))], axis=1)
    prior = np.array([1.0, 0.0])
    found = prior.copy()
    for _ in range(100):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ found, -30, 30)))
        slope = inputs.T @ (right - chance) - 0.1 * (found - prior)
        curve = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + 0.1 * np.eye(2)
        found = found + np.clip(np.linalg.solve(curve, slope), -0.3, 0.3)
    return float(found[0]), float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_diagnosis", description=__doc__.splitlines()[0])
    parser.add_argument("corpora", nargs="*", type=Path, metavar="CORPUS", help="folders with truth.json and jobs/")
    parser.add_argument("--check", action="store_true", help="print the weights and write nothing")
    options = parser.parse_args()
    rules = load_knowledge()
    fit_cases(read_cases(options.corpora or own_corpora(), rules), rules, write=not options.check)


def fit_cases(cases: Sequence[ReadCase], rules: KnowledgeBase, *, write: bool) -> None:
    """Fits the weights, prints them and writes the file."""
    names, sources = list(PRIORS), list(CULPRIT_PRIORS)
    own = own_rules(cases, by_case)
    plain = [class_choice(read, rules, frozenset(), names) for read in cases]
    fewer = [class_choice(read, rules, own[by_case(read)], names) for read in cases]
    priors = np.array(list(PRIORS.values()))
    weights = fit([*plain, *fewer], priors)
    judged, right = [], []
    for each in fewer:
        others = [one for one in (*plain, *fewer) if one.case != each.case]
        log_odds, best = log_odds_of_best(each, fit(others, priors, weights, FEWER_STEPS))
        right.append(bool(each.right[best]))
        if best < len(each.right) - 1:
            judged.append((log_odds, right[-1]))
    slope, offset = fit_calibration(*np.array(judged, dtype=float).T)
    parties = [each for read in cases for left_out in (frozenset(), own[by_case(read)])
               for each in culprit_choices(read, rules, left_out, sources)]  # fmt: skip
    of_sources = fit(parties, np.array(list(CULPRIT_PRIORS.values())))
    print(f"{sum(right)} of {len(right)} classes likeliest, with the signatures and weights of the other cases")
    print(f"confidence: at most {MAX_CONFIDENCE}, without an unmistakable factor {MAX_UNSURE_CONFIDENCE}")
    before = load_weights()
    content = {
        "factors": {name: round(float(each), 2) for name, each in zip(names, weights, strict=True)},
        "rare_factors": {name: each.yes for name, each in before.factors.items() if name not in PRIORS},
        "culprits": {name: round(float(each), 2) for name, each in zip(sources, of_sources, strict=True)},
        "rare_culprits": {name: each for name, each in before.culprits.items() if name not in CULPRIT_PRIORS},
        "calibration": {"slope": round(slope, 3), "offset": round(offset, 3)},
    }
    text = HEADER + yaml.safe_dump(content, sort_keys=False)
    print(text)
    if write:
        WEIGHTS_FILE.write_text(text, encoding="utf-8")


HEADER = """\
# Log-odds of the factors and of the sources of culprits, and the calibration of confidence. Written by
# `python -m benchmarks.fit_diagnosis`, which keeps `rare_factors` and `rare_culprits` as they are: hardly any case
# shows them, or they are newer than the last fit.
"""


if __name__ == "__main__":
    main()
