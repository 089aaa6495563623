"""Garbage collection is rare during a run and restored after it."""

import gc

import pytest

from lockstep.run.lifecycle import GC_THRESHOLD, infrequent_gc


def test_garbage_collection_is_restored_after_a_failed_run() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="over"), infrequent_gc():
        assert gc.get_threshold() == (GC_THRESHOLD, *before[1:]) and gc.get_freeze_count() > 0
        raise ValueError("over")
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_few_objects_cause_no_collection() -> None:
    rounds = []
    gc.callbacks.append(note := lambda phase, info: rounds.append(info["generation"]))
    try:
        with infrequent_gc():
            rounds.clear()
            kept = [[number] for number in range(GC_THRESHOLD // 2)]
            assert rounds == [] and len(kept) == GC_THRESHOLD // 2
    finally:
        gc.callbacks.remove(note)
