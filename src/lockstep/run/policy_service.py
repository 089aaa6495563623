"""A trainer rank of a run: the train room's service, with the weight room's store beside it."""

from pathlib import Path
from typing import Any

from lockstep.run.place import must_share
from lockstep.run.services import PolicyAPI
from lockstep.train.service import TrainerService
from lockstep.watch import beacon, recorder
from lockstep.weights.shared import SharedWeights
from lockstep.weights.stream.channel import Channel
from lockstep.weights.stream.lots import cut
from lockstep.weights.stream.sender import Sender


class PolicyService(TrainerService, PolicyAPI):
    """A trainer rank of the policy."""

    def __init__(self, run_id: str, **arguments: Any) -> None:
        """`run_id`: as it is in the run's folder, by which a rank knows that it sees that folder. Raises
        FolderNotShared where it does not."""
        super().__init__(**arguments)
        must_share(self.run_folder, run_id)
        self._weights: SharedWeights | None = None
        self._sender: Sender | None = None

    def open_weights(self, folder: str) -> None:
        self._weights = SharedWeights.open(Path(folder), generation=self.generation)

    def write_weights(self, version: int) -> None:
        if self._weights is None:
            raise RuntimeError("no weight store is open; call open_weights() first")
        recorder.check()
        beacon.current().stage("publish")
        complete = self.config.weights.check == "complete"
        self._weights.write_shards(self.rank, version, self.trainer.shards(), complete)

    def stream_weights(self, channel: Channel, version: int) -> str:
        if self._weights is None:
            raise RuntimeError("no weight store is open, whose plan this goes by; call open_weights() first")
        recorder.check()
        beacon.current().stage("publish")
        if self._sender is None:
            self._sender = Sender(self.rank, self.device)
        plan = self._weights.plan
        buckets = [[(each.name, each.torch_dtype) for each in lot.entries] for lot in cut(plan, channel.bucket_bytes)]
        gathered = self.trainer.gathered(buckets, everyone=channel.way == "cuda_ipc")
        return self._sender.send(channel, plan, version, gathered)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._weights is not None:
            self._weights.close()
        super().close()
