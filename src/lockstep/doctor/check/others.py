"""The same look at every host of a run, through the probes that a check starts there, and what differs between them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lockstep.doctor.check.compare import compare
from lockstep.doctor.check.facts import HostFacts, from_json
from lockstep.doctor.check.host import HOST_S, gather, judge
from lockstep.doctor.check.meeting import Head
from lockstep.doctor.check.needs import Needs
from lockstep.doctor.check.protocol import Message
from lockstep.doctor.check.system import System
from lockstep.doctor.check.typed import WORDS, reader
from lockstep.doctor.environment.here import shareable
from lockstep.doctor.environment.lint import Job, Place, lint
from lockstep.doctor.finding import Finding
from lockstep.watch.naming import some

ENVIRONMENT_S = 5.0
_WRONG = ("error", "warning")
_ODD = ValueError, LookupError, TypeError, ArithmeticError, OSError
"""What judging may raise where facts are of the right types and their values are not what any host has."""


@dataclass(frozen=True, slots=True)
class Look:
    """Look at the host, for a run with these needs."""

    needs: Needs
    bound_s: Annotated[float, Field(gt=0, le=60)]


@dataclass(frozen=True, slots=True)
class Variables:
    """Of a host, those that may be shown."""

    variables: dict[str, str]


_look, _variables = reader(Look), reader(Variables)


def answer_look(order: Mapping[str, Any]) -> Message:
    """The probe's side: what is known about its host, or its variables."""
    if order.get("what") == "environment":
        return {"variables": shareable(os.environ)}
    asked = _look(dict(order))
    return gather(System(), asked.needs, asked.bound_s).json()


def look_at(head: Head, names: Sequence[str], needs: Needs) -> tuple[dict[str, HostFacts], dict[str, str]]:
    """By host, what is known about it, all asked at once; and of those that did not say, why."""
    folders = {str(Path(path).absolute()): purpose for path, purpose in needs.folders.items()}
    order = {"do": "look", "needs": asdict(replace(needs, folders=folders)), "bound_s": HOST_S}
    facts, lost = head.ask(dict.fromkeys(names, order), HOST_S + 3.0, "what they find on their hosts", _facts)
    return dict(sorted(facts.items())), lost


def _facts(name: str, answer: Message) -> HostFacts:
    return replace(from_json(answer), host=name)


def compare_environments(head: Head, names: Sequence[str]) -> list[Finding]:
    """What is wrong with the variables that probes have on their hosts, and what differs between them. A warning at
    most where they differ: how a job is started there is not known."""
    order = {"do": "look", "what": "environment"}
    why = "which variables their hosts have"
    told, lost = head.ask(dict.fromkeys(names, order), ENVIRONMENT_S, why, lambda name, answer: _variables(answer))
    places = [Place(name, each.variables) for name, each in sorted(told.items())]
    found = [
        replace(each, severity="warning") if (each.id, each.severity) == ("env-differs", "error") else each
        for each in lint(places, job=Job(several=True))
    ]
    return [
        *found, *(Finding("env-fine", "unchecked", name, f"{name} did not say its variables: {why}")
                  for name, why in lost.items()),
    ]  # fmt: skip


def judge_others(
    facts: Mapping[str, HostFacts], lost: Mapping[str, str], needs: Needs, here: Callable[[str], bool]
) -> list[Finding]:
    """What is wrong on hosts other than this one, the same on several said once, and what differs between all of them.

    Args:
        here: whether a name is of this host, which has been told about already.
    """
    others = {name: known for name, known in facts.items() if not here(name)}
    said: list[Finding] = []
    odd: dict[str, str] = {}
    for name, known in others.items():
        try:
            said += [finding for rung in judge(known, needs).values() for finding in rung]
        except _ODD as error:
            odd[name] = f"what it says cannot be judged: {type(error).__name__}: {error}"[:WORDS]
    wrong = merged([finding for finding in said if finding.severity != "ok"])
    unknown = [
        Finding("host", "unchecked", name, f"{name} did not say what it finds: {why}")
        for name, why in {**lost, **odd}.items()
    ]
    differing = _compared([known for name, known in facts.items() if name not in odd])
    named = {name for each in [*said, *differing] if each.severity in _WRONG for name in each.host.split(",")}
    clean = sorted(set(others) - named - set(odd))
    fine = [Finding("hosts", "ok", ",".join(clean), f"nothing is wrong on {some(clean, 8)}")] if clean else []
    return [*differing, *wrong, *unknown, *fine]


def _compared(facts: Sequence[HostFacts]) -> list[Finding]:
    try:
        return compare(facts)
    except _ODD as error:
        said = f"what differs between hosts cannot be told: {type(error).__name__}: {error}"[:WORDS]
        return [Finding("hosts", "unchecked", "", said)]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding where several hosts say the same."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, host=""), []).append(finding.host)
    return [replace(finding, host=",".join(dict.fromkeys(names))) for finding, names in hosts.items()]
