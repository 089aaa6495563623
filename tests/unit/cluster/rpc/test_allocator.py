"""Tuning of the allocator."""

import pytest

from lockstep.cluster.rpc import worker_main


def test_malloc_is_tuned_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_main.tune_malloc() is hasattr(worker_main.ctypes.CDLL(None), "mallopt")
    monkeypatch.setattr(worker_main.ctypes, "CDLL", lambda name: object())
    assert worker_main.tune_malloc() is False
