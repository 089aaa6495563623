"""Errors about models, tokenizers and checkpoints."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def naming_fields_in(section: str) -> Iterator[None]:
    """Makes errors name the fields of the section that has a role's `model` and `trainer`, such as `critic.model.path`;
    unchanged if `section` is empty, as it is for the policy."""
    try:
        yield
    except ModelError as error:
        if not section:
            raise

        def named(text: str) -> str:
            return _ROLE_FIELD.sub(rf"{section}.\g<0>", text)

        raise type(error)(named(error.field), error.value, named(error.problem), named(error.remedy)) from error
