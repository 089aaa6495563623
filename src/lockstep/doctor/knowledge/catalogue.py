"""Renders the catalogue of failures, `docs/failures.md`: `python -m lockstep.doctor.knowledge.catalogue`."""

import re
import sys
from collections.abc import Iterable, Iterator
from typing import get_args

from lockstep.doctor.knowledge.knowledge_base import FailureRule, KnowledgeBase, load_knowledge
from lockstep.doctor.knowledge.knowledge_schema import FailureClass, KnowledgeFile

_ROLE_TEXTS = {
    "cause": "shows this failure",
    "sign": "hints at this failure",
    "victim": "is a consequence or wrapper of this failure",
    "healthy": "is harmless",
    "context": "states a fact",
}
_MAX_CHARS = 200
"""Longer log lines are shortened."""


def render_catalogue(rules: KnowledgeBase | None = None) -> str:
    """Renders one section per failure class: explanation, fix, next steps, and the log lines that show it."""
    rules = rules or load_knowledge()
    classes = [name for name in get_args(FailureClass) if name in rules.about]
    lines = [
        "# Known failures",
        "",
        "The failures that `lockstep explain` recognises, by class. A class names the cause, not the symptom: the",
        "timeout of a watchdog is not a class. The log lines are examples, as programs print them; the number in",
        "brackets is the probability of the class if nothing else is known. Words in *italics* stand for captured",
        "values. This page is generated from the [knowledge base](knowledge.md):",
        "`python -m lockstep.doctor.knowledge.catalogue`.",
        "",
        "| class | description | rules |",
        "|---|---|---|",
    ]
    of_class = {name: [rule for rule in rules.rules if rule.cls == name] for name in classes}
    lines += [f"| [`{name}`](#{name}) | {rules.about[name].title} | {len(of_class[name])} |" for name in classes]
    for name in classes:
        lines += _section(name, rules.about[name], of_class[name])
    return "\n".join(lines) + "\n"


def _section(name: str, about: KnowledgeFile, rules: Iterable[FailureRule]) -> Iterator[str]:
    yield from ["", f"## {name}", "", f"**{about.title}.** {_prose(about.explanation)}"]
    if about.fix:
        yield from ["", f"**Fix:** {_prose(about.fix)}"]
    if about.collect:
        yield from ["", "**Next steps:**", "", *(f"- {_prose(each)}" for each in about.collect)]
    shown = [rule for rule in rules if rule.signature.examples]
    if shown:
        yield from ["", "**Log lines:**", ""]
        for rule in shown:
            yield from _entry(rule)
    if about.docs:
        yield from ["", "**See also:** " + ", ".join(f"<{each}>" for each in about.docs)]


def _entry(rule: FailureRule) -> Iterator[str]:
    signature = rule.signature
    yield f"- {_inline_code(signature.examples[0])}<br>"
    sentences = [f"{_ROLE_TEXTS[signature.role]} ({signature.strength:g})"]
    sentences += [_prose(each) for each in (signature.explanation, signature.fix) if each]
    where = " ".join(f"<{each}>" for each in signature.sources[:1])
    yield f"  {'. '.join(each.rstrip('.') for each in sentences)}. {where}".rstrip()


def _inline_code(line: str) -> str:
    """Returns a log line as inline code, shortened if it is long."""
    text = " ".join(line.split())
    text = text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
    return f"`` {text} ``"


def _prose(text: str) -> str:
    """Returns a text with its fields in italics, and with Markdown escaped outside code."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    text = re.sub(r"([*_<>\[\]|])", r"\\\1", text)
    return re.sub(r"\{(\w+(?:\\_\w+)*)\}", lambda field: f"*{field[1]}*", text)


if __name__ == "__main__":
    sys.stdout.write(render_catalogue())
