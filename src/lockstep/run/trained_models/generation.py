"""Generates completions of given prompts with the model of a run, or with any other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from lockstep.base.folders import scratch_dir
from lockstep.config.data import DatasetConfig, TrainingDataConfig
from lockstep.config.errors import ConfigError, ConfigProblem
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import SamplingConfig
from lockstep.config.run_config import RunConfig
from lockstep.data.dataset_format import DatasetFormat
from lockstep.data.dataset_rows import DataError, DatasetRow, DatasetRows, TableRows
from lockstep.data.datasets import load_rows
from lockstep.data.images.image_store import IMAGE_FOLDER, ImageStore
from lockstep.data.mixture import open_training_source
from lockstep.data.row_lengths import ContextLimit, LengthLimit, limit_length
from lockstep.data.sample_sources import SampleSource
from lockstep.data.samples import Group, Prompt
from lockstep.data.source_factory import SourceOptions, open_source
from lockstep.models.model_loader import load_model_config, load_tokenizer, usable_context
from lockstep.rewards.scoring_messages import DataColumns
from lockstep.rollout.vllm.vllm_setup import check_installed
from lockstep.run.errors import RunRefused
from lockstep.run.evaluation.evaluator import sample_groups
from lockstep.run.planning.run_data import source_options, turn_tokenizer, with_images
from lockstep.run.run_reporter import startup_status
from lockstep.run.trained_models.engine_session import EngineSession, open_session
from lockstep.run.trained_models.model_source import load_target, model_label, target_config
from lockstep.run.trained_models.model_target import SCRATCH_PREFIX, ModelTarget, find_target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

ShowStatus = Callable[[str], None]
"""Shows what happens now; "" when nothing is waited for."""
GIVEN = "the given prompts"


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """How to sample; absent values are those of the model's run."""

    n: int = 1
    """Completions per prompt."""
    seed: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingConfig`."""

    def over(self, sampling: SamplingConfig) -> SamplingConfig:
        """Returns the sampling parameters with these values. Raises ConfigError for an invalid one."""
        try:
            return SamplingConfig.model_validate(sampling.model_dump() | dict(self.values))
        except ValidationError as error:
            problems = [
                ConfigProblem("--" + ".".join(map(str, each["loc"])).replace("_", "-"), each["msg"])
                for each in error.errors()
            ]
            raise ConfigError("command line", problems) from error


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """Which prompts to complete: exactly one of these."""

    texts: Sequence[str] = ()
    rows: Sequence[DatasetRow] = ()
    """Rows of a dataset."""
    file: Path | None = None
    """Any dataset file, or a `.txt` with one prompt per line."""
    dataset: Literal["evaluation", "train"] | None = None
    """Prompts of the run's data."""
    limit: int | None = None
    """Only the first ones of a file or dataset."""
    chat: bool | None = None
    """Whether the chat template is applied to plain texts; as in the run when absent."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that engines can load, with the run's settings for it."""

    target: ModelTarget
    config: RunConfig
    model: ModelConfig
    steps: int
    """The number of steps after which it was taken from its run; 0 if unknown."""
    scratch: Path

    @property
    def images(self) -> Path:
        """The folder of the prepared images of prompts."""
        return self.scratch / IMAGE_FOLDER

    @property
    def label(self) -> str:
        return model_label(self.target, self.steps)

    def prompt_limit(self, sampling: SamplingConfig, section: str) -> LengthLimit:
        """The longest prompt. Raises RunRefused if completions fill the context.

        Args:
            section: the section of the dataset.
        """
        context = usable_context(self.model, load_model_config(self.model))
        if sampling.max_tokens >= context:
            raise RunRefused(
                f"--max-tokens {sampling.max_tokens} leaves no room for a prompt in the context of {context} tokens: "
                f"set it to {context - 1} at most"
            )
        limit = ContextLimit(context, f"the model's context of {context} tokens", "take a model with a longer context")
        return limit_length([limit], ("--max-tokens", sampling.max_tokens), section)


@contextmanager
def open_model(
    name: str, step: str | None, file: Path | None, overrides: Sequence[str], status: ShowStatus
) -> Iterator[LoadedModel]:
    """Makes a model loadable. Inside, the current folder is that of its config; a copy of it exists until the end.

    Args:
        file: the config to use instead of the run's.
    """
    target = find_target(name, step)
    with scratch_dir(SCRATCH_PREFIX) as scratch, target_config(target, file, overrides) as config:
        if config.model.head == "score":
            raise RunRefused(f"{target.name} is a reward model: it scores texts and generates none")
        if config.rollout.engine.kind == "vllm":
            check_installed()
        status(f"loading {name}")
        model, steps = load_target(target, config, scratch)
        yield LoadedModel(target, config, model, steps, scratch)


@contextmanager
def use_model(
    loaded: LoadedModel,
    tokenizer: "Tokenizer",
    prompts: Sequence[Prompt],
    options: SourceOptions,
    status: ShowStatus,
    scored: Sequence[DataColumns] | None = None,
) -> Iterator[EngineSession]:
    """Starts what is needed to complete these prompts, and shows what is waited for.

    Args:
        scored: the columns of the prompts' dataset, if completions are to be scored.
    """
    config, started = loaded.config, list[EngineSession]()
    turns = turn_tokenizer(config, tokenizer, options, prompts[:1])

    def describe(worker: str) -> str:
        return started[0].describe_worker(worker) if started else ""

    with (
        startup_status(status, describe),
        open_session(config, loaded.model, loaded.scratch, turns, scored) as session,
    ):
        started.append(session)
        yield session


def generate(
    name: str,
    step: str | None,
    prompts: PromptChoice,
    sampling: SamplingChoice,
    overrides: Sequence[str] = (),
    status: ShowStatus = lambda text: None,
) -> tuple[str, list[Group]]:
    """Completes prompts.

    Args:
        name: a run, a checkpoint, an export, an adapter, a folder of Hugging Face, or a model on the hub.
        step: the checkpoint of a run: `last`, `best` or a number of steps.
        overrides: changes to the run's config, `section.key=value`.

    Returns:
        What generated, and the prompts with their completions.

    Raises:
        RunRefused, LedgerError, ConfigError, DataError, ModelError, CheckpointError, VllmUnsupported: the model or the
            prompts cannot be used; says what is wrong and what to do.
        RemoteError, WorkerDied, EnvironmentFailed, Stalled: generation failed.
    """
    with open_model(name, step, None, overrides, status) as loaded:
        config = loaded.config
        chosen = sampling.over(config.rollout.sampling)
        config.rollout.check(chosen, "rollout.sampling")
        tokenizer, options = load_tokenizer(loaded.model), source_options(config)
        # Rewards are not computed, so prompts need no answers.
        shown = SourceOptions(False, options.tools, options.open_turn)
        shown = with_images(shown, loaded.model, tokenizer, ImageStore(loaded.images))
        from_run = prompts.dataset == "train" and loaded.target.run is not None
        data, rows = (None, None) if from_run else _prompt_rows(loaded, prompts, bool(tokenizer.chat_template))
        common = tokenizer, config.seed, loaded.prompt_limit(chosen, "data"), shown
        if data is None or rows is None:
            source: SampleSource[Prompt] = open_training_source("prompts", _with_format(config).in_file_order, *common)
        else:
            source = open_source("prompts", rows, data, *common)
        found = source.take(0, min(len(source), prompts.limit or len(source)))
        with use_model(loaded, tokenizer, found, shown, status) as session:
            if sampling.seed is not None:
                session.engines.seed = sampling.seed
            return loaded.label, sample_groups(session.engines, found, chosen, sampling.n)


def _prompt_rows(loaded: LoadedModel, prompts: PromptChoice, has_template: bool) -> tuple[DatasetConfig, DatasetRows]:
    """The rows with the prompts, and how to read them: as those of the run."""
    config = loaded.config
    if prompts.dataset is not None:
        if prompts.dataset == "train" or config.evaluation is None or loaded.target.run is None:
            raise RunRefused(f"{loaded.target.name} has no {prompts.dataset} data: give prompts or a file")
        data = config.evaluation.data.model_copy(update={"shuffle": False})
        return data, load_rows(data)
    rows = _given_rows(prompts)
    chat = prompts.chat if prompts.chat is not None else config.data.chat
    if chat is None:
        chat = _has_conversations(config) if loaded.target.run is not None else has_template
    kept = {"template": config.data.template, "system": config.data.system}
    data = DatasetConfig(path=rows.path, shuffle=False, chat=chat or None, **kept)
    return data, rows


def _given_rows(prompts: PromptChoice) -> DatasetRows:
    texts = list(prompts.texts)
    if prompts.file is not None and prompts.file.suffix != ".txt":
        return load_rows(DatasetConfig(path=str(prompts.file)))
    if prompts.file is not None:
        try:
            texts = [line for line in prompts.file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(str(prompts.file), f"cannot be read: {error}", "Give a text file.") from error
    rows = [{"prompt": text} for text in texts] or list(prompts.rows)
    if not rows:
        raise RunRefused("there is no prompt: give some on the command line, --prompts FILE, or --dataset")
    return TableRows(GIVEN, list(dict.fromkeys(name for row in rows for name in row)), rows)


def _with_format(config: RunConfig) -> TrainingDataConfig:
    """The run's data as its recipe reads it: pairs are not detected elsewhere."""
    form = {"pairs": "preference", "labelled": "prompt_completion"}.get(config.data_kind)
    if form is None:
        return config.data
    mixture = tuple(each.model_copy(update={"format": form}) for each in config.data.mixture)
    return config.data.model_copy(update={"format": form, "mixture": mixture})


def _has_conversations(config: RunConfig) -> bool:
    """Whether the run's own prompts are conversations; False if its data is gone."""
    try:
        first = _with_format(config).sources[0]
        return isinstance(DatasetFormat(load_rows(first), first).read(0).prompt, list)
    except DataError:
        return False


def completion_record(group: Group, k: int) -> dict[str, Any]:
    """Completion `k` as a JSON object."""
    completion = group.completions[k]
    return {
        "prompt": group.prompt.text,
        "index": k,
        "completion": completion.text,
        "finish_reason": completion.finish,
        "tokens": completion.generated,
        "logprob": float(completion.own(completion.logprobs).sum()),
        **({} if completion.episode is None else {"messages": completion.episode.messages}),
    }
