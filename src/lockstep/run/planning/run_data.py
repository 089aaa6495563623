"""Opens the data of a run, and checks it against the model and the reward functions."""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.base.text import count_noun
from lockstep.config.model import ModelConfig
from lockstep.config.reward import ModelReward
from lockstep.config.run_config import EvaluationConfig, RunConfig, ValidationConfig
from lockstep.data.dataset_rows import DataError
from lockstep.data.datasets import load_rows
from lockstep.data.images.image_processor import ImageProcessor, load_image_processor
from lockstep.data.images.image_record import RECORD_FILE, ImageRecord
from lockstep.data.images.image_store import ImageStore
from lockstep.data.images.image_usage import ImageUsage, usage_of_samples
from lockstep.data.images.observation_images import ObservationImages
from lockstep.data.images.restored_images import restore_images
from lockstep.data.mixture import open_training_source
from lockstep.data.row_lengths import ContextLimit, LengthLimit, limit_length
from lockstep.data.sample_sources import SampleSource
from lockstep.data.samples import Completion, Prompt
from lockstep.data.source_factory import SourceOptions, open_source
from lockstep.data.turn_tokenizer import TurnTokenizer
from lockstep.ledger.errors import StepCorrupt
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.step_samples import image_digests
from lockstep.models.errors import naming_fields_of
from lockstep.models.hf_checkpoint import resolve_folder
from lockstep.models.model_facts import ModelFacts
from lockstep.rewards.model_reward import check_model_term
from lockstep.rewards.reward_terms import check_term_columns, data_columns, needs_answers, term_names
from lockstep.rewards.scoring_messages import DataColumns
from lockstep.rollout.environments.tools import chat_template_tools
from lockstep.run.errors import RunRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


logger = logging.getLogger(__name__)

EVALUATION = "evaluation"
"""For which the images of evaluation are kept."""


@dataclass(frozen=True, slots=True)
class HeldOutPrompts:
    """The prompts of an evaluation."""

    source: SampleSource[Prompt]
    prompts: list[Prompt]
    columns: DataColumns
    """The columns of their dataset."""


@dataclass(slots=True)
class RunData:
    """The data of a run."""

    samples: SampleSource[Any]
    """What the recipe trains on, or what engines complete."""
    held_out: list[Prompt] = field(default_factory=list)
    """The prompts of evaluation."""
    validation: list[Any] = field(default_factory=list)
    """The documents or pairs on which the objective is measured."""
    turns: TurnTokenizer | None = None
    """Tokenizes the turns of conversations; None without an environment."""
    scored: list[DataColumns] = field(default_factory=list)
    """The columns of the datasets whose completions are scored."""

    store: ImageStore | None = None
    """Where images are kept from `store_images` on."""
    taken: list[tuple[SampleSource[Any], list[Any]]] = field(default_factory=list)
    """The samples that were taken before, with their sources."""
    processor: ImageProcessor | None = None
    """Prepares images; None if the policy reads none."""

    def store_images(self) -> None:
        """Begins to keep the images of samples, and records the content of all image files unless the run began before.
        Call it when the run's folder exists. Raises DataError."""
        if self.store is None or not self.has_images:
            return
        self.store.writes = True
        if self.store.record is not None and not self.store.record.exists:
            for source in dict.fromkeys([self.samples, *(source for source, _ in self.taken)]):
                source.record_images()
            self.store.record.write()

    def take(self, step: int, start: int, count: int) -> list[Any]:
        """Returns samples for a step, whose images are kept until `release`: fewer than `count` if rows are left out
        because their images have become unusable."""
        samples = self.samples.take(start, count)
        self.hold(step, samples)
        return samples

    def left_out(self, step: int, samples: Sequence[Any], count: int) -> dict[str, float]:
        """Metrics of a step that should have had `count` samples. Raises DataError if it has none."""
        if not samples:
            problem = f"all samples of step {step + 1} are too long, or have images that have become unusable"
            raise DataError(self.samples.parts[0].path, problem, "Restore the images, or set data.measure to all.")
        return {"data/left_out": float(count - len(samples))} if len(samples) < count else {}

    def hold(self, owner: Hashable, samples: Sequence[Any]) -> None:
        """Keeps the images of samples until `release` is called for the owner."""
        if self.store is not None and self.has_images:
            self.store.hold(owner, [image.digest for each in samples for image in each.images])

    def release(self, *owners: Hashable) -> None:
        """Allows to delete the images that are only kept for these owners."""
        if self.store is not None and self.has_images:
            self.store.release(owners)

    def restore_images(self, step: int, prompts: Sequence[Prompt]) -> set[str]:
        """Keeps the images of a step's prompts, which the ledger has, and prepares those that are lost. Returns the
        uids of prompts that are left out because an image has become unusable. Raises DataError, ImageChanged."""
        self.hold(step, prompts)
        return set() if self.store is None else restore_images(prompts, self.samples, self.store)[1]

    @contextmanager
    def evaluated_images(self) -> Iterator[None]:
        """Keeps the images of evaluation, prepared, as long as the context lasts. Raises DataError, ImageChanged."""
        for source, samples in self.taken:
            self.hold(EVALUATION, samples)
            lost = set() if self.store is None else restore_images(samples, source, self.store)[1]
            if lost:
                problem = f"{count_noun(len(lost), 'sample')} of evaluation have images that changed during the run"
                raise DataError(source.parts[0].path, problem, "Restore them.")
        try:
            yield
        finally:
            self.release(EVALUATION)

    def restore_observations(self, completions: Sequence[Completion]) -> None:
        """Prepares the images of environments' answers, where they are lost. Raises ObservationImageLost."""
        if self.observations is not None:
            self.observations.restore(completions)

    def delete_observations(self, ledger: Ledger, ahead: int) -> None:
        """Deletes the images of environments' answers that no stored step needs.

        Args:
            ahead: how many steps before its own the conversations of a step may begin.
        """
        if self.observations is None:
            return
        try:
            needed = image_digests(ledger)
        except StepCorrupt as error:
            logger.warning("no images of environments' answers are deleted: %s", error)
            return
        self.observations.delete_unused(ledger.last_committed_step() + 1, needed, ahead)

    @property
    def observations(self) -> ObservationImages | None:
        """The images of environments' answers; None if they have none."""
        return None if self.turns is None else self.turns.images

    @property
    def has_images(self) -> bool:
        """Whether some samples of training or evaluation have images, or answers of the environment may have some."""
        samples = (*self.held_out, *self.validation)
        return self.samples.has_images or self.observations is not None or any(each.images for each in samples)

    @property
    def most_images(self) -> int:
        """The most images that a request may have: those of a prompt, and of the answers of an environment."""
        return self.image_usage.most_images + (0 if self.observations is None else self.observations.most)

    @property
    def image_usage(self) -> ImageUsage:
        """The images of all samples of training and evaluation."""
        return self.samples.image_usage + usage_of_samples([*self.held_out, *self.validation])


def open_run_data(config: RunConfig, models: Mapping[str, ModelFacts], tokenizer: "Tokenizer", images: Path) -> RunData:
    """Opens the data of training and evaluation.

    Args:
        models: the sizes of all models, by role.
        images: folder in which `store_images` will keep the images of samples.

    Raises:
        DataError: a dataset or row cannot be used.
        RewardFunctionError: a reward function requires a column that a dataset does not have.
        ImageProcessorError: the policy reads images, and its image processor cannot be loaded.
        RunRefused: the chat template and the tools of an environment do not fit, or a model that is trained on images
            reads none.
    """
    store = ImageStore(images, writes=False, room=int(config.model.vision.store_gb * 1e9))  # not before the run exists
    store.record = ImageRecord(images / RECORD_FILE)
    options = with_images(source_options(config), config.model, tokenizer, store)
    limit = _training_limit(config, models)
    samples = open_training_source(config.data_kind, config.data, tokenizer, config.seed, limit, options)
    data = RunData(samples, store=store, processor=options.images)
    if config.held_out_samples is not None:
        source, data.validation = _open_validation(config, config.held_out_samples, samples, models, tokenizer, options)
        data.taken.append((source, data.validation))
    if config.generation is not None:
        data.scored += [data_columns(part.path, part.columns, part.first()) for part in samples.parts]
    if config.evaluation is not None:
        prompt_limit = _evaluation_limit(config, models)
        held_out = open_held_out(config, config.evaluation, prompt_limit, tokenizer, options)
        data.held_out, data.taken = held_out.prompts, [*data.taken, (held_out.source, held_out.prompts)]
        data.scored.append(held_out.columns)
    if config.reward is not None:
        check_term_columns(config.reward.terms, data.scored)
    first = [part.first() for part in samples.parts] if config.generation is not None else data.held_out[:1]
    _check_reward_models(config, [*first, *data.held_out[:1]])
    data.turns = turn_tokenizer(config, tokenizer, options, first)
    if data.has_images:
        _check_roles_read_images(config)
        _check_image_limit(config, data)
    return data


def with_images(
    options: SourceOptions, model: ModelConfig, tokenizer: "Tokenizer", images: ImageStore | None
) -> SourceOptions:
    """The options with the image processor of a model that reads images. Raises ImageProcessorError."""
    folder = resolve_folder(model.path, model.revision, weights=False)
    return replace(options, images=load_image_processor(model, tokenizer, folder), image_store=images)


def _check_roles_read_images(config: RunConfig) -> None:
    """Raises RunRefused if a role gets rows with images and its model reads none."""
    for role in config.train_roles:
        if role.model.head == "score":
            raise RunRefused(
                f"the data has images, and the model of the {role.name}, which has a score head, reads none: take "
                "recipe sft, preference or grpo, or data without images"
            )


def _check_image_limit(config: RunConfig, data: RunData) -> None:
    """Raises RunRefused if vLLM is to expect fewer images of a prompt than there may be: it would measure its memory
    with too few, and refuse a prompt with more."""
    if not config.needs_engines or config.rollout.engine.kind != "vllm":
        return
    limit, most = config.rollout.engine.image_limit, data.most_images
    if limit is not None and limit < most:
        field = "rollout.engine.extra.limit_mm_per_prompt"
        added = most - data.image_usage.most_images
        answers = f", and answers add {added} (rollout.environment.max_images)" if added else ""
        raise RunRefused(
            f"{field} has {limit} for image, and a prompt of the data has {count_noun(most - added, 'image')}{answers}"
            f": set {field}.image to {most} or more, or leave it out (the data's number is taken)"
        )


def open_validation(config: RunConfig, models: Mapping[str, ModelFacts], tokenizer: "Tokenizer") -> list[Any]:
    """Returns the samples of `held_out_samples`, which the config has, without the training data. Raises DataError."""
    validation, options = config.held_out_samples, source_options(config)
    assert validation is not None
    samples = None
    if validation.fraction is not None:
        limit = _training_limit(config, models)
        samples = open_training_source(config.data_kind, config.data, tokenizer, config.seed, limit, options)
    return _open_validation(config, validation, samples, models, tokenizer, options)[1]


def _check_reward_models(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Checks that reward models can read the prompts. Raises ModelError, TermError."""
    if config.reward is None:
        return
    named = zip(config.reward.terms, term_names(config.reward.terms), strict=True)
    for index, (term, name) in enumerate(named):
        if isinstance(term, ModelReward):
            with naming_fields_of(f"reward.terms.{index}"):
                check_model_term(term, name, prompts)


def _open_validation(
    config: RunConfig,
    validation: ValidationConfig,
    samples: SampleSource[Any] | None,
    models: Mapping[str, ModelFacts],
    tokenizer: "Tokenizer",
    options: SourceOptions,
) -> tuple[SampleSource[Any], list[Any]]:
    """The samples on which the objective is measured, and where they are from. A share of the training data is taken
    out of `samples`, which is only needed for one."""
    if validation.fraction is not None:
        assert samples is not None
        return samples, samples.hold_out(validation.fraction)[: validation.samples]
    assert validation.data is not None
    data, limit = validation.data.model_copy(update={"shuffle": False}), _training_limit(config, models)
    limit = replace(limit, field="validation.data")
    source = open_source(config.data_kind, load_rows(data), data, tokenizer, config.seed, limit, options)
    return source, source.take(0, min(len(source), validation.samples or len(source)))


def source_options(config: RunConfig) -> SourceOptions:
    """How a run reads its samples."""
    environment = config.rollout.environment if config.needs_engines else None
    tools = chat_template_tools(environment) if environment is not None else []
    open_turn = environment is None or environment.path is None
    answers = needs_answers(config.reward.terms) if config.reward is not None else False
    return SourceOptions(answers, tools, open_turn, config.learns_prompts, config.reads_margins)


def open_held_out(
    config: RunConfig, evaluation: EvaluationConfig, limit: LengthLimit, tokenizer: "Tokenizer", options: SourceOptions
) -> HeldOutPrompts:
    """Returns the prompts of an evaluation.

    Args:
        limit: the longest prompt.
    """
    # Never shuffled: with `prompts` or `limit`, runs of other seeds are measured on the same rows.
    held_out = evaluation.data.model_copy(update={"shuffle": False})
    source = open_source("prompts", load_rows(held_out), held_out, tokenizer, config.seed, limit, options)
    wanted = min(len(source), evaluation.prompts or len(source))
    prompts = source.take(0, wanted)
    if len(prompts) < wanted:
        short = count_noun(wanted - len(prompts), "prompt")
        problem = f"evaluation is {short} short, too long or with images that changed"
        remedy = "Restore the images, or set evaluation.data.measure to all: else the scores are of other prompts."
        raise DataError(held_out.path, problem, remedy)
    return HeldOutPrompts(source, prompts, data_columns(held_out.path, source.columns, prompts[0]))


def turn_tokenizer(
    config: RunConfig, tokenizer: "Tokenizer", options: SourceOptions, first: Sequence[Prompt]
) -> TurnTokenizer | None:
    """Tokenizes the turns of conversations, as the first prompts show to be possible; None without an environment.
    Raises RunRefused, TurnError."""
    if config.rollout.environment is None or not config.needs_engines:
        return None
    if len({part.chat for part in config.data.sources}) > 1:
        raise RunRefused("with rollout.environment, all datasets of data.mixture need the same chat: set data.chat")
    images = None
    if most := config.rollout.environment.max_images:
        if options.images is None or options.image_store is None:
            problem = f"rollout.environment.max_images is {most}, and {config.model.path} reads no images"
            raise RunRefused(f"{problem}: set it to 0, or use a vision-language model")
        images = ObservationImages(options.images, options.image_store, config.data.sources[0], most)
    turns = TurnTokenizer(tokenizer, config.data.sources[0], options.tools, images)
    for prompt in first:
        _check_tools_reach_model(turns, prompt, options.tools)
        turns.check(prompt, "tool" if options.open_turn else "user")
    return turns


def _context_limits(config: RunConfig, models: Mapping[str, ModelFacts]) -> list[ContextLimit]:
    """The limits that the models set to prompt and completion together."""
    limits = []
    trained = {role.name: role for role in config.train_roles}
    others = [role.name for role in config.serve_roles if not role.fields]  # they read texts of their own
    for name, facts in models.items():
        if name in others:
            continue
        length, tokens = trained[name].model.max_length if name in trained else None, facts.context
        if length == tokens:
            setting = trained[name].field("model.max_length")
            limits.append(ContextLimit(tokens, f"{setting} {tokens}", f"raise {setting}"))
        else:
            context = "the model's context" if name == config.policy.name else f"the context of the {name}"
            limits.append(ContextLimit(tokens, f"{context} of {tokens} tokens", "take a model with a longer context"))
    return limits


def _training_limit(config: RunConfig, models: Mapping[str, ModelFacts]) -> LengthLimit:
    budget = ContextLimit(config.token_budget, f"token_budget {config.token_budget}", "raise token_budget")
    completion = None
    if config.generation is not None:
        completion = "rollout.sampling.max_tokens", config.rollout.sampling.max_tokens
    limit = limit_length([*_context_limits(config, models), budget], completion, "data")
    if config.scores_last_state:  # the target of a score has a place after the last token
        limit = replace(limit, tokens=limit.tokens - 1, reason=f"{limit.reason}, less 1 for the score")
    return limit


def _evaluation_limit(config: RunConfig, models: Mapping[str, ModelFacts]) -> LengthLimit:
    assert config.evaluation is not None
    own = config.evaluation.sampling
    name = "rollout.sampling.max_tokens" if own is None else "evaluation.sampling.max_tokens"
    completion = name, (own or config.rollout.sampling).max_tokens
    return limit_length(_context_limits(config, models), completion, "evaluation.data")


def _check_tools_reach_model(turns: TurnTokenizer, prompt: Prompt, tools: Sequence[dict[str, Any]]) -> None:
    if tools and not turns.is_chat(prompt):
        raise RunRefused(
            "the chat template tells the model about rollout.environment.tools, but the prompts are plain text: set "
            "data.chat=true, or describe the tools in data.template and set rollout.environment.parser=regex"
        )
