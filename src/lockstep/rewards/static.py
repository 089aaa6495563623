"""Whether users' functions can be found, without running their code: that happens in scorer processes only."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.cluster.user_code import check_source
from lockstep.config import reward as config
from lockstep.rewards.functions import FunctionError


def check_terms(terms: Sequence[config.Term], base: Path = Path()) -> None:
    """Looks every user's function up in the text of its module.

    Raises:
        FunctionError: no such file or package, text that is no Python, or no such name in it.
    """
    for term in terms:
        if isinstance(term, config.Function):
            check_source(term.path, base, FunctionError)


def compares_answers(terms: Sequence[config.Term]) -> bool:
    """Whether one of the verifiers needs an answer with every prompt."""
    return any(isinstance(term, config.ExactMatch | config.Math) for term in terms)
