"""Where samples come from and what their columns mean."""

from typing import Literal

from pydantic import Field

from lockstep.config.base import Section


class Dataset(Section):
    """JSONL, JSON, Parquet, a folder of these, or a Hugging Face dataset (`kind: hub`, or auto-detected)."""

    path: str
    kind: Literal["auto", "jsonl", "parquet", "hub"] = "auto"
    name: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    format: Literal["auto", "prompt_answer", "prompt_completion", "messages", "verl", "text"] = "auto"
    """`auto` decides by the columns: verl's (data_source, prompt, reward_model), `messages`,
    `prompt` + `completion`, `prompt` + answer, `text`."""
    prompt_column: str | None = None
    answer_column: str | None = None
    """Column given to the verifiers as ground truth (`answer`, `solution`, `ground_truth`, `label` by default)."""
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
