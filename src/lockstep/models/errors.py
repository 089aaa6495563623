"""Errors about models, tokenizers and checkpoints."""

from lockstep.base.errors import PicklableError


class ModelError(PicklableError, ValueError):
    """A model, tokenizer or checkpoint that cannot be used as configured.

    Attributes:
        field: of the config, such as `model.path`.
        value: what it was.
        problem: what is wrong with it.
        remedy: what to do.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{field} = {value!r}: {problem}; {remedy}")
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy


class HubUnreachable(ModelError):
    """A hub model that is not on this machine while the hub cannot be reached: whether it exists is unknown."""
