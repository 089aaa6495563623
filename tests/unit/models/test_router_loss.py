"""The routers' auxiliary loss: its formula, when it is on, and what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lockstep.config.model import ModelConfig
from lockstep.data.row_layout import RowLayout
from lockstep.models.errors import ModelError
from lockstep.models.model_facts import model_facts
from lockstep.models.model_loader import load_policy
from lockstep.models.router_loss import RouterRecorder, load_balancing_loss, router_coefficient

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    config = MixtralConfig(vocab_size=48, intermediate_size=24, num_local_experts=4, router_aux_loss_coef=0.02, **SIZES)
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def test_value_and_gradient_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    mine = [torch.randn(7, 5, requires_grad=True) for _ in range(3)]
    theirs = [logits.detach().clone().requires_grad_() for logits in mine]
    value, expected = load_balancing_loss(mine, 2), load_balancing_loss_func(tuple(theirs), 5, 2)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_coefficient_is_the_configured_one_or_that_of_the_model_if_it_asks_for_router_logits(mixtral: Path) -> None:
    path = str(mixtral)
    assert model_facts(ModelConfig(path=path), "cpu").router_aux_loss == 0
    assert model_facts(ModelConfig(path=path, router_aux_loss=0.3), "cpu").router_aux_loss == 0.3
    config = MixtralConfig(output_router_logits=True, router_aux_loss_coef=0.02)
    assert router_coefficient(ModelConfig(path=path), config) == 0.02
    assert router_coefficient(ModelConfig(path=path, router_aux_loss=0.0), config) == 0


def test_only_forwards_with_gradients_are_recorded_and_only_until_the_loss_is_taken(mixtral: Path) -> None:
    policy = load_policy(ModelConfig(path=str(mixtral)), "cpu")
    routers = RouterRecorder(policy, 1.0)
    tokens = torch.arange(6)
    logits = policy.lm(tokens[None], output_router_logits=True).router_logits
    arguments = (tokens, RowLayout([6], [-1]), torch.arange(5), tokens[1:])
    policy(*arguments)
    with torch.no_grad():
        policy(*arguments)
    assert routers._logits == []
    policy(*arguments)
    torch.testing.assert_close(routers.take(), load_balancing_loss_func(logits, 4, 2))
    policy.lm(tokens[None])  # as when layers are computed again in the backward
    assert routers._logits == []


def test_a_model_without_routers_is_refused_when_the_run_is_planned(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.router_aux_loss = 0\.1.*no routers.*leave it out"):
        model_facts(ModelConfig(path=str(folder), router_aux_loss=0.1), "cpu")
