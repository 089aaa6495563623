"""An open conversation between the model and an environment, as tokens and as messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.data.samples import Completion, Episode, PlacedImage, Prompt
from lockstep.data.turn_tokenizer import TurnTokens
from lockstep.rollout.engine_protocol import Request


@dataclass(slots=True)
class ConversationSegment:
    """Consecutive tokens of the model, or of the environment. All arrays are `[tokens]`."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    by_model: bool
    images: Sequence[PlacedImage] = ()
    """With places in `tokens`."""


@dataclass(slots=True)
class OpenConversation:
    """An open conversation. If conversations branch, one that has not branched yet belongs to several requests."""

    requests: list[Request]
    prompt: Prompt
    queue: str
    seed: int
    segments: list[ConversationSegment] = field(default_factory=list)
    episode: Episode = field(default_factory=lambda: Episode([], [], "abort"))
    turns: int = 0
    """Number of the model's turns that the environment has replied to."""
    engine: int | None = None
    """The engine that has the keys and values of the turns in its cache."""

    @property
    def name(self) -> str:
        return self.requests[0].id

    @property
    def turn_name(self) -> str:
        """Identifies the next answer of the environment."""
        return f"{self.name}/{len(self.segments)}"

    @property
    def size(self) -> int:
        """Number of tokens after the prompt."""
        return sum(segment.tokens.size for segment in self.segments)

    @property
    def last_token(self) -> int:
        return int(self.segments[-1].tokens[-1])

    @property
    def images(self) -> list[PlacedImage]:
        """The images after the prompt, with places after its end."""
        starts = np.cumsum([0, *(segment.tokens.size for segment in self.segments)]).tolist()
        return [
            image.moved(start)
            for segment, start in zip(self.segments, starts, strict=False)
            for image in segment.images
        ]

    def add_environment_tokens(self, added: TurnTokens, messages: Sequence[dict[str, Any]]) -> None:
        count = added.tokens.size
        if count:
            logprobs, versions = np.zeros(count, np.float32), np.full(count, -1, np.int32)
            self.segments.append(ConversationSegment(added.tokens, logprobs, versions, False, added.images))
        self.episode.messages += messages

    def add_turn(self, turn: Completion) -> None:
        """Appends a turn of the model."""
        self.segments.append(ConversationSegment(turn.tokens, turn.logprobs, turn.versions, by_model=True))
        self.episode.messages.append({"role": "assistant", "content": turn.text})

    def add_metrics(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.episode.metrics[name] = self.episode.metrics.get(name, 0.0) + value
