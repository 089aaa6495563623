"""Formats text for users: durations, shortened lists, one line of an error message, the end of a log."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def terminal_safe(text: str, mark: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """The text with a mark in place of every control character, which lines of logs may contain."""
    return _CONTROL_CHARACTERS.sub(mark, text)


def format_duration(seconds: float) -> str:
    """Formats a duration: `12ms`, `0.4s`, `12s`, `3m05s`, `2h07m`, `3d04h`."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m{total_s % 60:02d}s"
    if total_s < 86400:
        return f"{total_s // 3600}h{total_s % 3600 // 60:02d}m"
    return f"{total_s // 86400}d{total_s % 86400 // 3600:02d}h"


def count_noun(count: float, noun: str) -> str:
    """Counts things: `1 variable`, `1,204 rows`, `0.5 GPUs`, `2 processes`, `3 entries`."""
    number = f"{count:,.10g}" if isinstance(count, float) else f"{count:,}"
    if count == 1:
        return f"{number} {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, after which libraries add paragraphs of advice; the error's type if
    the message is empty."""
    lines = _message_lines(error)
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


def last_line(error: BaseException) -> str:
    """Returns the last line of an error's message, for messages that begin with a traceback or a list of attempts."""
    return _message_lines(error)[-1]


def _message_lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


def log_tail(log: Path, lines: int = 40) -> str:
    """The last lines of a log, or a remark if it cannot be read or is empty."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64_000))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"({log} cannot be read: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:]) or f"({log} is empty)"


T = TypeVar("T")


def summarize_list(items: Sequence[T], limit: int, name: Callable[[T], str] = str) -> str:
    """Lists the first items and counts the others: `a, b and 3 more`. Empty if there are no items."""
    few = ", ".join(name(each) for each in items[:limit])
    return few + (f" and {len(items) - limit} more" if len(items) > limit else "")


def content_text(content: Any) -> str | None:
    """Returns the content of a conversation's message as text, with `<image>` for each image; None if it has parts of
    other kinds, or is neither text nor parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in content]
    if any(part.get("type") not in ("text", "image") for part in parts):
        return None
    return "".join("<image>" if part["type"] == "image" else str(part.get("text") or "") for part in parts)
