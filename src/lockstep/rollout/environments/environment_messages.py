"""The messages between the environment pool and its processes."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from lockstep.base.errors import PicklableError
from lockstep.cluster.protocol import concurrent
from lockstep.cluster.user_code import UserCodeError
from lockstep.data.samples import Prompt
from lockstep.rollout.environments.environment_protocol import Observation

ENVIRONMENT_SERVICE = "lockstep.rollout.environments.environment_service:EnvironmentService"


@dataclass(slots=True)
class ReplayedAction:
    """An earlier action and the digest of its observation, which must be the same when it is repeated."""

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
    """Set if the process does not know the episode; `history` then restores it."""
    history: list[ReplayedAction] = field(default_factory=list)
    begun: int | None = None
    """Digest of the observation of `reset`; None before it."""


@dataclass(slots=True)
class EnvironmentFailure:
    """Why there is no observation."""

    problem: str
    traceback: str | None = None
    """Starts at the first frame of the user's code."""


@dataclass(slots=True)
class TaskResult:
    number: int
    observation: Observation | None = None
    failure: EnvironmentFailure | None = None
    """The failure that the environment had instead of replying; None if it replied."""
    digest: int = 0


@dataclass(slots=True)
class RunningTask:
    """A running task."""

    number: int
    seconds: float
    holding: bool
    """Whether it blocks the process: a plain function, or an async one that does not await."""


@dataclass(slots=True)
class TaskUpdate:
    """The results since the last acknowledged one, and the running tasks."""

    sequence: int
    answers: list[TaskResult]
    running: list[RunningTask]


@dataclass(slots=True)
class LoadedEnvironment:
    """The loaded code of the user, or why it could not be loaded."""

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
        """The results after `ack`, the `sequence` of the newest update that arrived; answers at any time."""


class EnvironmentCodeError(UserCodeError):
    """An environment or tool that cannot be used: which one, what is wrong, and a fix."""

    noun = "environment"
    expected = "class or function"


class EnvironmentFailed(PicklableError, RuntimeError):
    """An environment or tool failed, and the config says that this ends the run."""

    def __init__(self, path: str, problem: str, sample: str = "", turn: int = 0, traceback: str | None = None) -> None:
        where = f"\n  sample: {sample}, turn {turn}" if sample else ""
        trace = f"\n\n{traceback.rstrip()}" if traceback else ""
        super().__init__(f"environment {path}: {problem}{where}{trace}")
        self.path, self.problem, self.sample, self.turn, self.traceback = path, problem, sample, turn, traceback
