"""The dataset and the meaning of its columns."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.section import Section
from lockstep.config.vision import ImageDataConfig, VideoDataConfig


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
    """JSONL, JSON, CSV (also with `.gz`), Parquet, a folder of these, a Hugging Face dataset (`kind: hub`, or
    auto-detected), or a procedural task (`kind: reasoning_gym`)."""

    path: str
    """A file, a folder, the name of a hub dataset, or the name of a task."""
    kind: Literal["auto", "jsonl", "csv", "parquet", "hub", "reasoning_gym"] = "auto"
    task: ProceduralTask | None = None
    """For `kind: reasoning_gym`."""
    name: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    format: Literal["auto", "prompt_answer", "prompt_completion", "messages", "verl", "text", "preference"] = "auto"
    """`auto` chooses by the columns: verl's (data_source, prompt, reward_model), `messages` (or ShareGPT's
    `conversations`), `prompt` + `completion`, `prompt` + answer, `text`; `chosen` + `rejected` for recipes that
    compare completions."""
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
    overlong: Literal["error", "drop", "truncate"] = "error"
    """For a sample longer than the context: refuse the run, drop the row and count it, or (pairs only) cut the longer
    completions at their ends and count the pairs. A prompt, and so an image, is never cut."""
    measure: Literal["auto", "all", "used"] = "auto"
    """Which rows are read and measured before the run starts: `all`, or 1,000 of them (`used`) and each of the others
    when it is used. An overlong one then ends the run, or with `overlong: drop` leaves its step one prompt short.
    `auto` measures all of up to 200,000 prompts, and all rows of other data."""

    images: ImageDataConfig = ImageDataConfig()
    """Images of the rows, for a vision-language model."""
    videos: VideoDataConfig = VideoDataConfig()
    """Videos of the rows, whose frames become images."""

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        if self.task is not None and self.kind != "reasoning_gym":
            raise ValueError("task belongs to kind: reasoning_gym")
        return self


class MixtureSource(DatasetConfig):
    """One dataset of a mixture. A field that it does not set has its value in `data`."""

    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Share of the samples that this dataset gives, relative to the weights of the others. All datasets have a weight,
    or none has: then each row is used once per epoch, as if the datasets were one."""
    label: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name in the metric `data/LABEL`; by default the last part of `path` without its suffix."""

    @property
    def shown_label(self) -> str:
        """The label, or the one by default: as the name of a metric, of letters, digits, `.`, `_` and `-`."""
        return self.label or re.sub(r"[^A-Za-z0-9._-]+", "_", Path(self.path).name.partition(".")[0]) or "data"


class TrainingDataConfig(DatasetConfig):
    """One dataset (`path`), or several (`mixture`): JSONL, JSON, CSV (also with `.gz`), Parquet, a folder of these, a
    Hugging Face dataset (`kind: hub`, or auto-detected), or a procedural task (`kind: reasoning_gym`)."""

    path: str = ""
    """A file, a folder, the name of a hub dataset, or the name of a task; required without `mixture`."""
    mixture: tuple[MixtureSource, ...] = ()
    """Several datasets, each with the fields of one, a `weight` and a `label`. The other fields here are defaults."""

    @model_validator(mode="before")
    @classmethod
    def _fill_sources(cls, values: Any) -> Any:
        """Gives the sources of a mixture the fields that they do not set themselves."""
        if not isinstance(values, Mapping) or not isinstance(values.get("mixture"), list | tuple):
            return values
        shared = {name: value for name, value in values.items() if name not in ("path", "mixture")}
        sources = [{**shared, **each} if isinstance(each, Mapping) else each for each in values["mixture"]]
        return {**values, "mixture": sources}

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if bool(self.path) == bool(self.mixture):
            raise ValueError("give either data.path, for one dataset, or data.mixture, for several")
        weighted = [each.weight is not None for each in self.mixture]
        if any(weighted) and not all(weighted):
            without = f"data.mixture.{weighted.index(False)}"
            raise ValueError(f"{without} has no weight, and others have: give one to all, or to none")
        for label, count in Counter(each.shown_label for each in self.mixture).items():
            if count > 1:
                raise ValueError(f"{count} datasets of data.mixture have the label {label!r}: set their label")
        for index, each in enumerate(self.mixture):
            if each.shuffle != self.shuffle:
                raise ValueError(f"data.mixture.{index}.shuffle: a mixture is shuffled as a whole, set data.shuffle")
        return self

    @property
    def sources(self) -> tuple[DatasetConfig, ...]:
        """The datasets: those of the mixture, or this one."""
        return self.mixture or (self,)

    @property
    def in_file_order(self) -> "TrainingDataConfig":
        """The same datasets one after the other, each row once per epoch."""
        plain = {"shuffle": False, "weight": None}
        mixture = tuple(each.model_copy(update=plain) for each in self.mixture)
        return self.model_copy(update={"shuffle": False, "mixture": mixture})


def check_other_rows(data: DatasetConfig, held_out: DatasetConfig) -> None:
    """Raises ValueError if evaluation uses rows of the training data. A task's row depends on seed + index, so tasks
    with close seeds share most of their rows."""
    one, other = data.task or ProceduralTask(), held_out.task or ProceduralTask()
    alike = data.kind == held_out.kind == "reasoning_gym" and data.path == held_out.path
    if alike and one.arguments == other.arguments and one.overlaps(other):
        raise ValueError(
            f"evaluation.data contains rows of data: a task's row depends on its seed plus its index, and the "
            f"seeds {other.seed} to {other.seed + other.size - 1} overlap those from {one.seed} to "
            f"{one.seed + one.size - 1}. Set evaluation.data.task.seed to {one.seed + one.size} or more"
        )
