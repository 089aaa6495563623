"""The services of a run's workers, as the controller sees them: names and signatures."""

from abc import abstractmethod

from lockstep.rollout.api import EngineAPI
from lockstep.train.api import TrainerAPI
from lockstep.weights.stream.channel import Channel

__all__ = ["COURIER", "ENGINE", "POLICY", "PRELOAD", "READER", "EngineAPI", "PolicyAPI"]

POLICY = "lockstep.run.policy_service:PolicyService"
ENGINE = "lockstep.rollout.service:EngineService"
COURIER = "lockstep.weights.courier:Courier"
READER = {"sampled": "lockstep.weights.shared:Reader", "complete": "lockstep.weights.shared:complete_reader"}
"""What engines read weights by, by `weights.check`."""
PRELOAD = {
    "builtin": ("torch", "transformers", "lockstep.run.policy_service", "lockstep.rollout.service",
                "lockstep.rollout.builtin"),
    "vllm": ("torch", "transformers", "lockstep.run.policy_service", "lockstep.rollout.service"),
}  # fmt: skip
"""By the kind of engines: what the template process imports, for trainer ranks and engines alike. vLLM is left to the
engines: it sets up its platform and threads when it is imported, which trainer ranks must not inherit."""


class PolicyAPI(TrainerAPI):
    """A trainer rank whose weights are published."""

    @abstractmethod
    def open_weights(self, folder: str) -> None:
        """Opens the weight store that the controller made."""

    @abstractmethod
    def write_weights(self, version: int) -> None:
        """Writes this rank's rows into the store's inactive buffer, as `version`."""

    @abstractmethod
    def stream_weights(self, channel: Channel, version: int) -> str:
        """Takes part in gathering the weights, bucket by bucket, and in sending them to the channel's engines. Why that
        failed, empty where it did not."""
