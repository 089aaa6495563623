"""Errors about models, tokenizers and checkpoints."""

from lockstep.base.errors import PicklableError


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
