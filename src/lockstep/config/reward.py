"""What completions are rewarded for."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lockstep.config.base import Section


class _Term(Section):
    weight: float = 1.0
    name: str | None = None
    """Name in the metrics; the kind or the function's name when absent."""


def _valid_pattern(pattern: str | None) -> str | None:
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
    return pattern


class ExactMatch(_Term):
    """1 where the (stripped) completion equals the answer."""

    kind: Literal["exact_match"] = "exact_match"
    ignore_case: bool = False
    extract: str | None = None
    """A regular expression whose last match (group 1 where there is one) is compared instead of the whole."""

    _pattern = field_validator("extract")(_valid_pattern)


class Math(_Term):
    """1 where the last expression is mathematically equal to the answer (math-verify)."""

    kind: Literal["math"] = "math"
    numeric_tolerance: float | None = Field(None, ge=0)


class Regex(_Term):
    """1 where the pattern is found (`mode: search`) or spans everything (`mode: fullmatch`)."""

    kind: Literal["regex"] = "regex"
    pattern: str
    mode: Literal["search", "fullmatch"] = "fullmatch"

    _pattern = field_validator("pattern")(_valid_pattern)


class Length(_Term):
    """Linear penalty between `soft` and `hard` tokens, from 0 to -1 (DAPO's soft overlong punishment)."""

    kind: Literal["length"] = "length"
    soft: int = Field(gt=0)
    hard: int = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.soft >= self.hard:
            raise ValueError(f"soft {self.soft} must be less than hard {self.hard}")
        return self


class Function(_Term):
    """A user's function with the signature of TRL, verl or OpenRLHF."""

    kind: Literal["function"] = "function"
    path: str
    """`file.py:name` or `package.module:name`."""
    signature: Literal["auto", "trl", "verl", "openrlhf"] = "auto"
    arguments: dict[str, Any] = {}
    """Extra keyword arguments."""


Term = Annotated[ExactMatch | Math | Regex | Length | Function, Field(discriminator="kind")]


class Reward(Section):
    """A weighted sum of terms, computed in a pool of scorer processes."""

    terms: tuple[Term, ...] = Field(min_length=1)
    workers: int = Field(1, gt=0)
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one call of one function without finishing a sample; its process is then replaced."""
    memory_mb: int | None = Field(None, gt=0)
    """Address space limit of a scorer process."""
    batch_size: int = Field(64, gt=0)
    """Completions per call of a function."""
