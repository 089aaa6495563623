"""Adds the auxiliary loss of a mixture-of-experts model to its objective."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from lockstep.config.algorithm import ModelOutput
from lockstep.config.train_role import TrainRole
from lockstep.models.errors import ModelError
from lockstep.models.policy_model import PolicyModel
from lockstep.models.router_loss import ROUTER_FIELD, RouterRecorder, router_coefficient
from lockstep.train.objective import LossOutput, Objective, Reduction

ROUTER_METRICS: Mapping[str, Reduction] = {"router_aux_loss": "sum"}


def with_router_loss(objective: Objective, policy: PolicyModel, role: TrainRole) -> Objective:
    """Returns the objective, with the auxiliary loss if the model has one. Raises ModelError."""
    coefficient = router_coefficient(role.model, policy.config)
    if not coefficient:
        return objective
    if role.trainer.compile == "layers":
        problem = "the routers of compiled layers cannot be recorded"
        raise ModelError(ROUTER_FIELD, coefficient, problem, "set it to 0, or trainer.compile to off")
    return RouterObjective(objective, RouterRecorder(policy, coefficient))


class RouterObjective:
    """An objective with the auxiliary loss of the routers.

    The auxiliary loss of a micro-batch counts as much as its targets do in the objective: it is multiplied by the sum
    of their weights. If the weights of a step sum to 1, as those of a mean do, the term is the mean over targets.
    """

    def __init__(self, objective: Objective, routers: RouterRecorder) -> None:
        self._objective, self._routers = objective, routers
        self.name, self.fields, self.outputs = objective.name, objective.fields, objective.outputs
        self.needs_sequences = objective.needs_sequences
        self.metrics: Mapping[str, Reduction] = {**objective.metrics, **ROUTER_METRICS}

    def compute(
        self, fields: Mapping[str, Tensor], outputs: Mapping[ModelOutput, Tensor], sequences: Tensor | None
    ) -> LossOutput:
        """See `Objective`."""
        found = self._objective.compute(fields, outputs, sequences)
        term = self._routers.coefficient * fields["weight"].sum() * self._routers.take()
        loss = found.loss + term
        metrics = {**found.metrics, "loss": loss.detach(), "router_aux_loss": term.detach()}
        return replace(found, loss=loss, metrics=metrics)
