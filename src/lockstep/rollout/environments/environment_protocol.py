"""The interface of users' environments: one object per conversation, with methods `reset` and `step`."""

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
    """A user's environment. Every conversation gets a new one, `Class(**arguments)`. Both methods may be `async`.

    An environment must be deterministic: if its process is lost, or if a conversation branches, `reset` and the steps
    so far are repeated in a new environment with the same prompt and actions. An optional method `close()` is called
    at the end.
    """

    def reset(self, prompt: Prompt) -> "Observation | str | Awaitable[Observation | str | None] | None":
        """Starts a conversation; the model reads the result after the prompt.

        An environment without `reset` starts with the prompt alone.
        """

    def step(self, action: str) -> "Observation | str | Awaitable[Observation | str]":
        """Replies to a turn of the model, given as decoded text."""


class BadObservation(ValueError):
    """An environment returned something that is not an observation."""


def to_observation(value: object, method: str) -> Observation:
    """Checks and converts the result of a method.

    Args:
        method: name of the method that returned it, for errors.

    Raises:
        BadObservation: the result is not a valid observation.
    """
    if isinstance(value, str):
        value = Observation(value)
    if value is None and method == "reset":
        return Observation()
    if not isinstance(value, Observation):
        raise BadObservation(f"{method} returned {type(value).__name__}, expected an Observation or text")
    if value.text is not None and not isinstance(value.text, str):
        raise BadObservation(f"{method}: the observation's text must be a string, got {type(value.text).__name__}")
    if not isinstance(value.reward, int | float) or not math.isfinite(value.reward):
        raise BadObservation(f"{method}: the reward {value.reward!r} is not a finite number")
    for message in value.messages or []:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadObservation(f"{method}: {message!r} is not a message with role and content")
    if method == "step" and not value.done and not value.turns():
        raise BadObservation("step returned an observation that is not done but has neither text nor messages")
    value.reward = float(value.reward)
    value.metrics = {str(name): float(number) for name, number in value.metrics.items()}
    return value
