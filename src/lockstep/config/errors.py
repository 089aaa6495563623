"""Errors in a run's file: every problem at once, each with field, value, what was expected and a remedy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing that is wrong."""

    field: str
    """Dotted path, e.g. `loss.clip_low`; empty where several fields contradict each other, which the message names."""
    message: str
    hint: str = ""

    def __str__(self) -> str:
        field = f"{self.field}: " if self.field else ""
        return f"{field}{self.message}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(ValueError):
    """The run's file or an override cannot be used; nothing was started.

    Args:
        source: the file, or what else the values came from.
        problems: everything that is wrong, in the order of the file.
    """

    def __init__(self, source: str, problems: list[ConfigProblem]) -> None:
        super().__init__(f"{source}: " + "; ".join(map(str, problems)))
        self.source, self.problems = source, problems
