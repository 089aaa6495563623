"""The scores of a reward model: what is not finite is named, and what an export says about them."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.data.forest_builder import forest_of_scored_pairs
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Pair
from lockstep.ledger.ledger import Ledger
from lockstep.run.step_scores import check_scores, score_statistics
from lockstep.train.errors import NonFinite


def test_scores_that_are_not_finite_are_named_with_rank_and_micro_batch() -> None:
    tokens = np.arange(4, dtype=np.int32)
    pairs = [Pair(uid=f"{n}", row=n, prompt=tokens, chosen=tokens, rejected=tokens[::-1].copy()) for n in range(6)]
    batch = pack(forest_of_scored_pairs(pairs), 2, 9)
    scores = np.zeros(12)
    check_scores(batch, scores, 4)
    rows = batch.everything()
    assert rows.microbatches == 6, "one completion in each row"
    scores[rows.row(2).sequences] = np.nan
    scores[rows.row(4).sequences] = np.inf
    with pytest.raises(NonFinite, match=r"loss of optimizer step 5 is not finite \(rank 0 micro-batch 2\)"):
        check_scores(batch, scores, 4)
    scores[rows.row(11).sequences] = -np.inf
    with pytest.raises(NonFinite) as raised:
        check_scores(batch, scores, 4)
    assert raised.value.places == [(0, 2), (1, 5)]


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
