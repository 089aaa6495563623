"""What a user's environment is: one object per conversation, with `reset` and `step`, plain or async."""

import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.data.samples import Prompt


@dataclass(slots=True)
class Observation:
    """What the environment answers."""

    text: str | None = None
    """For the model to read, as a user's turn (or just so, where prompts are plain text)."""
    messages: list[dict[str, Any]] | None = None
    """Instead of `text`: turns with `role` and `content`, which the chat template renders."""
    reward: float = 0.0
    """For the turn that was answered."""
    done: bool = False
    """Whether the conversation ends here; what there is to read is then not read."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that are summed over the conversation and logged as `environment/NAME`."""

    def turns(self, role: str = "user") -> list[dict[str, Any]]:
        """What there is to read as messages."""
        if self.messages is not None:
            return self.messages
        return [] if self.text is None else [{"role": role, "content": self.text}]


class Environment(Protocol):
    """Made anew for every conversation, `Class(**arguments)`. Both methods may be `async`.

    With the same prompt and actions it must answer the same: where its process is lost, or a conversation branches,
    `reset` and the steps so far are done again in a new one. A method `close()` is called at the end, where it has one.
    """

    def reset(self, prompt: Prompt) -> "Observation | str | Awaitable[Observation | str | None] | None":
        """Begins a conversation; what it returns is read after the prompt. Optional."""

    def step(self, action: str) -> "Observation | str | Awaitable[Observation | str]":
        """Answers a turn of the model, the decoded text."""


class BadObservation(ValueError):
    """An environment returned something else than an observation."""


def to_observation(value: object, after: str) -> Observation:
    """What a method returned, checked.

    Args:
        after: the method's name, for errors.

    Raises:
        BadObservation: it is none; says what was returned and what is expected.
    """
    if isinstance(value, str):
        value = Observation(value)
    if value is None and after == "reset":
        return Observation()
    if not isinstance(value, Observation):
        raise BadObservation(f"{after} returned {type(value).__name__}, expected an Observation or text")
    if value.text is not None and not isinstance(value.text, str):
        raise BadObservation(f"{after}: the observation's text is {type(value.text).__name__}")
    if not isinstance(value.reward, int | float) or not math.isfinite(value.reward):
        raise BadObservation(f"{after}: the reward {value.reward!r} is not a finite number")
    for message in value.messages or []:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadObservation(f"{after}: {message!r} is no message with role and content")
    if after == "step" and not value.done and not value.turns():
        raise BadObservation("step returned an observation that is neither done nor has anything to read")
    value.reward = float(value.reward)
    value.metrics = {str(name): float(number) for name, number in value.metrics.items()}
    return value
