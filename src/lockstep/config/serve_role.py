"""A served model of a run: everything that its ranks need to know."""

from typing import Literal

from pydantic import Field

from lockstep.config.algorithm import ModelOutput
from lockstep.config.model import ModelConfig
from lockstep.config.section import Section
from lockstep.config.trainer import CommunicationConfig


class ReferenceConfig(Section):
    """Processes of its own for the reference model of the KL penalty, which then computes at the same time as the
    policy's ranks and takes no memory of theirs. When absent, the policy's ranks hold the reference."""

    path: str | None = None
    """Another model with the policy's tokenizer, a local folder or a hub name; the policy as it was loaded when
    absent."""
    revision: str | None = None
    """Revision of `path`."""
    ranks: int = Field(1, gt=0)
    """Processes over which the model is sharded; independent of `trainer.ranks`."""
    threads: int | None = Field(None, gt=0)
    """Torch threads per rank; an even share of the cores when absent."""

    def model(self, policy: ModelConfig) -> ModelConfig:
        """The reference's model, given the policy's. An adapter belongs to it only if the policy starts from it."""
        start = policy.adapter if self.path is None and policy.adapter is not None and policy.adapter.path else None
        changes = {} if self.path is None else {"path": self.path, "revision": self.revision, "tokenizer": None}
        return policy.model_copy(update={**changes, "adapter": start, "quantization": None, "router_aux_loss": 0.0})


class ServeRole(Section):
    """A model without a trainer, such as the reference of a KL penalty. It never changes, so no checkpoint holds it. A
    recipe's config derives it from its own fields, so that a rank knows no recipe."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """The role of the processes, such as `reference`."""
    model: ModelConfig
    ranks: int = Field(1, gt=0)
    threads: int | None = Field(None, gt=0)
    fields: dict[str, ModelOutput] = {}
    """Fields of a batch's targets that it computes before the first update of a step, and from which output."""
    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits."""
    communication: CommunicationConfig = CommunicationConfig()
    head_chunk: int = Field(1024, gt=0)
    """As the fields below, that of the policy's trainer: results are the same bit by bit wherever the model is."""
    malloc: Literal["tuned", "default"] = "tuned"
    collective_timeout_s: float = Field(1800.0, gt=0)
