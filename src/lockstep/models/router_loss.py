"""The auxiliary loss of mixture-of-experts models that balances the load of the experts (Switch Transformer, Fedus et
al. 2021, arXiv:2101.03961), as transformers computes it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.model import ModelConfig
from lockstep.models.errors import ModelError
from lockstep.models.policy_model import PolicyModel

ROUTER_FIELD = "model.router_aux_loss"


def router_coefficient(cfg: ModelConfig, hf_config: Any) -> float:
    """Returns the coefficient of the auxiliary loss, 0 for none. Unless it is configured, it is that of the model's own
    config if this asks for router logits, as in transformers."""
    if cfg.router_aux_loss is not None:
        return cfg.router_aux_loss
    text = hf_config.get_text_config()
    return float(getattr(text, "router_aux_loss_coef", 0.0)) if getattr(text, "output_router_logits", False) else 0.0


def load_balancing_loss(logits: Sequence[Tensor], chosen: int) -> Tensor:
    """Returns `experts * sum(f * p)` over the experts: f is the number of choices of an expert per token, p the mean
    probability that the routers give it. Gradients flow through p.

    Args:
        logits: `[tokens, experts]` of each router.
        chosen: number of experts that a router chooses for a token.
    """
    probabilities = torch.cat(list(logits)).softmax(-1)
    tokens, experts = probabilities.shape
    choices = probabilities.topk(chosen, dim=-1).indices.flatten()
    counts = torch.zeros(experts, device=choices.device).index_add_(0, choices, torch.ones_like(choices).float())
    return experts * (counts / tokens * probabilities.float().mean(0)).sum()


class RouterRecorder:
    """Records the logits of a model's routers in each forward with gradients.

    Raises:
        ModelError: the model has no routers whose logits transformers can record.
    """

    def __init__(self, policy: PolicyModel, coefficient: float) -> None:
        self.coefficient = coefficient
        self._chosen: int = getattr(policy.config.get_text_config(), "num_experts_per_tok", 0)
        self._logits: list[Tensor] = []
        self._recording = False
        routers, self._index = find_routers(policy)
        if not routers or not self._chosen:
            problem = f"{type(policy.lm).__name__} has no routers whose logits transformers can record"
            raise ModelError(ROUTER_FIELD, coefficient, problem, "leave it out, or set it to 0")
        policy.register_forward_pre_hook(self._begin)
        for router in routers:
            router.register_forward_hook(self._record)

    def take(self) -> Tensor:
        """Returns the loss of the last forward, and ends its recording: its layers may be computed again in the
        backward."""
        found = load_balancing_loss(self._logits, self._chosen)
        self._logits, self._recording = [], False
        return found

    def _begin(self, *_: Any) -> None:
        self._logits, self._recording = [], torch.is_grad_enabled()

    def _record(self, router: nn.Module, arguments: Any, output: Any) -> None:
        if self._recording:
            self._logits.append(output[self._index] if isinstance(output, tuple) else output)


def find_routers(policy: PolicyModel) -> tuple[list[nn.Module], int]:
    """Returns the routers of a model, and which of their outputs are the logits."""
    recorder = (getattr(policy.lm, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)
    if not isinstance(kind, type):
        return [], 0
    return [module for module in policy.modules() if isinstance(module, kind)], getattr(recorder, "index", 0)
