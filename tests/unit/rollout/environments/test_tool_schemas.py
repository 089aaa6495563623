"""Schemas read from the source of functions, against those of transformers."""

from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from lockstep.rollout.environments.environment_protocol import EnvironmentCodeError
from lockstep.rollout.environments.tools import hermes_calls, regex_calls, tool_schema, tool_schemas

HERE = Path(__file__)


def multiply(a: float, b: float):
    """
    A function that multiplies two numbers

    Args:
        a: The first number to multiply
        b: The second number to multiply
    """


def search(query: str, limit: int = 5, exact: bool | None = None) -> list[str]:
    """Looks something up.

    In all books, and on
    several lines.

    Args:
        query: What to look for,
            in words.
        limit: How many (choices: [5, 10])
        exact: Whether the words must be together.

    Returns:
        Titles of what was found.
    """
    return []


def everything(
    one: list[int],
    two: dict[str, float],
    three: Literal["a", "b"],
    four: int | str,
    five: Optional[str] = None,  # noqa: UP045
    six: Union[int, float] = 1,  # noqa: UP007
    seven: dict | None = None,
    eight: tuple[int, str] = (1, ""),
    nine: list[list[str]] | None = None,
    ten: Any = None,
) -> dict[str, int]:
    """All kinds.

    Args:
        one: 1
        two: 2
        three: 3
        four: 4
        five: 5
        six: 6
        seven: 7
        eight: 8
        nine: 9
        ten: 10
    """
    return {}


async def later(text: str, *, loud: bool = False) -> str:
    """Async.

    Args:
        text: What.
        loud: How.

    Returns:
        It.
    """
    return text


@pytest.mark.parametrize("function", [multiply, search, everything, later], ids=lambda f: f.__name__)
def test_schemas_are_those_of_transformers(function) -> None:
    assert tool_schema(f"{HERE}:{function.__name__}") == get_json_schema(function)


@pytest.mark.parametrize(
    "text, words",
    [
        ("def f(a: int): ...", "has no docstring"),
        ('def f(a):\n    """Does.\n\n    Args:\n        a: It.\n    """', "parameter 'a' has no type"),
        ('def f(a: int):\n    """Does."""', "parameter 'a' is not described"),
        ('def f(a: Path):\n    """Does.\n\n    Args:\n        a: It.\n    """', "unsupported type Path"),
        ('def f(*a):\n    """Does."""', "name every parameter"),
        ("f = max", "there is no function definition of 'f'"),
        ("def g(): ...", "defines no 'f'; it defines g"),
    ],
)
def test_functions_without_a_schema_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.py").write_text(text)
    with pytest.raises(EnvironmentCodeError, match=words):
        tool_schema("t.py:f", tmp_path)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(EnvironmentCodeError, match="two tools are called 'multiply'"):
        tool_schemas([f"{HERE}:multiply", f"{HERE}:multiply"])


def test_hermes_calls() -> None:
    text = (
        'I see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call><tool_call>{"name": 3}</tool_call>'
        '<tool_call>{"name": "last", "parameters": {}}'
    )
    calls = hermes_calls(text)
    assert [(call.name, call.arguments) for call in calls[:2]] == [("add", {"a": 1}), ("add", '{"a": 2}')]
    assert calls[2].problem and (calls[3].name, calls[3].arguments) == ("last", {})
    assert hermes_calls("nothing of the kind") == []


def test_calls_by_pattern() -> None:
    assert [call.arguments for call in regex_calls("x [1+1] y [2*2]", r"\[(?P<arguments>[^\]]*)\]")] == ["1+1", "2*2"]
    (call,) = regex_calls('add({"a": 1})', r"(?P<name>\w+)\((?P<arguments>.*)\)")
    assert (call.name, call.arguments) == ("add", '{"a": 1}')
