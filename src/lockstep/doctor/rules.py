"""The knowledge base in memory: files read, checked, and indexed by the literals that the prefilter looks for."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lockstep.doctor.literals import SHORTEST, literals
from lockstep.doctor.schema import Condition, Culprit, Knowledge, Signature

HOME = Path(__file__).parent / "knowledge"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class BadRule(ValueError):
    """A knowledge file that is not of the schema.

    Attributes:
        file: Of the rule.
        rule: Its id, or "" where the file as a whole is meant.
        key: The key, dotted.
        why: What is wrong with it.
    """

    def __init__(self, file: Path, rule: str, key: str, why: str) -> None:
        self.file, self.rule, self.key, self.why = file, rule, key, why
        place = ": ".join(part for part in (str(file), rule and f"rule {rule!r}", key) if part)
        super().__init__(f"{place}: {why}")


@dataclass(frozen=True)
class Rule:
    """A signature with the file that it stands in."""

    signature: Signature
    about: Knowledge

    @property
    def id(self) -> str:
        return self.signature.id

    @property
    def cls(self) -> str | None:
        return self.about.cls

    @cached_property
    def regexes(self) -> tuple[re.Pattern[str], ...]:
        flags = re.MULTILINE if self.signature.lines > 1 or self.signature.match == "exception" else re.NOFLAG
        return tuple(re.compile(each, flags) for each in self.signature.all_patterns)

    @cached_property
    def frames(self) -> re.Pattern[str] | None:
        return None if self.signature.frames is None else re.compile(self.signature.frames, re.MULTILINE)

    def match(self, text: str) -> re.Match[str] | None:
        for each in self.regexes:
            found = each.search(text)
            if found:
                return found
        return None

    def fields(self, found: re.Match[str]) -> dict[str, str]:
        """Groups that took part in a match; of who is to blame all that the text names, where the rule asks for all."""
        fields = {name: value for name, value in found.groupdict().items() if value}
        culprit = self.signature.culprit
        if isinstance(culprit, Culprit) and culprit.all and not culprit.facts:
            for name in {culprit.group} if isinstance(culprit.group, str) else culprit.group:
                values = (each.groupdict().get(name) for each in found.re.finditer(found.string, found.start()))
                fields |= {name: ", ".join(dict.fromkeys(each for each in values if each))} if name in fields else {}
        return fields


@dataclass(frozen=True)
class Rules:
    rules: tuple[Rule, ...]

    @cached_property
    def by_id(self) -> Mapping[str, Rule]:
        return {each.id: each for each in self.rules}

    @cached_property
    def by_literal(self) -> Mapping[str, tuple[Rule, ...]]:
        """Rules for lines, by each text that they need one of."""
        found: dict[str, list[Rule]] = {}
        for rule in self.rules:
            if rule.signature.match == "line":
                for text in _literals(rule):
                    found.setdefault(text, []).append(rule)
        return {text: tuple(each) for text, each in found.items()}

    @cached_property
    def exceptions(self) -> tuple[Rule, ...]:
        return tuple(each for each in self.rules if each.signature.match == "exception")

    @cached_property
    def about(self) -> Mapping[str, Knowledge]:
        """By class, the first file of it."""
        found: dict[str, Knowledge] = {}
        for rule in self.rules:
            if rule.cls is not None:
                found.setdefault(rule.cls, rule.about)
        return found


def load(*folders: Path) -> Rules:
    """The knowledge of the package and of further folders; a rule there replaces one of the same id.

    Raises:
        BadRule: A file is not of the schema.
        OSError: A folder or file cannot be read.
    """
    found: dict[str, Rule] = {}
    for folder in (HOME, *folders):
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder of rules")
        here: dict[str, Path] = {}
        for file in sorted((*folder.glob("*.yaml"), *folder.glob("*.yml"))):
            for rule in _read(file):
                if rule.id in here:
                    raise BadRule(file, rule.id, "id", f"is used in {here[rule.id]} as well")
                here[rule.id] = file
                found[rule.id] = rule
    rules = Rules(tuple(found.values()))
    _check_references(rules)
    return rules


def _read(file: Path) -> Iterable[Rule]:
    try:
        said = yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRule(file, "", "", f"is not YAML: {error}") from error
    if not isinstance(said, dict):
        raise BadRule(file, "", "", "holds no mapping")
    try:
        about = Knowledge.model_validate(said)
    except ValidationError as error:
        raise _bad(file, said, error) from error
    rules = [Rule(each, about) for each in about.signatures]
    for rule in rules:
        if rule.signature.match == "line":
            try:
                _literals(rule)
            except ValueError as error:
                raise BadRule(file, rule.id, "pattern", str(error)) from error
    return rules


def _literals(rule: Rule) -> tuple[str, ...]:
    if rule.signature.literals:
        if min(map(len, rule.signature.literals)) < SHORTEST:
            raise ValueError(f"literals of less than {SHORTEST} characters")
        return tuple(each.lower() for each in rule.signature.literals)
    return tuple(dict.fromkeys(text for each in rule.signature.all_patterns for text in literals(each)))


def _bad(file: Path, said: dict[str, Any], error: ValidationError) -> BadRule:
    """The first thing that is wrong, with the id of the rule that it is in."""
    first = error.errors()[0]
    place = [str(each) for each in first["loc"]]
    rule = ""
    if len(place) > 1 and place[0] == "signatures" and place[1].isdigit():
        entry = said["signatures"][int(place[1])]
        rule = str(entry.get("id", f"number {int(place[1]) + 1}")) if isinstance(entry, dict) else ""
        place = place[2:]
    why = "is no known key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    return BadRule(file, rule, ".".join(place), why)


def _check_references(rules: Rules) -> None:
    facts = {each.signature.fact for each in rules.rules if each.signature.fact}
    classes = set(rules.about)
    for rule in rules.rules:
        for key in ("needs", "unless"):
            for each in _flat(getattr(rule.signature, key)):
                name = each if isinstance(each, str) else each.id
                if name is not None and name not in rules.by_id:
                    raise BadRule(HOME, rule.id, key, f"there is no rule {name!r}")
                if isinstance(each, Condition) and each.fact is not None and each.fact not in facts:
                    raise BadRule(HOME, rule.id, key, f"there is no fact {each.fact!r}; known are {sorted(facts)}")
        culprit = rule.signature.culprit
        for name in culprit.facts if isinstance(culprit, Culprit) else ():
            if name not in facts:
                raise BadRule(HOME, rule.id, "culprit", f"there is no fact {name!r}; known are {sorted(facts)}")
        for name in rule.signature.explains:
            if name not in rules.by_id and name not in classes:
                raise BadRule(HOME, rule.id, "explains", f"{name!r} is neither a rule nor a class with rules")


def _flat(conditions: Iterable[Condition | str]) -> Iterable[Condition | str]:
    for each in conditions:
        if isinstance(each, Condition) and each.any:
            yield from _flat(each.any)
        else:
            yield each
