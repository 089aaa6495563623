"""Reads JSON from outside within bounds: bytes, nesting, and errors that name the source, the line and the remedy.

Python's parser ends a deeply nested text with a RecursionError, and so does whatever walks through a value that was
just not too deep for it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.base.errors import PicklableError

MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 100
"""Far more than rows, schemas and tool calls need, and far less than Python's limit of recursion."""


class MalformedJson(PicklableError, ValueError):
    """A text from outside that is not JSON, or not JSON within the bounds.

    Args:
        source: the file, column or sender.
        line: the line of the error, from 1; 0 if the whole text is concerned.
    """

    def __init__(self, source: str, line: int, problem: str, remedy: str = "") -> None:
        where = f"{source}, line {line}" if line else source
        super().__init__(f"{where}: {problem}" + (f"; {remedy}" if remedy else ""))
        self.source, self.line, self.problem, self.remedy = source, line, problem, remedy


def parse_json(
    text: str | bytes | bytearray,
    source: str,
    *,
    max_bytes: int = MAX_JSON_BYTES,
    max_depth: int = MAX_JSON_DEPTH,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """The value of a JSON text. Raises MalformedJson; `source` is named in it."""
    if len(text) > max_bytes:
        problem = f"{len(text):,} bytes of JSON, and the limit is {max_bytes:,}"
        raise MalformedJson(source, 0, problem, "give a smaller one")
    try:
        value = json.loads(text, object_hook=object_hook, parse_constant=parse_constant)
    except json.JSONDecodeError as error:
        raise MalformedJson(source, error.lineno, f"is not JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        line = bytes(text[: error.start]).count(b"\n") + 1 if isinstance(text, bytes | bytearray) else 0
        raise MalformedJson(source, line, "is not UTF-8 text") from error
    except ValueError as error:  # an integer of thousands of digits
        raise MalformedJson(source, 0, f"is not JSON that can be used: {error}") from error
    except RecursionError:
        raise nested_too_deeply(source, 0, max_depth) from None
    except MemoryError:
        raise MalformedJson(source, 0, "its values do not fit into memory", "give a smaller one") from None
    if may_be_deeper(text, max_depth) and is_deeper(value, max_depth):
        raise nested_too_deeply(source, 0, max_depth)
    return value


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """The value of a JSON file, of which no more than the limit is read. Raises MalformedJson, OSError."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        problem = f"is larger than {max_bytes:,} bytes, the limit for JSON"
        raise MalformedJson(str(path), 0, problem, "give a smaller one")
    return parse_json(data.removeprefix(b"\xef\xbb\xbf"), str(path), max_bytes=max_bytes, max_depth=max_depth)


def nested_too_deeply(source: str, line: int, limit: int) -> MalformedJson:
    """The error about lists and objects inside each other beyond the limit."""
    return MalformedJson(source, line, f"is nested more than {limit} levels deep", "make it flatter")


def may_be_deeper(text: str | bytes | bytearray, limit: int) -> bool:
    """Whether a JSON text has enough brackets to be nested deeper than the limit: quick, and usually False."""
    if isinstance(text, str):
        return text.count("[") + text.count("{") > limit
    return text.count(b"[") + text.count(b"{") > limit


def is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and mappings are nested deeper than the limit."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(limit):
        if not level:
            return False
        items = [each.values() if isinstance(each, dict) else each for each in level]
        level = [inner for each in items for inner in each if isinstance(inner, list | dict)]
    return bool(level)
