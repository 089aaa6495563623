"""Which model, in which precision."""

from typing import Literal

from pydantic import Field

from lockstep.config.base import Section

DType = Literal["auto", "float32", "bfloat16", "float16"]


class Model(Section):
    path: str
    """A local folder or a hub name; also where the tokenizer comes from."""
    tokenizer: str | None = None
    """Another folder or hub name for the tokenizer."""
    revision: str | None = None
    dtype: DType = "auto"
    """Compute precision: float32 on CPU, bfloat16 (with float32 master weights) on GPU."""
    trust_remote_code: bool = False
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's template."""
    packing: Literal["auto", "forest", "block", "single"] = "auto"
    """`auto` probes the model at load: shared prompts (forest), else isolated samples in a row (block),
    else one sample per row (single)."""
    max_length: int | None = Field(None, gt=0)
    """Longest sequence (prompt and completion); the model's own limit when absent."""
