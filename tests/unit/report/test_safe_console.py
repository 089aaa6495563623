"""Texts from outside cannot control the terminal."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import lockstep
from lockstep.report.safe_console import SafeConsole

ATTACKS = ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "a\rb", "\x1b]8;;http://evil\x1b\\", "\u202egnp.exe"]
OWN = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
"""Rich's own sequences: styles and cursor movements."""


def printed(*renderables: object, terminal: bool = True) -> str:
    out = io.StringIO()
    console = SafeConsole(out, force_terminal=terminal)
    for each in renderables:
        console.print(each)
    return out.getvalue()


def test_control_characters_are_dropped_from_every_renderable() -> None:
    for attack in ATTACKS:
        table = Table("column " + attack)
        table.add_row(attack)
        for shown in (attack, Text(attack, style="bold"), table, f"[bold]{escape(attack)}[/]"):
            for terminal in (True, False):
                text = printed(shown, terminal=terminal)
                assert not re.search(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e]", text), repr(text)
                assert "\x1b" not in OWN.sub("", text), repr(text)
                assert attack not in text


@given(st.text(max_size=40))
def test_no_text_reaches_the_terminal_with_an_escape(text: str) -> None:
    assert "\x1b" not in printed(Text(text), terminal=False)


def test_own_styles_and_cursor_movements_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = SafeConsole(out, force_terminal=True)
    with Live("one", console=console, auto_refresh=False) as live:
        live.update("two", refresh=True)
    assert "\x1b[?25l" in out.getvalue() and "\x1b[2K" in out.getvalue()
    assert "\x1b[1m" in printed(Text("x", style="bold"))


def test_nothing_else_writes_to_the_terminal_with_rich() -> None:
    root = Path(lockstep.__path__[0])
    made = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"(?<!Safe)\bConsole\(", path.read_text()) and path.name != "safe_console.py"
    ]
    assert made == []


def test_only_json_is_echoed() -> None:
    """Anything else that a command prints may contain texts of others; JSON escapes their control characters."""
    commands = Path(lockstep.__path__[0]) / "cli"
    unsafe = r"typer\.echo\((?!\s*json\.dumps\(|f\"lockstep \{__version__\}\"\))|typer\.secho\(|basicConfig\("
    assert [path.name for path in commands.rglob("*.py") if re.search(unsafe, path.read_text())] == []


def test_lines_are_wrapped_only_on_a_terminal(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("COLUMNS", raising=False)
    address = "https://example.org/" + "a" * 200
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("error", f"see {address} and /a/path/{'b' * 200}/file")
    assert address in printed(table, terminal=False) and f"/a/path/{'b' * 200}/file" in printed(table, terminal=False)
    assert address in printed(Text(f"see {address} " * 3), terminal=False)
    assert address not in printed(table, terminal=True)
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, printed(table, terminal=False).splitlines())) <= 60


def test_lines_of_files_end_with_their_last_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(box=None, show_header=False)
    table.add_row("first", "short")
    table.add_row("second  one", "longer " * 3)
    text = printed(Padding(Text("a paragraph"), (1, 0)), table, terminal=False)
    assert text == "\na paragraph\n\n first        short\n second  one  longer longer longer\n"
    monkeypatch.setenv("COLUMNS", "60")
    assert printed(table, terminal=False).splitlines()[0] == " first        short"


@given(st.lists(st.text(alphabet="ab \n", max_size=12), max_size=5))
def test_only_spaces_at_the_ends_of_lines_are_left_out(texts: list[str]) -> None:
    shown = printed(*map(Text, texts), terminal=False)
    assert shown == re.sub(r" +(?=\n)", "", "".join(f"{each}\n" for each in texts))
