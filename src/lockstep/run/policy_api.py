"""The calls that a trainer rank of the policy answers."""

from abc import abstractmethod

from lockstep.train.trainer_api import TrainerAPI
from lockstep.weights.stream.channel import StreamChannel


class PolicyAPI(TrainerAPI):
    """A trainer rank whose weights are published."""

    @abstractmethod
    def open_weights(self, folder: str) -> None:
        """Opens the weight store in this folder."""

    @abstractmethod
    def write_weights(self, version: int) -> None:
        """Writes this rank's rows of the weights into the store's inactive buffer, as this version."""

    @abstractmethod
    def stream_weights(self, channel: StreamChannel, version: int) -> str:
        """Gathers the weights with the other ranks, bucket by bucket, and sends them to the channel's engines. Returns
        the reason if that failed, else ""."""
