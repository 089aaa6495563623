"""Refusals of the preference recipe's references and weights."""

from typing import Any

import pytest

from lockstep.config.errors import ConfigError
from lockstep.config.loader import check_config

COMMON: dict[str, Any] = {
    "recipe": "preference", "name": "pairs", "steps": 2, "model": {"path": "m"}, "data": {"path": "d.jsonl"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precompute_ref_log_probs": True, "loss": {"type": "simpo"}}, "loss.type simpo, which has no reference"),
        ({"precompute_ref_log_probs": True, "loss": {"type": "kto"}}, "another sample of its step.*apo_zero_unpaired"),
        (
            {"precompute_ref_log_probs": True, "reference": {}},
            "reference has nothing to compute: leave reference out, or",
        ),
        ({"loss": {"use_weighting": True, "type": ["sigmoid", "aot"]}}, "does not apply to type aot"),
        ({"loss": {"use_weighting": True, "type": "kto"}}, "does not apply to type kto"),
        ({"loss": {"sync_ref_model": True, "type": "orpo"}}, "type orpo, which has no reference"),
        ({"loss": {"sync_ref_model": True}, "precompute_ref_log_probs": True}, "log-probabilities are fixed"),
        ({"loss": {"sync_ref_model": True}, "reference": {}}, "with reference its processes"),
        (
            {"loss": {"sync_ref_model": True}, "model": {"path": "m", "adapter": {"kind": "lora"}}},
            "with model.adapter the reference is the model without the adapter",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config({**COMMON, **changes}, "test")


def test_a_precomputed_reference_is_in_no_process() -> None:
    config, once = (check_config({**COMMON, "precompute_ref_log_probs": flag}, "test") for flag in (False, True))
    assert config.policy.holds_reference
    assert not once.policy.holds_reference and not once.serve_roles
    assert set(once.policy.evaluated_fields) == {"policy_logprob"}
