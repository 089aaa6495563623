"""The section `reference`: the model of its role, what the policy's ranks are spared, and what is refused."""

from typing import Any

import pytest

from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config
from lockstep.config.recipes import GRPOConfig

KL = {"kl": {"coefficient": 0.1}, "old_logprobs": "trainer"}


def grpo(**changes: Any) -> GRPOConfig:
    values = {
        "recipe": "grpo", "name": "x", "steps": 3, "model": {"path": "m", "tokenizer": "t"}, "data": {"path": "d"},
        "reward": {"terms": [{"kind": "exact_match"}]}, "loss": KL, "reference": {}, **changes,
    }  # fmt: skip
    config = check_config(values, "test")
    assert isinstance(config, GRPOConfig)
    return config


def test_the_policys_ranks_do_not_compute_what_is_served() -> None:
    here, there = grpo(reference=None), grpo()
    assert here.policy.evaluated_fields == {"old_logprob": "logprobs", "reference_logprob": "reference_logprobs"}
    assert here.policy.holds_reference and here.serve_roles == ()
    assert there.policy.evaluated_fields == {"old_logprob": "logprobs"} and not there.policy.holds_reference
    assert there.objective.needs_reference, "the loss is the same"
    (role,) = there.serve_roles
    assert (role.name, role.fields, role.ranks) == ("reference", {"reference_logprob": "logprobs"}, 1)


def test_it_computes_as_the_policy_does() -> None:
    trainer = {"head_chunk": 7, "malloc": "default", "collective_timeout_s": 5, "ranks": 4}
    (role,) = grpo(trainer=trainer, rollout={"sampling": {"temperature": 0.7}}, reference={"ranks": 2}).serve_roles
    assert (role.head_chunk, role.malloc, role.collective_timeout_s) == (7, "default", 5)
    assert (role.temperature, role.ranks, role.threads) == (0.7, 2, None)


def test_its_model_is_the_policy_as_it_was_loaded() -> None:
    def model(**changes: Any) -> Any:
        return grpo(**changes).serve_roles[0].model

    adapter = {"r": 4, "path": "a"}
    assert model() == grpo().model.model_copy(update={"router_aux_loss": 0.0})
    assert model(model={"path": "m", "adapter": {"r": 4}}).adapter is None, "a new adapter changes nothing"
    assert model(model={"path": "m", "adapter": adapter}).adapter.path == "a"
    other = model(model={"path": "m", "tokenizer": "t", "revision": "1", "adapter": adapter}, reference={"path": "n"})
    assert (other.path, other.revision, other.tokenizer, other.adapter) == ("n", None, None, None)
    assert model(reference={"path": "n", "revision": "2"}).revision == "2"


QLORA = {"path": "m", "adapter": {"r": 4}, "quantization": {}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loss": {}}, r"loss.kl.coefficient is 0.*set loss.kl.coefficient above 0, or leave reference out"),
        ({"reference": {"revision": "2"}}, r"reference.revision '2' is a revision of reference.path, which is absent"),
        ({"model": QLORA}, r"model.quantization.*leave reference out, or set reference.path"),
        ({"reference": {"ranks": 0}}, r"reference.ranks"),
        ({"recipe": "sft", "reward": None, "loss": {}}, r"reference: unknown key"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        grpo(**changes)


def test_a_quantized_policy_may_have_another_reference() -> None:
    model = grpo(model=QLORA, reference={"path": "n"}).serve_roles[0].model
    assert (model.path, model.quantization) == ("n", None)
    assert grpo(placement={"colocate": ["policy", "rollout"]}).serve_roles
