"""Commands that need an extra of the distribution say so."""

import pytest
import typer

from lockstep.cli import extras


def test_a_missing_extra_is_reported_with_the_command_that_installs_it(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(typer.Exit) as refused:
        extras.require_extra("train", "lockstep train")
    assert refused.value.exit_code == 2
    assert "lockstep train needs torch, which is not installed: pip install 'lockstep-rl[train]'" in " ".join(
        capsys.readouterr().err.split()
    )


def test_installed_extras_are_accepted() -> None:
    extras.require_extra("train", "lockstep train")
