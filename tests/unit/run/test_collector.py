"""The collector looks rarely while a run is under way, and as before after it."""

import gc

import pytest

from lockstep.run.collector import AFTER, rare_collections


def test_the_collector_is_as_before_after_a_run_that_failed() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="over"), rare_collections():
        assert gc.get_threshold() == (AFTER, *before[1:]) and gc.get_freeze_count() > 0
        raise ValueError("over")
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_few_objects_are_not_looked_at() -> None:
    rounds = []
    gc.callbacks.append(note := lambda phase, info: rounds.append(info["generation"]))
    try:
        with rare_collections():
            rounds.clear()
            kept = [[number] for number in range(AFTER // 2)]
            assert rounds == [] and len(kept) == AFTER // 2
    finally:
        gc.callbacks.remove(note)
