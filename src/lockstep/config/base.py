"""What every config model shares."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of a run's file: unknown keys are refused, values are immutable once checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
