"""Whether a reward's terms can be used, without running users' code: that happens in scorer processes only."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.cluster.user_code import check_source
from lockstep.config import reward as config
from lockstep.rewards.functions import FunctionError
from lockstep.rewards.keys import key_from
from lockstep.rewards.terms import names


def check_terms(terms: Sequence[config.Term], base: Path = Path(), environment: Mapping[str, str] = os.environ) -> None:
    """Looks every user's function up in the text of its module, schemas up in their files, and keys up in the
    environment. Asks no server.

    Raises:
        FunctionError: no such file or package, text that is no Python, or no such name in it.
        TermError: no schema in the file, no key in the environment.
    """
    for term, name in zip(terms, names(terms), strict=True):
        if isinstance(term, config.Function):
            check_source(term.path, base, FunctionError)
        elif isinstance(term, config.Http | config.Judge):
            key_from(term.api_key_env, name, environment)
        elif isinstance(term, config.JsonSchema):
            from lockstep.rewards.schema import read_schema

            read_schema(term, base)


def compares_answers(terms: Sequence[config.Term]) -> bool:
    """Whether one of the verifiers needs an answer with every prompt."""
    return any(isinstance(term, config.ExactMatch | config.Math) for term in terms)
