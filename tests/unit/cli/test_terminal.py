"""Messages of the commands: a missing extra of the distribution is named, and secrets are hidden."""

import json
import logging

import pytest
import typer

from lockstep.cli import terminal
from lockstep.cli.generate import run_or_exit
from lockstep.config.errors import ConfigError, ConfigProblem
from lockstep.report.command_events import TERMINAL, LogFormat, open_events


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


SECRET = "wolf-and-moon-17"


@pytest.mark.parametrize(
    "show",
    [
        TERMINAL.note,
        TERMINAL.progress,
        TERMINAL.warning,
        lambda text: TERMINAL.refuse(ValueError(text)),
        lambda text: TERMINAL.refuse(ConfigError(text, [ConfigProblem("model", text, text)])),
    ],
    ids=["note", "progress", "warning", "refusal", "config"],
)
def test_no_message_shows_a_secret(show, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("DB_PASSWORD", SECRET)
    show(f"https://anna:hunter22@mirror answered {SECRET} [/bold]")
    shown = capsys.readouterr().err
    assert SECRET not in shown and "hunter22" not in shown
    assert "mirror answered [hidden] [/bold]" in shown


def test_progress_is_a_line_every_ten_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.ReadingProgress() as progress:
        for done, at in ((1, 101.0), (2, 111.0), (3, 112.0), (4, 122.0), (5, 140.0)):
            now[0] = at
            progress(done, 5, done * 1_000_000)
    assert capsys.readouterr().err == "read 2 of 5 files, 2 MB, in 11s\nread 4 of 5 files, 4 MB, in 22s\n"


@pytest.mark.parametrize("log_format", LogFormat)
def test_what_is_logged_meanwhile_is_an_event(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    def work(_: object) -> int:
        logging.getLogger("lockstep.cluster").warning("engine-%d is slow", 3)
        logging.getLogger("another.library").info("not shown")
        return 5

    assert run_or_exit(work, open_events(log_format, "eval")) == 5
    (line,) = capsys.readouterr().err.splitlines()
    if log_format is LogFormat.json:
        found = json.loads(line)
        assert (found["event"], found["level"], found["process"]) == ("warning", "warning", "eval")
        line = found["message"]
    assert line == "engine-3 is slow"
