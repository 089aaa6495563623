"""The rows of the index, as they are read back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.data.samples import Rollouts


@dataclass(frozen=True, slots=True)
class Stored:
    """A step file's content."""

    rollouts: Rollouts
    extra: dict[str, Any]
    """What `collected` was given beside them (packing seed, position in the data, ...)."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    step: int
    """The last step whose training is in it; steps after it are trained again from their step files."""
    path: Path
    metric: float | None
    """What `keep_best` compares, higher is better."""
    at: float


@dataclass(frozen=True, slots=True)
class CommitRow:
    step: int
    at: float
    generation: int
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MetricsRow:
    step: int
    at: float
    generation: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion a person can read."""

    prompt: str
    completion: str
    answer: Any = None
    reward: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    """The reward's terms, `exact_match`, by name."""
    uid: str = ""
    """Of the prompt: the same prompt in two evaluations can be put side by side."""
    finish: str = "stop"
    messages: list[dict[str, Any]] | None = None
    """All turns after the prompt, where there was an environment."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    step: int
    at: float
    metrics: dict[str, float]
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class EventRow:
    at: float
    """Seconds since the epoch."""
    generation: int
    kind: str
    fields: dict[str, Any]
