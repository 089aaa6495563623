"""A trainer rank of a run: the train room's service, with the weight room's store beside it."""

from pathlib import Path
from typing import Any

from lockstep.run.services import PolicyAPI
from lockstep.train.service import TrainerService
from lockstep.watch import beacon, recorder
from lockstep.weights.shared import SharedWeights


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
        recorder.check()
        beacon.current().stage("publish")
        complete = self.config.weights.check == "complete"
        self._weights.write_shards(self.rank, version, self.trainer.shards(), complete)

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()
        super().close()
