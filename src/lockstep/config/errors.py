"""The error about a run's file, with all its problems: each with field, value, expected value and fix."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One problem of a run's file."""

    field: str
    """Dotted path, e.g. `loss.clip_low`; empty if several fields contradict each other, which the message names."""
    message: str
    hint: str = ""

    def __str__(self) -> str:
        field = f"{self.field}: " if self.field else ""
        return f"{field}{self.message}" + (f" ({self.hint})" if self.hint else "")


class ConfigError(ValueError):
    """The run's file or an override cannot be used; nothing was started.

    Args:
        source: the file, or another source of the values.
        problems: all problems, in the order of the file.
    """

    def __init__(self, source: str, problems: list[ConfigProblem]) -> None:
        super().__init__(f"{source}: " + "; ".join(map(str, problems)))
        self.source, self.problems = source, problems
