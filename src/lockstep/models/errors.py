"""Errors about models, tokenizers and checkpoints."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lockstep.base.errors import PicklableError
from lockstep.config.model import ModelConfig
from lockstep.config.trainer import TrainerConfig

_ROLE_FIELD = re.compile(
    rf"(?<![\w.])(?:model\.(?:{'|'.join(ModelConfig.model_fields)})|trainer\.(?:{'|'.join(TrainerConfig.model_fields)}))\b"
)
"""A field of a trained role, in a text about the policy."""


class ModelError(PicklableError, ValueError):
    """A model, tokenizer or checkpoint cannot be used as configured.

    Attributes:
        field: field of the config, such as `model.path`.
        value: the field's value.
        problem: what is wrong.
        remedy: how to fix it.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{field} = {value!r}: {problem}; {remedy}")
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy


class HubUnreachable(ModelError):
    """A hub model is not on this machine, and the hub cannot be reached; whether the model exists is unknown."""


def naming_fields_in(section: str) -> AbstractContextManager[None]:
    """Makes errors name the fields of the section that has a role's `model` and `trainer`, such as `critic.model.path`;
    unchanged if `section` is empty, as it is for the policy."""
    return _renamed_fields(lambda text: _ROLE_FIELD.sub(rf"{section}.\g<0>", text) if section else text)


def naming_fields_of(section: str) -> AbstractContextManager[None]:
    """Makes errors name the fields of a section that has those of `model` itself, such as `reference.path`."""
    return _renamed_fields(lambda text: re.sub(r"\bmodel\.(?=\w)", f"{section}.", text))


@contextmanager
def _renamed_fields(named: Callable[[str], str]) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise type(error)(named(error.field), error.value, named(error.problem), named(error.remedy)) from error
