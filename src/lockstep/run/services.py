"""The services of a run's workers: rooms that do not know each other, brought together."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

from lockstep.rollout.api import EngineAPI
from lockstep.train.api import TrainerAPI
from lockstep.train.service import TrainerService
from lockstep.watch import beacon
from lockstep.weights.shared import SharedWeights

__all__ = ["ENGINE", "POLICY", "PRELOAD", "READER", "EngineAPI", "PolicyAPI", "PolicyService"]

POLICY = "lockstep.run.services:PolicyService"
ENGINE = "lockstep.rollout.service:EngineService"
READER = "lockstep.weights.shared:Reader"
PRELOAD = ("torch", "transformers", "lockstep.run.services", "lockstep.rollout.service")
"""What the template process imports, for trainer ranks and engines alike."""


class PolicyAPI(TrainerAPI):
    """A trainer rank whose weights are published."""

    @abstractmethod
    def open_weights(self, folder: str) -> None:
        """Opens the weight store that the controller made."""

    @abstractmethod
    def write_weights(self, version: int) -> None:
        """Writes this rank's rows into the store's inactive buffer, as `version`."""


class PolicyService(TrainerService, PolicyAPI):
    """A trainer rank of the policy."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._weights: SharedWeights | None = None

    def open_weights(self, folder: str) -> None:
        self._weights = SharedWeights.open(Path(folder), generation=self.generation)

    def write_weights(self, version: int) -> None:
        if self._weights is None:
            raise RuntimeError("no weight store is open; call open_weights() first")
        beacon.current().stage("publish")
        self._weights.write_shards(self.rank, version, self.trainer.shards())

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()
        super().close()
