"""An engine as the controller sees it: typed calls, no torch."""

from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.cluster.protocol import concurrent
from lockstep.data.samples import Completion
from lockstep.rollout.protocol import EngineProgress, Request

SERVICE = "lockstep.rollout.service:EngineService"


@dataclass(slots=True)
class Collected:
    """Finished completions that were not acknowledged yet, oldest first."""

    sequence: int
    """Number of the last of them since the engine started; acknowledge with it."""
    completions: list[Completion]


class EngineAPI(Protocol):
    """Calls to a `lockstep.rollout.service:EngineService` worker."""

    def submit(self, requests: list[Request]) -> None:
        """Queues requests, all or none. ValueError (BadRequest) names the one that cannot be served."""

    def collect(self, ack: int = 0) -> Collected:
        """What finished since `ack`, the `sequence` of the newest `Collected` that has arrived safely (0: none). The
        answer comes when something has.

        At least once: completions stay until they are acknowledged, so a lost answer loses nothing; who asks
        again with the same `ack` gets them again. Raises what stopped the engine, if something did.
        """

    def abort(self, ids: list[str] | None = None) -> None:
        """Ends requests (all when None); what they had comes with the next `collect`, as `finish="abort"`."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def renew(self) -> None:
        """Forgets all requests, finished ones included; the model stays loaded."""

    def sleep(self, level: int = 1) -> None:
        """Gives memory back while others need it (see `RolloutEngine.sleep`); whatever needs it wakes the engine.
        ValueError where requests are under way."""

    def wake(self) -> None: ...

    def load_weights(self, source: str, version: int) -> None:
        """Takes a version from the weight room's store, between two decode steps."""

    def receive_weights(self, where: dict[str, Any], version: int) -> None:
        """Takes a version as it comes from the trainer's device (see `RolloutEngine.receive_weights`)."""

    def slower(self) -> str:
        """Why it does not decode by the fastest way there is; empty where it does."""

    @concurrent
    def progress(self) -> EngineProgress:
        """Counters; answers at any time."""
