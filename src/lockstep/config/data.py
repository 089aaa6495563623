"""Where samples come from and what their columns mean."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.section import Section


class ProceduralTask(Section):
    """How a procedural task of reasoning-gym is generated. Row i is made of the seed plus i."""

    size: int = Field(1000, gt=0)
    """Rows of an epoch."""
    seed: int = Field(0, ge=0)
    arguments: dict[str, Any] = {}
    """Of the task's configuration, such as `{max_terms: 3}` of `chain_sum`."""

    def overlaps(self, other: "ProceduralTask") -> bool:
        """Whether some seed makes a row of both."""
        return self.seed < other.seed + other.size and other.seed < self.seed + self.size


class DatasetConfig(Section):
    """JSONL, JSON, Parquet, a folder of these, a Hugging Face dataset (`kind: hub`, or auto-detected), or a procedural
    task (`kind: reasoning_gym`)."""

    path: str
    """A file, a folder, a name on the hub, or the name of a task."""
    kind: Literal["auto", "jsonl", "parquet", "hub", "reasoning_gym"] = "auto"
    task: ProceduralTask | None = None
    """Of `kind: reasoning_gym`."""
    name: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    format: Literal["auto", "prompt_answer", "prompt_completion", "messages", "verl", "text"] = "auto"
    """`auto` decides by the columns: verl's (data_source, prompt, reward_model), `messages`,
    `prompt` + `completion`, `prompt` + answer, `text`."""
    prompt_column: str | None = None
    answer_column: str | None = None
    """Column given to the verifiers as ground truth (`ray_get`, `solution`, `ground_truth`, `process_label` by
    default)."""
    limit: int | None = Field(None, gt=0)
    """Use the first N rows only."""
    shuffle: bool = True
    template: str | None = None
    """Format string around the prompt, e.g. `"Q: {prompt}\\nA:"`; only for prompts that are plain text."""
    chat: bool | None = None
    """Render prompts through the chat template; by default only where they are messages."""
    system: str | None = None
    """System message put before conversational prompts that have none."""
    overlong: Literal["error", "drop"] = "error"
    """What happens with a prompt longer than the context: refuse the run, or drop the row and count it."""

    @model_validator(mode="after")
    def _task_of_tasks(self) -> Self:
        if self.task is not None and self.kind != "reasoning_gym":
            raise ValueError("task belongs to kind: reasoning_gym")
        return self
