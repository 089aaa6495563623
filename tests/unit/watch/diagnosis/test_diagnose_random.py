"""Simulated jobs with injected faults: the diagnosis names the culprits, and accuses no other process confidently."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from job_simulator import FAULTS, Case, simulate

from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.verdict import Verdict, VerdictLevel

SOON, LATE = 6.0, 100.0
"""Seconds after the last event: only notices are due, and all verdicts are due."""


@dataclass
class Score:
    """How often the culprits were named correctly, which kinds were reported, and which cases failed."""

    cases: int = 0
    right: int = 0
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    innocents: list[str] = field(default_factory=list)

    def add(self, case: Case, seed: int, delay: float) -> None:
        verdicts = diagnose(case.evidence)
        said = accused(case, verdicts, delay)
        told = f"{case.fault} seed {seed} after {delay} s: {[each.explanation for each in verdicts]}"
        self.cases += 1
        self.kinds[case.fault, str(verdicts[0].kind) if verdicts else "nothing"] += 1
        harmless = case.fault in ("healthy", "slow")
        silent = not any(each.level is VerdictLevel.CONFIRMED for each in verdicts)
        if said == case.truth.culprits and (silent if harmless else bool(verdicts)):
            self.right += 1
        else:
            self.wrong.append(f"{told}, expected {sorted(case.truth.culprits)}")
        for each in verdicts:
            if each.confidence >= 0.8 and {c.name for c in each.culprits} - case.truth.culprits:
                self.innocents.append(told)


def accused(case: Case, verdicts: list[Verdict], delay: float) -> frozenset[str]:
    """The culprits of the confirmed verdicts, or of the notices if it is too early for confirmed verdicts."""
    due = (delay >= LATE or case.truth.structural) and case.fault != "busy"
    heard = [v for v in verdicts if (v.level is VerdictLevel.CONFIRMED if due else v.confidence >= 0.45)]
    return frozenset(culprit.name for verdict in heard for culprit in verdict.culprits)


def run(faults: tuple[str, ...], seeds: range) -> Score:
    score = Score()
    for fault in faults:
        for seed in seeds:
            for delay in (SOON, LATE):
                case = simulate(fault, seed, delay)
                if case is not None:
                    score.add(case, seed, delay)
    return score


def matrix(score: Score) -> str:
    """A table of the faults and the kinds of their first verdicts."""
    kinds = sorted({kind for _, kind in score.kinds})
    lines = [f"{'':16}" + "".join(f"{kind:>11}" for kind in kinds)]
    for fault in FAULTS:
        if any(name == fault for name, _ in score.kinds):
            lines.append(f"{fault:16}" + "".join(f"{score.kinds[fault, kind] or '':>11}" for kind in kinds))
    return "\n".join(lines)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_injected_culprit_is_named(fault: str) -> None:
    score = run((fault,), range(5))
    assert score.cases
    assert not score.innocents
    assert score.right >= 0.9 * score.cases, score.wrong


@pytest.mark.slow
def test_the_injected_culprits_are_named_in_97_of_100_cases(capsys: pytest.CaptureFixture[str]) -> None:
    score = run(FAULTS, range(1000, 1060))
    with capsys.disabled():
        print(f"\n{matrix(score)}\n{score.right} of {score.cases} culprit sets exactly right")
    assert score.right >= 0.97 * score.cases, score.wrong[:10]
    assert not score.innocents
