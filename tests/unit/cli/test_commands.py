"""The lazy list of subcommands agrees with the subcommands."""

from importlib import import_module

import pytest

from lockstep.cli import _COMMANDS


@pytest.mark.parametrize("name", _COMMANDS)
def test_listed_help_is_the_first_paragraph_of_the_command(name: str) -> None:
    text = import_module(f"lockstep.cli.{name}").command.__doc__
    assert " ".join(text.partition("\n\n")[0].split()) == _COMMANDS[name]
