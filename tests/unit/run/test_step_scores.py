"""What an export says about the scores of a reward model."""

from pathlib import Path

from lockstep.ledger.ledger import Ledger
from lockstep.run.step_scores import score_statistics


def test_the_newest_measurement_counts(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "run", {}) as ledger:
        assert score_statistics(ledger, 0) == {}
        ledger.record_evaluation(-1, {"eval/mean_reward": 9.0, "eval/std_reward": 0.5}, [])
        assert score_statistics(ledger, 0) == {"mean": 9.0, "std": 0.5}
        for step in range(4):
            ledger.record_metrics(step, {"policy/mean_reward": float(step), "policy/std_reward": 2.0})
            ledger.commit(step, {})
        ledger.record_evaluation(2, {"eval/mean_reward": 7.0, "eval/std_reward": 3.0}, [])
        assert score_statistics(ledger, 2) == {"mean": 1.0, "std": 2.0}, "not those of the untrained head"
        assert score_statistics(ledger, 3) == {"mean": 7.0, "std": 3.0}, "held-out pairs rather than the step's own"
        assert score_statistics(ledger, 4) == {"mean": 3.0, "std": 2.0}
