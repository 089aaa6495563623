"""Finds the process or service that the lines of a failure speak of, which is seldom the one that wrote them."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from lockstep.doctor.judge.hypotheses import FailureHypothesis
from lockstep.doctor.judge.job_history import JobHistory
from lockstep.doctor.logs.stack_traces import names_trouble
from lockstep.watch.diagnosis.verdict import Culprit

_ADDRESS = re.compile(
    r"(?:https?://|\(|(?:to|at|with|of|from|host) ['\"]?|remote=\[?)"
    r"(?P<host>(?:\d{1,3}\.){3}\d{1,3}|localhost|[a-z][\w.-]{0,60}):(?P<port>\d{2,5})\b"
)
"""The address of a service: in a URL, in brackets after its name, or after a preposition."""
_NAME = r"(?P<party>[A-Za-z][A-Za-z_]{1,30}(?:[-_./:#][A-Za-z]{1,20}){0,3}[-_./:#]?\d{1,4})(?![\w%]|[-./:]\w)"
_IN_TROUBLE = re.compile(
    rf"(?i)\b(?:wait(?:ing|s|ed)? (?:for|on)|(?:no|missing|nothing) (?:[\w-]+ ){{0,3}}(?:from|by|for)"
    rf"|heard (?:nothing )?from|lost(?: contact (?:with|to))?|from|reach|reply of|answer of|behind) (?:the )?{_NAME}"
    rf"|(?<![\w./-]){_NAME.replace('party', 'subject')},? (?:\([^)]{{0,60}}\)[,:]? ?)?"
    r"(?:has |is |was |did |does |had )?(?:not |n't |never |no longer |still |been |got )?"
    r"(?:died|dead|gone|lost|exited|killed|failed|crashed|terminated|stopped|silent|stuck|hung|hangs|missing|answer\w*"
    r"|respond\w*|repl\w+|reachable|unreachable|responsive|late|timed out|refused|attempt|unhealthy|evicted)\b"
    r"(?!.{0,40}\b(?:SIGTERM|signal 15|143)\b)"
)
"""A numbered process in the sentence that reports its end, its silence, or the wait for it. Whoever stops a job ends
all its processes with SIGTERM."""
_NO_PROCESS = re.compile(
    r"(?i)(?:step|epoch|iter\w*|checkpoint|ckpt|batch|shard|attempt|round|update|turn|line|layer|block|gpu|cuda|version"
    r"|v|port|code|signal|error|errno|python|node|exit|sample|prompt|item|file|chunk|page|sequence|request|rank)"
    r"[-_./:# ]?\d+$"
)
"""Numbered things that are no processes."""


def mentioned_service(found: FailureHypothesis, history: JobHistory) -> Culprit | None:
    """Returns the service whose address the lines of a hypothesis name: as the process that announced to listen there,
    else as the address."""
    for text in _texts(found, history):
        for each in _ADDRESS.finditer(text):
            name = _listeners(history).get(each["port"], "")
            return Culprit(None, host=each["host"], name=name or f"{each['host']}:{each['port']}")
    return None


def mentioned_process(found: FailureHypothesis, history: JobHistory) -> Culprit | None:
    """Returns the only numbered process of which the lines of a hypothesis, or the last lines of a file, report an end,
    a silence or a wait; None if there is none."""
    for text in _texts(found, history):
        named = {each["party"] or each["subject"] for each in _IN_TROUBLE.finditer(text)}
        named = {each for each in named if not _NO_PROCESS.search(each)}
        if len(named) == 1:
            return Culprit(None, name=named.pop())
    return None


def _texts(found: FailureHypothesis, history: JobHistory) -> Iterator[str]:
    yield from (
        each.text for each in found.matches if names_trouble(each.text) or each.rule.signature.role != "context"
    )
    yield from (each.text for each in found.facts)
    yield from (each.text for _, _, each, _ in history.tracebacks)
    for log in history.logs:
        if log.source not in history.old_sources:
            for lines in log.tail_lines.values():
                yield from (each.text for each in reversed(lines) if each.text.strip())


def _listeners(history: JobHistory) -> dict[str, str]:
    """Returns the names of the processes that announced a port on which they serve, by port."""
    found: dict[str, str] = {}
    for each in history.facts("serves"):
        name = each.fields.get("party") or each.origin.role or each.origin.host or PurePosixPath(each.file).stem
        found.setdefault(each.fields["port"], name)
    return found
