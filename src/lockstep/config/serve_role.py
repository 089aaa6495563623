"""A served model of a run: everything that its ranks need to know."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lockstep.config.algorithm import ModelOutput
from lockstep.config.model import ModelConfig
from lockstep.config.roles import REWARD_MODEL
from lockstep.config.section import Section
from lockstep.config.trainer import CommunicationConfig

if TYPE_CHECKING:
    from lockstep.config.run_config import RunConfig


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
    section: str = ""
    """The section of the config that it is derived from, such as `reward.terms.0`; its name when empty."""
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

    def field(self, name: str) -> str:
        """The full name of a field of its section."""
        return f"{self.section or self.name}.{name}"


def reference_roles(config: "RunConfig", reference: ReferenceConfig | None) -> tuple[ServeRole, ...]:
    """The served role of a reference model with processes of its own, if there is one."""
    if reference is None:
        return ()
    role = ServeRole(
        name="reference",
        model=reference.model(config.model),
        ranks=reference.ranks,
        threads=reference.threads,
        fields={"reference_logprob": "logprobs"},
        temperature=config.train_temperature,
        communication=config.communication,
        head_chunk=config.trainer.head_chunk,
        malloc=config.trainer.malloc,
        collective_timeout_s=config.trainer.collective_timeout_s,
    )
    return (role,)


def reward_model_roles(config: "RunConfig") -> dict[int, ServeRole]:
    """The served roles of the reward models, by the index of their term: `reward_model`, `reward_model_2`, ..."""
    served = {} if config.reward is None else config.reward.served_models
    return {
        index: ServeRole(
            name=REWARD_MODEL if number == 1 else f"{REWARD_MODEL}_{number}",
            section=f"reward.terms.{index}",
            model=term.model,
            ranks=term.ranks,
            threads=term.threads,
            communication=config.communication,
            malloc=config.trainer.malloc,
            collective_timeout_s=config.trainer.collective_timeout_s,
        )
        for number, (index, term) in enumerate(served.items(), start=1)
    }


def check_reference(config: "RunConfig", reference: ReferenceConfig, unneeded: str, remedy: str) -> None:
    """Checks that processes for a reference model are needed, and can have their model and devices.

    Args:
        unneeded: why they may not be needed; then `remedy` makes them needed.
    """
    if not config.objective.needs_reference:
        raise ValueError(
            f"reference starts processes for the reference model, but {unneeded}, so nothing needs one: "
            f"{remedy}, or leave reference out"
        )
    if reference.path is None and reference.revision is not None:
        raise ValueError(
            f"reference.revision {reference.revision!r} is a revision of reference.path, which is absent: set it too"
        )
    if reference.path is None and config.model.quantization is not None:
        raise ValueError(
            "the reference of a policy with model.quantization is its quantized model without the adapter, which only "
            "the policy's ranks hold, at no extra memory: leave reference out, or set reference.path"
        )
