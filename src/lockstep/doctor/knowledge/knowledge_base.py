"""Loads, checks and indexes the knowledge base."""

import errno
import os
import re
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lockstep.config.yaml_text import MalformedYaml, parse_yaml, read_yaml_text
from lockstep.doctor.knowledge.knowledge_schema import (
    CulpritSelector,
    FailureSignature,
    KnowledgeFile,
    RuleCondition,
    SignatureTier,
)
from lockstep.doctor.knowledge.lexical_similarity import DescribedFailure, LexicalIndex
from lockstep.doctor.knowledge.regex_literals import MIN_LITERAL_CHARS, required_literals

KNOWLEDGE_FOLDER = Path(__file__).parent / "data"
LONGEST_REPEAT = 200
"""The longest text that a repeated class of characters in a pattern can match."""
_REPEATED_CLASS = re.compile(r"((?<!\\)(?:\\\\)*\\[wWdDsS]|(?<!\\)\])([+*])")
_SYSTEM_TEXTS = frozenset(
    [os.strerror(each).lower() for each in errno.errorcode]
    + [name.lower() for each in signal.Signals for name in (each.name, signal.strsignal(each) or each.name)]
)
"""What the C library and the shell print for error numbers and signals, whichever program fails."""
_EXCEPTION_CLASS = re.compile(r"\^?[\w()|.?:*+\\]*(?:Error|Exception)[\w()|.?:*+\\]*(?:\\b|\$)?")
"""A pattern for the type of an exception, with whatever message."""
_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class InvalidRule(ValueError):
    """A knowledge file violates the schema.

    Attributes:
        file: The file.
        rule: The id of the rule; "" if the error concerns the whole file.
        key: The dotted key.
        why: The problem.
    """

    def __init__(self, file: Path, rule: str, key: str, why: str) -> None:
        self.file, self.rule, self.key, self.why = file, rule, key, why
        location = ": ".join(part for part in (str(file), rule and f"rule {rule!r}", key) if part)
        super().__init__(f"{location}: {why}")


def bound_repeats(pattern: str) -> str:
    """Returns the pattern with an upper limit for each repeated class of characters, such as `\\w+`.

    A search begins at every character of a line. Without the limit, a pattern that begins with such a class takes
    seconds for a line of 16 KiB without spaces.
    """
    return _REPEATED_CLASS.sub(lambda m: f"{m[1]}{{{'1' if m[2] == '+' else '0'},{LONGEST_REPEAT}}}", pattern)


@dataclass(frozen=True)
class FailureRule:
    """A signature with the file that contains it."""

    signature: FailureSignature
    about: KnowledgeFile

    @property
    def id(self) -> str:
        return self.signature.id

    @property
    def cls(self) -> str | None:
        return self.about.cls

    @cached_property
    def tier(self) -> SignatureTier:
        """How specific the rule is: that of the signature, else derived from its patterns."""
        signature = self.signature
        if signature.tier is not None:
            return signature.tier
        if signature.role == "context":
            return "structure"
        if signature.match == "exception":
            plain = signature.frames is None and all(
                _EXCEPTION_CLASS.fullmatch(each) for each in signature.all_patterns
            )
            return "generic" if plain else "exact"
        system = all(any(text in known for known in _SYSTEM_TEXTS) for text in _rule_literals(self))
        return "generic" if system else "exact"

    @cached_property
    def regexes(self) -> tuple[re.Pattern[str], ...]:
        flags = re.MULTILINE if self.signature.lines > 1 or self.signature.match == "exception" else re.NOFLAG
        return tuple(re.compile(bound_repeats(each), flags) for each in self.signature.all_patterns)

    @cached_property
    def frames(self) -> re.Pattern[str] | None:
        return None if self.signature.frames is None else re.compile(self.signature.frames, re.MULTILINE)

    def match(self, text: str) -> re.Match[str] | None:
        """Matches the patterns with a text, in order."""
        for each in self.regexes:
            found = each.search(text)
            if found:
                return found
        return None

    def fields(self, found: re.Match[str]) -> dict[str, str]:
        """Returns the captured groups. If the rule asks for all culprits, their groups have all values in the text."""
        fields = {name: value for name, value in found.groupdict().items() if value}
        culprit = self.signature.culprit
        if isinstance(culprit, CulpritSelector) and culprit.all and not culprit.facts:
            for name in culprit.groups:
                values = (each.groupdict().get(name) for each in found.re.finditer(found.string, found.start()))
                fields |= {name: ", ".join(dict.fromkeys(each for each in values if each))} if name in fields else {}
        return fields


@dataclass(frozen=True)
class KnowledgeBase:
    """All rules, with indexes."""

    rules: tuple[FailureRule, ...]

    @cached_property
    def by_id(self) -> Mapping[str, FailureRule]:
        return {each.id: each for each in self.rules}

    @cached_property
    def by_literal(self) -> Mapping[str, tuple[FailureRule, ...]]:
        """The rules for lines, by each of the literals of which a match contains at least one."""
        found: dict[str, list[FailureRule]] = {}
        for rule in self.rules:
            if rule.signature.match == "line":
                for text in _rule_literals(rule):
                    found.setdefault(text, []).append(rule)
        return {text: tuple(each) for text, each in found.items()}

    @cached_property
    def exceptions(self) -> tuple[FailureRule, ...]:
        return tuple(each for each in self.rules if each.signature.match == "exception")

    @cached_property
    def lexical_index(self) -> LexicalIndex:
        """The texts of the knowledge base, for lines that no rule matches."""
        return LexicalIndex(self._described())

    def _described(self) -> Iterator[DescribedFailure]:
        for cls, about in self.about.items():
            yield DescribedFailure(cls, f"{about.title}. {about.explanation}")
        for rule in self.rules:
            if rule.cls is not None and rule.signature.role in ("cause", "sign"):
                yield from (DescribedFailure(rule.cls, each) for each in rule.signature.examples)
                if rule.signature.explanation:
                    yield DescribedFailure(rule.cls, rule.signature.explanation)

    def without(self, ids: Collection[str]) -> "KnowledgeBase":
        """Returns the knowledge base without some rules."""
        return KnowledgeBase(tuple(each for each in self.rules if each.id not in ids)) if ids else self

    @cached_property
    def about(self) -> Mapping[str, KnowledgeFile]:
        """The first file of each failure class."""
        found: dict[str, KnowledgeFile] = {}
        for rule in self.rules:
            if rule.cls is not None:
                found.setdefault(rule.cls, rule.about)
        return found


def load_knowledge(*folders: Path) -> KnowledgeBase:
    """Loads the knowledge base of the package and of further folders, whose rules replace those of the same id.

    Raises:
        InvalidRule: A file violates the schema.
        OSError: A folder or file cannot be read.
    """
    found: dict[str, FailureRule] = {}
    for folder in (KNOWLEDGE_FOLDER, *folders):
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder of rules")
        file_of_rule: dict[str, Path] = {}
        for file in sorted((*folder.glob("*.yaml"), *folder.glob("*.yml"))):
            for rule in _read_rules(file):
                if rule.id in file_of_rule:
                    raise InvalidRule(file, rule.id, "id", f"is also used in {file_of_rule[rule.id]}")
                file_of_rule[rule.id] = file
                found[rule.id] = rule
    rules = KnowledgeBase(tuple(found.values()))
    _check_references(rules)
    return rules


def _read_rules(file: Path) -> Iterable[FailureRule]:
    try:
        content = parse_yaml(read_yaml_text(file), str(file), _YAML_LOADER)
    except MalformedYaml as error:
        place = f"line {error.line}: " if error.line else ""
        raise InvalidRule(file, "", "", f"{place}{error.problem}") from error
    if not isinstance(content, dict):
        raise InvalidRule(file, "", "", "is not a mapping")
    try:
        about = KnowledgeFile.model_validate(content)
    except ValidationError as error:
        raise _invalid_rule(file, content, error) from error
    rules = [FailureRule(each, about) for each in about.signatures]
    for rule in rules:
        if rule.signature.match == "line":
            try:
                _rule_literals(rule)
            except ValueError as error:
                raise InvalidRule(file, rule.id, "pattern", str(error)) from error
    return rules


def _rule_literals(rule: FailureRule) -> tuple[str, ...]:
    if rule.signature.literals:
        if min(map(len, rule.signature.literals)) < MIN_LITERAL_CHARS:
            raise ValueError(f"literals of fewer than {MIN_LITERAL_CHARS} characters")
        return tuple(each.lower() for each in rule.signature.literals)
    return tuple(dict.fromkeys(text for each in rule.signature.all_patterns for text in required_literals(each)))


def _invalid_rule(file: Path, content: dict[str, Any], error: ValidationError) -> InvalidRule:
    """Converts the first error of a file, with the id of its rule."""
    first = error.errors()[0]
    path = [str(each) for each in first["loc"]]
    rule = ""
    if len(path) > 1 and path[0] == "signatures" and path[1].isdigit():
        entry = content["signatures"][int(path[1])]
        rule = str(entry.get("id", f"number {int(path[1]) + 1}")) if isinstance(entry, dict) else ""
        path = path[2:]
    why = "is not a known key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    return InvalidRule(file, rule, ".".join(path), why)


def _check_references(rules: KnowledgeBase) -> None:
    """Raises InvalidRule if a rule refers to a rule, fact or class that does not exist."""
    facts = {each.signature.fact for each in rules.rules if each.signature.fact}
    classes = set(rules.about)
    for rule in rules.rules:
        for key in ("needs", "unless"):
            for each in _flatten(getattr(rule.signature, key)):
                name = each if isinstance(each, str) else each.id
                if name is not None and name not in rules.by_id:
                    raise InvalidRule(KNOWLEDGE_FOLDER, rule.id, key, f"there is no rule {name!r}")
                if isinstance(each, RuleCondition) and each.fact is not None and each.fact not in facts:
                    raise InvalidRule(
                        KNOWLEDGE_FOLDER, rule.id, key, f"there is no fact {each.fact!r}; known are {sorted(facts)}"
                    )
        culprit = rule.signature.culprit
        for name in culprit.facts if isinstance(culprit, CulpritSelector) else ():
            if name not in facts:
                raise InvalidRule(
                    KNOWLEDGE_FOLDER, rule.id, "culprit", f"there is no fact {name!r}; known are {sorted(facts)}"
                )
        for name in rule.signature.explains:
            if name not in rules.by_id and name not in classes:
                raise InvalidRule(
                    KNOWLEDGE_FOLDER, rule.id, "explains", f"{name!r} is neither a rule nor a class with rules"
                )


def _flatten(conditions: Iterable[RuleCondition | str]) -> Iterable[RuleCondition | str]:
    for each in conditions:
        if isinstance(each, RuleCondition) and each.any:
            yield from _flatten(each.any)
        else:
            yield each
