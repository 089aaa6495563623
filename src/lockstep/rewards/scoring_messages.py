"""The messages between the scorer pool and its processes, and the errors of reward terms."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from lockstep.cluster.user_code import UserCodeError
from lockstep.data.samples import Episode, Prompt

FunctionSignature = Literal["trl", "vlm_r1", "verl", "verl_batch", "openrlhf"]


@dataclass(slots=True)
class RewardSample:
    """One completion to be scored."""

    prompt: int
    """Position of its prompt in the batch."""
    index: int
    """Number of the completion in its group."""
    text: str
    tokens: np.ndarray
    """int32 `[tokens]`, including those of an environment."""
    generated: int
    """Number of tokens that the model generated."""
    episode: Episode | None = None
    """The conversation with an environment, if there is one; `text` is its last turn."""


@dataclass(slots=True)
class ScoringBatch:
    """Completions that are scored in one call, and their prompts (one per group)."""

    step: int
    prompts: list[Prompt]
    samples: list[RewardSample]

    def __len__(self) -> int:
        return len(self.samples)

    def pairs(self) -> Iterator[tuple[Prompt, RewardSample]]:
        for sample in self.samples:
            yield self.prompts[sample.prompt], sample

    def uid(self, position: int) -> str:
        """`"{prompt uid}#{index in the group}"`."""
        sample = self.samples[position]
        return f"{self.prompts[sample.prompt].uid}#{sample.index}"

    def label(self) -> str:
        """`sample 0:1#0`, or `4 samples, 0:1#0 to 0:2#1`."""
        last = len(self) - 1
        return f"sample {self.uid(0)}" if last == 0 else f"{last + 1} samples, {self.uid(0)} to {self.uid(last)}"

    def part(self, start: int, size: int) -> "ScoringBatch":
        """A batch of at most `size` samples from `start` on, with all prompts."""
        return ScoringBatch(self.step, self.prompts, self.samples[start : start + size])

    def single(self, position: int) -> "ScoringBatch":
        """A batch of only the sample at this position."""
        sample = self.samples[position]
        return ScoringBatch(self.step, [self.prompts[sample.prompt]], [replace(sample, prompt=0)])


@dataclass(slots=True)
class TermFailure:
    """Why a term gave no reward."""

    problem: str
    position: int | None = None
    """Position of the sample in the batch; None if the whole batch failed."""
    returned: str | None = None
    """What the function returned, shortened."""
    traceback: str | None = None
    """Starts at the first frame of user code."""
    count: int = 1
    """Number of failed samples, starting at `position`, if they went to a server together."""


@dataclass(slots=True)
class TermScores:
    """The result of one term for one batch."""

    values: list[float | None] = field(default_factory=list)
    """Per sample; None where the term does not apply to it."""
    extras: dict[str, list[float | None]] = field(default_factory=dict)
    """Other numbers that a function reported, per sample; they go to the breakdown as `term/key`."""
    failure: TermFailure | None = None
    """Set instead of `values` if the term failed."""

    def normalize(self, mean: float, std: float) -> None:
        """Subtracts the mean from the values and divides them by the standard deviation; the values as they were become
        the extra `score`."""
        self.extras["score"] = self.values
        self.values = [None if value is None else (value - mean) / std for value in self.values]


@dataclass(slots=True)
class TermInfo:
    """A term that is ready."""

    name: str
    function: str
    """Its name in errors: the configured path of a user's function, else the kind."""
    signature: FunctionSignature | None
    """None for the verifiers."""
    per_sample: bool
    """Whether the term reports progress after each sample, or only after the batch."""
    limit_s: float = 0.0
    """Longest time without a finished sample that the term itself allows, if above `reward.timeout_s`."""


@dataclass(slots=True)
class PreparedTerms:
    """The terms that are ready, or why one cannot be used."""

    terms: list[TermInfo] = field(default_factory=list)
    function: str | None = None
    """Name of the term that cannot be used."""
    failure: TermFailure | None = None


@dataclass(frozen=True, slots=True)
class DataColumns:
    """What a dataset offers to reward functions."""

    path: str
    """The dataset, for error messages."""
    names: tuple[str, ...]
    """The columns besides the prompt's."""
    has_answer: bool
    has_truth: bool
    """Whether there is an answer, or a `reward_model` with a ground truth."""


class ScorerAPI(Protocol):
    """Calls to a scorer process."""

    def prepare(self) -> PreparedTerms:
        """Loads the terms, including users' modules, and applies the memory limit."""

    def score(self, term: int, batch: ScoringBatch) -> TermScores:
        """Scores a batch with one term."""


class TermError(UserCodeError):
    """A term cannot be used as configured. Names the term, the problem and a fix."""

    noun = "reward"


class RewardError(RuntimeError):
    """A sample has no valid reward."""

    def __init__(
        self,
        function: str,
        problem: str,
        uid: str | None = None,
        row: int | None = None,
        completion: str | None = None,
        returned: str | None = None,
        traceback: str | None = None,
    ) -> None:
        lines = [f"reward {function}: {problem}"]
        if uid is not None:
            lines.append(f"  sample: {uid} (row {row} of the data)")
        if completion is not None:
            lines.append(f"  completion: {_shortened(completion)!r}")
        if returned is not None:
            lines.append(f"  returned: {returned}")
        if traceback:
            lines.append(f"\n{traceback.rstrip()}")
        super().__init__("\n".join(lines))
        self.function, self.problem, self.uid, self.row = function, problem, uid, row
        self.completion, self.returned, self.traceback = completion, returned, traceback


def _shortened(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def read_api_key(name: str | None, term: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Reads an API key from an environment variable. Raises TermError if it is missing or not a valid header value."""
    if name is None:
        return None
    key = environment.get(name, "").strip()
    if not key:
        what = "is empty" if name in environment else "is not set"
        remedy = "export it, name another one in api_key_env, or set api_key_env to null for a server that needs no key"
        raise TermError(term, f"the environment variable {name}, which should hold the key, {what}", remedy)
    if not key.isascii() or not key.isprintable() or " " in key:
        raise TermError(
            term,
            f"the environment variable {name} contains characters that are not allowed in a key",
            "export it again",
        )
    return key
