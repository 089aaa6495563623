"""What a trainer will need, computed before any rank starts."""

from dataclasses import dataclass
from typing import Protocol

from lockstep.config.algorithm import TrainerOutput
from lockstep.config.train_role import TrainRole
from lockstep.models.model_facts import ModelFacts

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A kind of collective that the trainer runs in each step."""

    operation: str
    communicator: str
    times: str
    """How often the collective runs in a step, and what determines that."""
    bytes: int
    """Payload of the largest of these collectives."""


class TrainerPlanner(Protocol):
    """Says before anything starts what the ranks of a trained role need. Every kind of trainer has one."""

    outputs: frozenset[TrainerOutput]
    """What the trainer computes: all that `Trainer.evaluate` can be asked for, and that objectives can learn from."""
    moves_reference: bool
    """Whether the trainer's reference can follow the policy, see `ObjectiveConfig.reference_mixing`."""

    def check(self, role: TrainRole) -> None:
        """Checks that this kind of trainer implements every setting of the role, beyond what the attributes say. Raises
        TrainerUnsupported."""

    def compiles_layers(self, role: TrainRole) -> bool:
        """Whether layers can be compiled under the role's settings."""

    def memory(self, role: TrainRole, model: ModelFacts, token_budget: int) -> dict[str, int]:
        """Estimates the bytes that one rank needs on its device, by part, without the libraries. The parts that
        offloading moves are `weights` and `optimizer`; `gathered`, `gradients`, `activations`, `images` and `logits`
        exist only during a step."""

    def memory_checkpoint(self, role: TrainRole, model: ModelFacts) -> int | None:
        """Returns the bytes of two memory checkpoints of all ranks of the role; None if this kind of trainer writes
        none."""

    def collectives(self, role: TrainRole, model: ModelFacts, updates: int, publishes: bool) -> list[PlannedCollective]:
        """Lists the collectives that every rank enters in a step. They do not depend on a rank's data.

        Args:
            updates: optimizer steps in a step of the run.
            publishes: whether engines get the role's weights after the step.
        """


IMAGE_SHARE = 0.5
"""The share of a row's tokens that are taken to be images, for estimates of memory."""


def forward_memory(role: TrainRole, model: ModelFacts, tokens: int) -> dict[str, int]:
    """Estimates the bytes that a rank needs for `activations`, `logits` and, with a trained vision tower, `images`.

    Activations follow Korthikanti et al. 2022 (eq. 2): `34 * tokens * hidden` bytes per layer in 16 bit, without the
    attention term, as attention keeps no scores. In 32 bit it is twice as much; with checkpointing, one tensor per
    layer. The logits of one chunk count three times (value, gradient, softmax). A trained vision tower is estimated in
    the same way (`images`), as if half of the tokens were images.

    Args:
        tokens: those whose activations are kept at the same time.
    """
    trainer, width = role.trainer, DTYPE_BYTES[model.dtype]
    per_token = (2 if trainer.activation_checkpointing else 34) * model.hidden * model.layers * width // 2
    logits = 0 if role.model.head == "score" else 3 * trainer.head_chunk * model.vocabulary * 4
    parts = {"activations": tokens * per_token, "logits": logits}
    if model.vision is not None and "tower" in model.changing:
        seen = int(IMAGE_SHARE * tokens)
        parts["images"] = model.vision.activation_bytes(seen, width, trainer.activation_checkpointing)
    return parts
