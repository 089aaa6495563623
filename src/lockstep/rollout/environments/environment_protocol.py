"""What a user's environment is: one object per conversation, with `reset` and `step`, plain or async."""

import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.data.samples import Prompt


@dataclass(slots=True)
class Observation:
    """The reply of an environment."""

    text: str | None = None
    """A message for the model, as a user's turn (or as it is, if prompts are plain text)."""
    messages: list[dict[str, Any]] | None = None
    """Instead of `text`: turns with `role` and `content`, which the chat template renders."""
    reward: float = 0.0
    """The reward of the turn."""
    done: bool = False
    """Whether the conversation ends here; the model does not read the message then."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to be summed over the conversation and logged as `environment/NAME`."""

    def turns(self, role: str = "user") -> list[dict[str, Any]]:
        """The observation as messages."""
        if self.messages is not None:
            return self.messages
        return [] if self.text is None else [{"role": role, "content": self.text}]


class Environment(Protocol):
    """Made anew for every conversation, as `Class(**arguments)`. Both methods may be `async`.

    It must be deterministic: if its process is lost, or if a conversation branches, `reset` and the steps so far are
    repeated in a new one with the same prompt and actions. An optional method `close()` is called at the end.
    """

    def reset(self, prompt: Prompt) -> "Observation | str | Awaitable[Observation | str | None] | None":
        """Starts a conversation; the model reads the result after the prompt. Optional."""

    def step(self, action: str) -> "Observation | str | Awaitable[Observation | str]":
        """Replies to a turn of the model, given as decoded text."""


class BadObservation(ValueError):
    """An environment returned something that is not an observation."""


def to_observation(value: object, after: str) -> Observation:
    """Checks and converts the result of a method.

    Args:
        after: the method's name, for errors.

    Raises:
        BadObservation: it is not an observation; with what was returned and what is expected.
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
            raise BadObservation(f"{after}: {message!r} is not a message with role and content")
    if after == "step" and not value.done and not value.turns():
        raise BadObservation("step returned an observation that is neither done nor has anything to read")
    value.reward = float(value.reward)
    value.metrics = {str(name): float(number) for name, number in value.metrics.items()}
    return value
