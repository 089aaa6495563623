"""Warnings of the log on the console."""

import io
import logging

import pytest
from rich.markup import escape

from lockstep.report.safe_console import SafeConsole
from lockstep.report.warning_handler import WarningHandler


def test_texts_of_other_hosts_neither_show_secrets_nor_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "wolf-and-moon-17")
    out = io.StringIO()
    console = SafeConsole(out, force_terminal=True)
    logger = logging.Logger("test")
    logger.addHandler(WarningHandler(lambda text: console.print(escape(text))))
    logger.info("nothing")
    logger.warning("host %s answered %s", "\x1b[2Jnode-1 [red]wet[/red]", "wolf-and-moon-17")
    assert out.getvalue() == "host [2Jnode-1 [red]wet[/red] answered [hidden]\n"
