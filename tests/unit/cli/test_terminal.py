"""Commands that need a missing extra of the distribution name it."""

import pytest
import typer

from lockstep.cli import terminal


def test_a_missing_extra_is_reported_with_the_command_that_installs_it(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(terminal, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(typer.Exit) as refused:
        terminal.require_extra("train", "lockstep train")
    assert refused.value.exit_code == 2
    assert "lockstep train needs torch, which is not installed: pip install 'lockstep-rl[train]'" in " ".join(
        capsys.readouterr().err.split()
    )


def test_installed_extras_are_accepted() -> None:
    terminal.require_extra("train", "lockstep train")
