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
    """An action that was answered before, and a digest of the answer: it must be the same when it is done again."""

    action: str
    digest: int


@dataclass(slots=True)
class EnvironmentTask:
    """One answer that is wanted."""

    number: int
    episode: str
    action: str | None
    """None for the beginning."""
    prompt: Prompt | None = None
    """Where the process does not know the episode; with it `history`, which brings it to where it was."""
    history: list[ReplayedAction] = field(default_factory=list)
    begun: int | None = None
    """Digest of what `reset` answered; None while it was not asked."""


@dataclass(slots=True)
class EnvironmentFailure:
    """Why there is no answer."""

    problem: str
    traceback: str | None = None
    """From the user's first frame on."""


@dataclass(slots=True)
class TaskResult:
    number: int
    observation: Observation | None = None
    failure: EnvironmentFailure | None = None
    """Instead of an observation."""
    digest: int = 0


@dataclass(slots=True)
class RunningTask:
    """A task under way."""

    number: int
    seconds: float
    holding: bool
    """Whether it has the process for itself now: a plain function, or an async one that does not await."""


@dataclass(slots=True)
class TaskUpdate:
    """What finished since the last acknowledged answer, and what is under way."""

    sequence: int
    answers: list[TaskResult]
    running: list[RunningTask]


@dataclass(slots=True)
class LoadedEnvironment:
    """Either the user's code is loaded, or why not."""

    resets: bool = False
    """Whether the environment has anything to do at the beginning."""
    role: Literal["user", "tool"] = "user"
    """Whose turn an answer is."""
    failure: EnvironmentFailure | None = None


class EnvironmentAPI(Protocol):
    """Calls to an environment process."""

    def prepare(self) -> LoadedEnvironment:
        """Loads the user's class or functions, and takes on the limit of memory."""

    def submit(self, tasks: list[EnvironmentTask]) -> None:
        """Queues tasks; they are done between calls."""

    def forget(self, episodes: list[str]) -> None:
        """Closes the environments of conversations that are over."""

    @concurrent
    def collect(self, ack: int = 0) -> TaskUpdate:
        """What finished since `ack`, the `sequence` of the newest News that arrived; answers at any time."""


class EnvironmentCodeError(UserCodeError):
    """An environment or tool that cannot be used: which one, what is wrong, what would help."""

    noun = "environment"
    wanted = "class or function"


class EnvironmentFailed(PicklableError, RuntimeError):
    """An environment or tool did not answer, and the config says that this ends the run."""

    def __init__(self, path: str, problem: str, sample: str = "", turn: int = 0, traceback: str | None = None) -> None:
        where = f"\n  sample: {sample}, turn {turn}" if sample else ""
        trace = f"\n\n{traceback.rstrip()}" if traceback else ""
        super().__init__(f"environment {path}: {problem}{where}{trace}")
        self.path, self.problem, self.sample, self.turn, self.traceback = path, problem, sample, turn, traceback
