"""Evaluations survive a restart; which version is the best."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.rollout import SamplingConfig
from lockstep.config.run_config import EvaluationConfig
from lockstep.ledger.ledger import Ledger
from lockstep.run.evaluation.evaluator import EXACT_MATCH, CompletionQuality, Evaluator, ValidationLoss


class FakeReporter:
    def __init__(self) -> None:
        self.evaluations: list[tuple[int, dict[str, float]]] = []

    def evaluated(self, version: int, metrics: dict[str, float]) -> None:
        self.evaluations.append((version, metrics))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "run", {"name": "x"})


def evaluator(ledger: Ledger) -> Any:
    config = EvaluationConfig.model_validate({"data": {"path": "e.jsonl"}, "every": 2})
    quality = CompletionQuality(config, [], SamplingConfig(), None, None)  # type: ignore[arg-type]
    return Evaluator([quality], ledger, FakeReporter())  # type: ignore[arg-type]


def test_an_evaluation_of_an_earlier_attempt_is_reported_again_and_not_repeated(ledger: Ledger) -> None:
    ledger.record_evaluation(3, {EXACT_MATCH: 0.5})
    resumed = evaluator(ledger)
    assert not resumed.due(4, last=False)
    for version in (3, 4, 5):
        resumed.report_again(version)
    assert resumed.reporter.evaluations == [(4, {EXACT_MATCH: 0.5})]


def test_the_best_version_is_that_of_the_highest_reward(ledger: Ledger) -> None:
    """Answers that are reasoned never match exactly: the reward tells them apart all the same."""
    for version, reward in ((0, 0.1), (2, 0.6), (4, 0.4), (6, 0.7)):
        ledger.record_evaluation(version - 1, {EXACT_MATCH: 0.0, "eval/reward_mean": reward})
    found = evaluator(ledger)
    assert [version for version in (0, 2, 4, 6) if found.improved(version)] == [0, 2, 6]
    assert not found.improved(3)


def test_without_a_reward_exact_match_decides(ledger: Ledger) -> None:
    for version, exact in ((0, 0.2), (2, 0.2), (4, 0.3)):
        ledger.record_evaluation(version - 1, {EXACT_MATCH: exact})
    found = evaluator(ledger)
    assert [version for version in (0, 2, 4) if found.improved(version)] == [0, 4]


def test_what_is_due_depends_on_each_measurements_interval(ledger: Ledger) -> None:
    completions = evaluator(ledger).measurements[0]
    loss = ValidationLoss(3, [], None, 64)  # type: ignore[arg-type]
    both = Evaluator([loss, completions], ledger, FakeReporter())  # type: ignore[arg-type]
    due = {version: [each.stage for each in both.due(version, version == 7)] for version in range(8)}
    everything = ["validate", "evaluate"]
    assert due == {0: everything, 1: [], 2: ["evaluate"], 3: ["validate"], 4: ["evaluate"], 5: [], 6: everything,
                   7: everything}  # fmt: skip
    both.record(2, {EXACT_MATCH: 0.5}, [])
    assert both.due(2, last=True) == [] and evaluator(ledger).history == {2: {EXACT_MATCH: 0.5}}


def test_without_completions_the_lowest_loss_is_the_best(ledger: Ledger) -> None:
    for version, loss in ((0, 3.0), (2, 1.0), (4, 2.0), (6, 0.5)):
        ledger.record_evaluation(version - 1, {"eval/loss": loss})
    found = Evaluator([ValidationLoss(2, [], None, 64)], ledger, FakeReporter())  # type: ignore[arg-type]
    assert [version for version in (0, 2, 4, 6) if found.improved(version)] == [0, 2, 6]
    assert found.metric(6) == -0.5 and found.metric(1) is None
