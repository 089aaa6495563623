"""Tuning of the allocator."""

import pytest

from lockstep.base import malloc


def test_malloc_is_tuned_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert malloc.tune_malloc() is hasattr(malloc.ctypes.CDLL(None), "mallopt")
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: object())
    assert malloc.tune_malloc() is False
