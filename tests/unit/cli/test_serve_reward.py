"""`lockstep serve-reward`: what is refused before a model is loaded."""

import secrets
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app

VARIABLE = "LOCKSTEP_REWARD_TOKEN"


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve-reward", "nowhere/rm", *arguments], env={"COLUMNS": "200"})
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ("", "is empty: unset it, or make one: export LOCKSTEP_REWARD_TOKEN="),
        (" \n", "is empty"),
        (f"{secrets.token_hex(32)}\n{secrets.token_hex(32)}", "has characters that a header cannot have"),
        (f"{secrets.token_hex(32)}\u00e9", "has characters that a header cannot have"),
        ("reward-token", "can be guessed (about 27 bits, at least 96 are needed): whoever guesses it can score texts"),
    ],
    ids=["empty", "blank", "two lines", "accent", "weak"],
)
def test_a_variable_that_holds_no_token_is_refused(
    token: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of a server that refuses everyone, or that uses another token than the user believes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, token)
    said = refusal()
    assert f"{VARIABLE} {problem}" in said and (token.strip() not in said or not token.strip())
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_precision_is_refused_with_those_that_there_are() -> None:
    said = refusal("--dtype", "float8")
    assert "float8" in said and "pydantic" not in said
    assert all(name in said for name in ("auto", "float32", "bfloat16", "float16"))
