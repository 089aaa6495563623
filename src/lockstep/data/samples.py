"""The data types: prompts, completions, groups, rollouts, documents.

All are plain dataclasses of numpy arrays and JSON-like values, so that they travel between processes
and into the ledger without pickle.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
EpisodeEnd = Literal["answer", "environment", "turns", "tokens", "error", "abort"]
"""Why a conversation with an environment ended: the model's turn called no tool, the environment ended it,
a limit of turns or of tokens, a failure of the environment, or the run."""


@dataclass(slots=True)
class Prompt:
    """A prompt ready to be completed."""

    uid: str
    """`"{epoch}:{row}"`: names this use of this row; a run uses each uid once."""
    row: int
    """Row of the dataset."""
    tokens: np.ndarray
    """int32 `[prompt tokens]`."""
    text: str
    messages: list[dict[str, Any]] | None = None
    """The conversation as it stood in the data, where it was one."""
    answer: Any = None
    """Ground truth for the verifiers, None where the data has none."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Every column of the row but the prompt (and the completion), the answer's included, as it is: handed to
    reward functions."""


@dataclass(slots=True)
class Episode:
    """A conversation between the model and an environment, turn by turn, without the tokens."""

    messages: list[dict[str, Any]]
    """The messages after the prompt, with `role` and `content`: the model's and the environment's."""
    rewards: list[float]
    """The environment's reward for each of the model's turns that it answered."""
    ended: EpisodeEnd
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts of what happened, such as `calls` of tools and their `errors`."""

    @property
    def turns(self) -> int:
        """Turns of the model."""
        return sum(message.get("role") == "assistant" for message in self.messages)


@dataclass(slots=True)
class Completion:
    """One completion of a prompt, with what is needed to learn from it."""

    request: str
    """Id of the request it answers."""
    tokens: np.ndarray
    """int32 `[tokens]`, the end-of-sequence token included where it was generated."""
    logprobs: np.ndarray
    """float32 `[tokens]`, under the distribution that was sampled from; 0 where an environment wrote the token."""
    versions: np.ndarray
    """int32 `[tokens]`: the weights version that made each token; -1 where an environment wrote it."""
    finish: FinishReason
    text: str
    """Decoded without special tokens. Of a conversation with an environment the model's last turn, which has the
    answer; all of it is in `episode`."""
    mask: np.ndarray | None = None
    """bool `[tokens]`: False where an environment wrote the token, which is not learned; None: the model wrote all."""
    episode: Episode | None = None
    """None without an environment."""

    @property
    def generated(self) -> int:
        """Tokens that the model wrote: lengths, limits and denominators count these."""
        return len(self.tokens) if self.mask is None else int(np.count_nonzero(self.mask))

    def own(self, values: np.ndarray) -> np.ndarray:
        """The per-token values `[tokens]` of the tokens that the model wrote."""
        return values if self.mask is None else values[self.mask]


@dataclass(slots=True)
class Group:
    """The completions of one prompt, and their rewards once they are scored."""

    prompt: Prompt
    completions: list[Completion]
    rewards: np.ndarray | None = None
    """float32 `[completions]`."""
    breakdown: dict[str, np.ndarray] = field(default_factory=dict)
    """Unweighted value of each reward term, float32 `[completions]`."""


@dataclass(slots=True)
class Rollouts:
    """The completions of one step: groups of equal size."""

    step: int
    version: int
    """Weights version current when the step's generation began."""
    groups: list[Group]

    @property
    def rewards(self) -> np.ndarray:
        """float32 `[groups, group size]`; ValueError while a group is not scored."""
        rows = [group.rewards for group in self.groups if group.rewards is not None]
        if len(rows) != len(self.groups):
            raise ValueError(f"{len(self.groups) - len(rows)} of {len(self.groups)} groups are not scored")
        return np.stack(rows)


@dataclass(slots=True)
class Document:
    """One sample of supervised fine-tuning."""

    uid: str
    row: int
    tokens: np.ndarray
    """int32 `[tokens]`."""
    loss_mask: np.ndarray
    """bool `[tokens]`: which tokens are targets; the first never is."""
