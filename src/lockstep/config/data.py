"""The dataset and the meaning of its columns."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.section import Section


class ProceduralTask(Section):
    """Rows that reasoning-gym generates. Row i has the seed `seed + i`."""

    size: int = Field(1000, gt=0)
    """Rows per epoch."""
    seed: int = Field(0, ge=0)
    arguments: dict[str, Any] = {}
    """Arguments of the task, such as `{max_terms: 3}` for `chain_sum`."""

    def overlaps(self, other: "ProceduralTask") -> bool:
        """Whether some seed generates a row of both."""
        return self.seed < other.seed + other.size and other.seed < self.seed + self.size


class DatasetConfig(Section):
    """JSONL, JSON, Parquet, a folder of these, a Hugging Face dataset (`kind: hub`, or auto-detected), or a procedural
    task (`kind: reasoning_gym`)."""

    path: str
    """A file, a folder, the name of a hub dataset, or the name of a task."""
    kind: Literal["auto", "jsonl", "parquet", "hub", "reasoning_gym"] = "auto"
    task: ProceduralTask | None = None
    """For `kind: reasoning_gym`."""
    name: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    format: Literal["auto", "prompt_answer", "prompt_completion", "messages", "verl", "text"] = "auto"
    """`auto` chooses by the columns: verl's (data_source, prompt, reward_model), `messages`, `prompt` + `completion`,
    `prompt` + answer, `text`."""
    prompt_column: str | None = None
    answer_column: str | None = None
    """Column that verifiers get as ground truth (`answer`, `solution`, `ground_truth`, `label` by default)."""
    limit: int | None = Field(None, gt=0)
    """Use only the first N rows."""
    shuffle: bool = True
    template: str | None = None
    """Format string for the prompt, e.g. `"Q: {prompt}\\nA:"`; only for plain-text prompts."""
    chat: bool | None = None
    """Render prompts with the chat template; by default only prompts that are messages."""
    system: str | None = None
    """System message for conversational prompts that have none."""
    overlong: Literal["error", "drop"] = "error"
    """For a prompt longer than the context: refuse the run, or drop the row and count it."""

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        if self.task is not None and self.kind != "reasoning_gym":
            raise ValueError("task belongs to kind: reasoning_gym")
        return self
