"""The calls that a trainer rank of the policy answers."""

from abc import abstractmethod

from lockstep.train.api import TrainerAPI
from lockstep.weights.stream.channel import StreamChannel


class PolicyAPI(TrainerAPI):
    """A trainer rank whose weights are published."""

    @abstractmethod
    def open_weights(self, folder: str) -> None:
        """Opens the weight store that the controller made."""

    @abstractmethod
    def write_weights(self, version: int) -> None:
        """Writes this rank's rows into the store's inactive buffer, as `version_numbers`."""

    @abstractmethod
    def stream_weights(self, channel: StreamChannel, version: int) -> str:
        """Takes part in gathering the weights, bucket by bucket, and in sending them to the channel's engines. Why that
        failed, empty where it did not."""
