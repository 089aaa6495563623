"""transformers' progress bars and advice, disabled within a context."""

import pytest
from transformers.utils import logging

from lockstep.models.huggingface import quiet_transformers


@pytest.mark.parametrize("bars", [True, False])
def test_verbosity_is_restored(bars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
    verbosity = logging.get_verbosity()
    try:
        with pytest.raises(KeyError), quiet_transformers():
            assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == (False, logging.ERROR)
            raise KeyError
        assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == (bars, verbosity)
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def test_the_environment_variable_keeps_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    verbosity = logging.get_verbosity()
    with quiet_transformers():
        assert logging.get_verbosity() == verbosity
