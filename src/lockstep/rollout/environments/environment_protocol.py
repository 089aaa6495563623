"""The interface of users' environments (one object per conversation, with methods `reset` and `step`), and the messages
between the environment pool and its processes.
"""

import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.base.errors import PicklableError
from lockstep.base.text import count_noun
from lockstep.cluster.protocol import concurrent
from lockstep.cluster.user_code import UserCodeError
from lockstep.config.vision import ImageDataConfig
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
    """Whether the conversation ends; the model then does not read the message."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to be summed over the conversation and logged as `environment/NAME`."""
    images: list[Any] = field(default_factory=list)
    """Images for the model, each a path, bytes, a `data:` URL or an image of Pillow: where the text has the markers
    `<image>`, else before it. Messages may have them in parts instead: `{"type": "image", "image": ...}`."""

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


@dataclass(frozen=True, slots=True)
class ObservationLimits:
    """What the images of an observation may be."""

    base: Path = Path()
    """The folder that relative paths start from."""
    images: int = 0
    """The most images of a conversation."""
    max_pixels: int = ImageDataConfig().max_pixels_in_file
    """The most pixels of an image."""


def to_observation(value: object, method: str, limits: ObservationLimits = ObservationLimits()) -> Observation:
    """Checks and converts the result of a method. Images become the content of files, in parts of messages.

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
    if value.images and value.text is None and value.messages is None:
        value.text = ""
    if method == "step" and not value.done and not value.turns():
        raise BadObservation("step returned an observation that is not done but has neither text nor messages")
    _read_images(value, method, limits)
    value.reward = float(value.reward)
    value.metrics = {str(name): float(number) for name, number in value.metrics.items()}
    return value


def _read_images(observation: Observation, method: str, limits: ObservationLimits) -> None:
    """Replaces the images of an observation by the content of their files. Raises BadObservation."""
    contents = [message["content"] for message in observation.messages or []]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    if not observation.images and all(part.get("type", "text") == "text" for part in parts):
        return
    if observation.done:  # the model does not read it
        observation.messages, observation.images = None, []
        return
    from lockstep.data.images.observation_images import UnusableObservation, image_parts, with_image_files

    try:
        messages = with_image_files(observation.turns(), observation.images, limits.base, limits.max_pixels)
    except UnusableObservation as error:
        raise BadObservation(f"{method}: {error}") from error
    if (count := len(image_parts(messages))) > limits.images:
        raise BadObservation(
            f"{method} returned {count_noun(count, 'image')}, and rollout.environment.max_images is {limits.images}: "
            "set it to the most images of a conversation"
        )
    observation.text, observation.messages, observation.images = None, messages, []


ENVIRONMENT_SERVICE = "lockstep.rollout.environments.environment_service:EnvironmentService"


@dataclass(slots=True)
class ReplayedAction:
    """An earlier action, and the digest of the observation that it must give again when it is repeated."""

    action: str
    digest: int


@dataclass(slots=True)
class EnvironmentTask:
    """A call of `reset` or `step`."""

    number: int
    episode: str
    action: str | None
    """The action for `step`; None for `reset`."""
    prompt: Prompt | None = None
    """Set if the process does not know the episode, which `history` then restores."""
    history: list[ReplayedAction] = field(default_factory=list)
    begun: int | None = None
    """Digest of the observation of `reset`; None before `reset`."""


@dataclass(slots=True)
class EnvironmentFailure:
    """An environment's failure to return an observation."""

    problem: str
    traceback: str | None = None
    """Starts at the first frame of the user's code."""


@dataclass(slots=True)
class TaskResult:
    """The result of a task."""

    number: int
    observation: Observation | None = None
    failure: EnvironmentFailure | None = None
    """None if there is an observation."""
    digest: int = 0
    """Digest of the observation."""


@dataclass(slots=True)
class RunningTask:
    """A task that has not finished."""

    number: int
    seconds: float
    """For how long the task has been running."""
    holding: bool
    """Whether the task blocks the process: a plain function, or an async one that does not await."""


@dataclass(slots=True)
class TaskUpdate:
    """The results since the last acknowledged one, and the running tasks."""

    sequence: int
    """Number of the last result since the process started."""
    answers: list[TaskResult]
    running: list[RunningTask]


@dataclass(slots=True)
class LoadedEnvironment:
    """What the pool needs to know of the user's code, or why the code could not be loaded."""

    resets: bool = False
    """Whether the environment has a `reset`."""
    role: Literal["user", "tool"] = "user"
    """The role of the environment's messages."""
    failure: EnvironmentFailure | None = None


class EnvironmentAPI(Protocol):
    """Calls to an environment process."""

    def prepare(self) -> LoadedEnvironment:
        """Loads the user's class or functions, and sets the memory limit."""

    def submit(self, tasks: list[EnvironmentTask]) -> None:
        """Queues tasks; they run between calls."""

    def forget(self, episodes: list[str]) -> None:
        """Closes the environments of ended conversations."""

    @concurrent
    def collect(self, ack: int = 0) -> TaskUpdate:
        """Returns the results after `ack`, the `sequence` of the newest update that arrived. Answered at any time."""


class EnvironmentCodeError(UserCodeError):
    """An environment or tool cannot be used. Names it, the problem and a fix."""

    noun = "environment"
    expected = "class or function"


class EnvironmentFailed(PicklableError, RuntimeError):
    """An environment or tool failed, and by the config this ends the run."""

    def __init__(self, path: str, problem: str, sample: str = "", turn: int = 0, traceback: str | None = None) -> None:
        where = f"\n  sample: {sample}, turn {turn}" if sample else ""
        trace = f"\n\n{traceback.rstrip()}" if traceback else ""
        super().__init__(f"environment {path}: {problem}{where}{trace}")
        self.path, self.problem, self.sample, self.turn, self.traceback = path, problem, sample, turn, traceback
