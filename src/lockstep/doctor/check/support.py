"""The table of versions that work and of those that do not: data, with sources and dates."""

import datetime
from functools import cache
from importlib import resources
from typing import Literal

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, field_validator


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    """URL."""
    checked: datetime.date
    """When the source was read."""

    @field_validator("source")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not value.startswith("https://"):
            raise ValueError(f"source {value!r} is no URL")
        return value


class Minimum(_Row):
    """The oldest version that this package works with."""

    name: str
    least: str
    why: str


class Driver(_Row):
    """The oldest driver that runs programs of a major CUDA release."""

    cuda: str
    least: str


class Bad(_Row):
    """A combination that is known to fail."""

    id: str
    when: dict[str, str]
    """By name, the versions (PEP 440)."""
    severity: Literal["error", "warning", "note"]
    seen: str
    """With {name} for the installed version."""
    why: str
    fix: str

    @field_validator("when")
    @classmethod
    def _specifiers(cls, value: dict[str, str]) -> dict[str, str]:
        for text in value.values():
            SpecifierSet(text)
        return value

    def holds(self, installed: dict[str, str | None]) -> bool:
        """Whether this is what is installed."""
        return all(_within(installed.get(name), SpecifierSet(text)) for name, text in self.when.items())


class Support(BaseModel):
    """The whole table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    minimums: tuple[Minimum, ...]
    drivers: tuple[Driver, ...]
    bad: tuple[Bad, ...]


@cache
def support() -> Support:
    """As it comes with this package."""
    text = resources.files(__package__).joinpath("support.yaml").read_text(encoding="utf-8")
    return Support.model_validate(yaml.safe_load(text))


def parsed(version: str | None) -> Version | None:
    """`6.8.0-45-generic` as 6.8.0; None where it is no version."""
    if version is None:
        return None
    try:
        return Version(version)
    except InvalidVersion:
        head = version.split("-")[0].split("+")[0]
    try:
        return Version(".".join(part for part in head.split(".") if part.isdigit()))
    except InvalidVersion:
        return None


def _within(version: str | None, specifiers: SpecifierSet) -> bool:
    known = parsed(version)
    return known is not None and specifiers.contains(known.base_version, prereleases=True)
