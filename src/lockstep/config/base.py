"""What every config model shares."""

from pydantic import BaseModel, BeforeValidator, ConfigDict

OFF_IS_A_WORD = BeforeValidator(lambda value: "off" if value is False else value)
"""For choices of which one is `off`: YAML 1.1 reads that as false."""


class Section(BaseModel):
    """One section of a run's file: unknown keys are refused, values are immutable once checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
