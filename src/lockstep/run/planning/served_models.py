"""Checks the models of served roles before any process starts."""

from typing import TYPE_CHECKING

from lockstep.config.run_config import RunConfig
from lockstep.config.serve_role import ServeRole
from lockstep.models.errors import ModelError, naming_fields_of
from lockstep.models.model_facts import ModelFacts, model_facts
from lockstep.models.model_loader import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


def served_models(config: RunConfig, policy: ModelFacts, device: str) -> dict[str, ModelFacts]:
    """The sizes of the served models, by role.

    Raises:
        ModelError: a model cannot be built, or it is to compute fields of the policy's targets and has other tokens.
    """
    found = {}
    for role in config.serve_roles:
        with naming_fields_of(role.section or role.name):
            found[role.name] = facts = model_facts(role.model, device)
            if role.fields and role.model.path != config.model.path:
                _check_tokens(config, role, policy, facts)
    return found


def differing_tokens(one: "Tokenizer", other: "Tokenizer") -> list[str]:
    """The tokens that do not have the same id in both, sorted."""
    ids, others = one.get_vocab(), other.get_vocab()
    return sorted(token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token))


def _check_tokens(config: RunConfig, role: ServeRole, policy: ModelFacts, facts: ModelFacts) -> None:
    """Raises ModelError unless the served model has the policy's tokens, with the same ids."""
    field, path = "model.path", role.model.path
    if differing := differing_tokens(load_tokenizer(config.model), load_tokenizer(role.model)):
        problem = (
            f"its tokenizer differs from the policy's in {len(differing)} tokens, such as {differing[0]!r}, so that "
            "its log-probabilities would be those of other tokens"
        )
        raise ModelError(field, path, problem, "use a model with the policy's tokenizer, or leave it out")
    if facts.vocabulary < policy.vocabulary:
        problem = f"it has {facts.vocabulary} token ids, and the policy can sample {policy.vocabulary}"
        raise ModelError(field, path, problem, "use a model with as many token ids, or leave it out")
