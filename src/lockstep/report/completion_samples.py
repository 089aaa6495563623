"""Completions as text for people to read: on the terminal, in Markdown, as JSON, shortened and without secrets."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from rich.text import Text

from lockstep.base.secrets import redact_text
from lockstep.base.text import content_text
from lockstep.ledger.sqlite_index import CompletionSample

STORED_CHARS = 4000
"""The ledger and trackers get at most this many characters of each text of a sample; step files have all."""
_TURNS_SHOWN = 2, 6
"""Turns at the start and at the end of a long conversation that a terminal shows."""


def shortened_sample(sample: CompletionSample, known_secrets: Collection[str]) -> CompletionSample:
    """A copy for ledger, report and trackers: without secrets, and with at most STORED_CHARS characters per text."""

    def cut(text: str) -> str:
        return shorten(redact_text(text, known_secrets), STORED_CHARS)

    messages = sample.messages
    if messages is not None:
        messages = [
            {key: str(each[key]) for key in ("role", "name") if key in each} | {"content": cut(turn_text(each))}
            for each in messages
        ]
    return replace(sample, prompt=cut(sample.prompt), completion=cut(sample.completion), messages=messages)


def sample_record(sample: CompletionSample) -> dict[str, Any]:
    """A sample as JSON: whole texts, `reward`, and the unweighted `terms`."""
    record: dict[str, Any] = {
        "uid": sample.uid,
        "number": sample.number,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "reward": sample.reward,
        "terms": sample.scores,
        "finish": sample.finish,
        "answer": sample.answer,
    }
    if sample.images:
        record["images"] = sample.images
    return record if sample.messages is None else {**record, "messages": sample.messages}


def sample_text(sample: CompletionSample, limit: int | None = None) -> Text:
    """A sample as lines of a terminal: prompt, completion or turns, reward and its terms.

    Args:
        limit: the most characters of each text, on one line; None shows whole texts with their line breaks.
    """
    rows = [("prompt", sample.prompt), *_answer_rows(sample, limit)]
    width = max(len(label) for label, _ in rows)
    text = Text()
    for label, content in rows:
        text.append(f"  {label:<{width}}  ", style="dim")
        text.append(_one_line(content, limit) if limit is not None else _indented(content, width + 4))
        text.append("\n")
    text.append(f"  {'reward':<{width}}  ", style="dim")
    text.append("none" if sample.reward is None else format_reward(sample.reward), style="bold")
    for name, value in sample.scores.items():
        text.append(f"  {name} ", style="dim").append(format_reward(value))
    if sample.finish != "stop":
        text.append(f"  {'truncated' if sample.finish == 'length' else sample.finish}", style="yellow")
    return text


def sample_markdown(sample: CompletionSample) -> str:
    """A sample as Markdown in which all texts are indented code, which no text can leave."""
    rows = [("prompt", sample.prompt), *_answer_rows(sample, None)]
    blocks = [f"{label}\n\n{_indented(content, 4, first=True)}" for label, content in rows]
    terms = "".join(f", {_plain(name)} {format_reward(value)}" for name, value in sample.scores.items())
    reward = "none" if sample.reward is None else format_reward(sample.reward)
    return "\n\n".join([*blocks, f"reward {reward}{terms} ({_plain(sample.finish)})"])


def turn_text(message: dict[str, Any]) -> str:
    """The text of a turn, with `<image>` for an image, and the calls of tools that it makes besides its text."""
    content = message.get("content") or ""
    text = content_text(content)
    parts = [json.dumps(content, ensure_ascii=False) if text is None else text]
    parts += [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in parts if part)


def shorten(text: str, limit: int) -> str:
    """Cuts out the middle of a longer text, and says how much is missing."""
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail]} [… {len(text) - limit:,} characters …] {text[len(text) - tail :]}"


def format_reward(value: float) -> str:
    """Formats a reward with four significant figures: 1, -0.25, 0.3333."""
    return f"{value:.4g}"


def _answer_rows(sample: CompletionSample, limit: int | None) -> Iterator[tuple[str, str]]:
    if not sample.messages:
        yield "completion", sample.completion
        return
    first, last = _TURNS_SHOWN
    left_out = len(sample.messages) - first - last if limit is not None else 0
    for index, message in enumerate(sample.messages):
        if left_out > 0 and first <= index < first + left_out:
            if index == first:
                yield "…", f"{left_out} turns"
            continue
        yield _plain(f"{message.get('role', '')} {message.get('name', '')}").strip(), turn_text(message)


def _plain(name: str) -> str:
    """A name without anything that means something in Markdown or breaks a line."""
    return re.sub(r"[^\w ./-]", "", name)[:60]


def _one_line(text: str, limit: int) -> str:
    return shorten(_printable(text), limit).replace("\n", " ↵ ")


def _indented(text: str, width: int, first: bool = False) -> str:
    lines = f"\n{' ' * width}".join(_printable(text).splitlines() or [""])
    return " " * width + lines if first else lines


def _printable(text: str) -> str:
    """The text without lone surrogates, which JSON allows and no terminal can print."""
    return text.encode("utf-8", "replace").decode()
