"""The trainer ranks of a run: of any trained role, and of the policy, which also publishes its weights."""

import time
from pathlib import Path
from typing import Any

from lockstep.run.policy_api import PolicyAPI
from lockstep.run.run_id import check_folder_shared
from lockstep.train.trainer_service import TrainerService
from lockstep.watch.beacon.span_ring import SpanKind
from lockstep.watch.beacon.writer import current_beacon
from lockstep.watch.recorder import recorder
from lockstep.weights.stream.channel import StreamChannel
from lockstep.weights.stream.tensor_buckets import cut_buckets
from lockstep.weights.stream.weight_stream import StreamSender
from lockstep.weights.weight_store import WeightStore


class RoleService(TrainerService):
    """A trainer rank of any role of a run."""

    def __init__(self, run_id: str, **arguments: Any) -> None:
        """Raises FolderNotShared if this host does not see the run's folder.

        Args:
            run_id: the id in the run's folder.
        """
        super().__init__(**arguments)
        check_folder_shared(self.run_folder, run_id)


class PolicyService(RoleService, PolicyAPI):
    """A trainer rank of the policy."""

    def __init__(self, check: str, **arguments: Any) -> None:
        """Raises FolderNotShared if this host does not see the run's folder.

        Args:
            check: `sampled` or `complete` checksums of published weights.
        """
        super().__init__(**arguments)
        self._check_completely = check == "complete"
        self._weights: WeightStore | None = None
        self._sender: StreamSender | None = None

    def open_weights(self, folder: str) -> None:
        self._weights = WeightStore.open(Path(folder), generation=self.generation)

    def write_weights(self, version: int) -> None:
        if self._weights is None:
            raise RuntimeError("no weight store is open; call open_weights() first")
        recorder.raise_if_stalled()
        current_beacon().stage("publish")
        began_ns = time.monotonic_ns()
        self._weights.write_shards(self.rank, version, self.trainer.shards(), self._check_completely)
        current_beacon().span(SpanKind.WEIGHTS, f"write version {version}", began_ns)

    def stream_weights(self, channel: StreamChannel, version: int) -> str:
        if self._weights is None:
            raise RuntimeError("no weight store is open; call open_weights() first")
        recorder.raise_if_stalled()
        current_beacon().stage("publish")
        if self._sender is None:
            self._sender = StreamSender(self.rank, self.device)
        plan = self._weights.plan
        buckets = [
            [(entry.name, entry.torch_dtype) for entry in bucket.entries]
            for bucket in cut_buckets(plan, channel.bucket_bytes)
        ]
        gathered = self.trainer.gather_weights(buckets, everyone=channel.way == "cuda_ipc")
        began_ns = time.monotonic_ns()
        sent = self._sender.send(channel, plan, version, gathered)
        current_beacon().span(SpanKind.WEIGHTS, f"send version {version}", began_ns, plan.nbytes)
        return sent

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._weights is not None:
            self._weights.close()
        super().close()
