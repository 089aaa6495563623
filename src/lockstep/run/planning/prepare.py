"""Checks a whole run before any process starts and before anything is written."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.base.text import count_noun
from lockstep.cluster.placement.bundles import NodeResources
from lockstep.config.cluster import PlacementConfig, RayClusterConfig
from lockstep.config.data import DatasetConfig
from lockstep.config.loader import accepts_overrides
from lockstep.config.model import ModelConfig
from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.data.dataset_rows import HubDataUnreachable
from lockstep.data.datasets import load_rows
from lockstep.data.images.image_store import IMAGE_FOLDER
from lockstep.data.mixture import mixture_weights
from lockstep.ledger.errors import FolderExists
from lockstep.ledger.run_folder import INDEX_FILE, holds_only_inputs
from lockstep.models.adapter_folder import resolve_adapter
from lockstep.models.errors import HubUnreachable, ModelError, naming_fields_in
from lockstep.models.model_facts import ModelFacts, model_facts
from lockstep.models.model_loader import check_quantization, load_tokenizer
from lockstep.report.command_events import TERMINAL, CommandEvents
from lockstep.report.step_callbacks import OnStep
from lockstep.rewards.reward_terms import check_terms, term_names
from lockstep.rollout.environments.tools import chat_template_tools
from lockstep.rollout.vllm.vllm_setup import check_installed
from lockstep.run.errors import RunRefused
from lockstep.run.planning.compile_choice import choose_compilation
from lockstep.run.planning.input_files import check_inputs
from lockstep.run.planning.parent_run import ParentRun, find_parent
from lockstep.run.planning.resources import (
    UNLIMITED,
    HostResources,
    host_resources,
    list_cluster_nodes,
    local_node,
    uses_existing_cluster,
)
from lockstep.run.planning.resumed_run import check_same_data, earlier_starts, resumed_config
from lockstep.run.planning.run_data import RunData, open_run_data
from lockstep.run.planning.run_plan import RunPlan, assign_nodes, make_plan
from lockstep.run.planning.served_models import differing_tokens, served_models
from lockstep.watch.agent.prepared_agent import PreparedAgent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(slots=True)
class PreparedRun:
    """A run that passed all checks and may start."""

    config: RunConfig
    folder: Path
    resuming: bool
    plan: RunPlan
    model: ModelFacts
    host: HostResources
    data: RunData
    notes: list[str]
    """Notes for the user before the run starts."""
    other_models: dict[str, ModelFacts] = field(default_factory=dict)
    """The sizes of the models besides the policy, by role."""
    agent: PreparedAgent | None = None
    """A process that waits to become the run's agent; a new one is started if None."""
    parent: ParentRun | None = None
    """The checkpoint of another run that a new run starts from."""
    callbacks: Sequence[OnStep] = ()
    """Called after every step."""
    events: CommandEvents = TERMINAL
    """Where the run reports what it does."""
    row_digests: Sequence[str] = ()
    """Of each dataset, a digest of the content of some rows; empty if they are a function of the config."""

    @property
    def images(self) -> Path | None:
        """The folder of the run's prepared images; None if its data has none."""
        return (self.folder / IMAGE_FOLDER).absolute() if self.data.has_images else None

    @property
    def rows(self) -> int:
        """The number of dataset rows in use."""
        return len(self.data.samples)

    @property
    def row_counts(self) -> list[int]:
        """The number of rows in use of each dataset, which determines their order."""
        return [len(part) for part in self.data.samples.parts]


def prepare_run(
    config: RunConfig | None,
    resume: Path | None,
    overrides: Sequence[str] = (),
    host: HostResources | None = None,
    list_nodes: Callable[[RayClusterConfig], list[NodeResources] | None] = list_cluster_nodes,
    parent: str | None = None,
) -> PreparedRun:
    """Checks a whole run.

    Args:
        config: the config from a file; None to resume a run with its stored config.
        resume: folder of the run to resume.
        overrides: changes to the stored config of a resumed run; only if `config` is None.
        host: resources to plan for, instead of those of this host.
        list_nodes: returns the nodes of an existing Ray cluster; None if they are unknown.
        parent: start from the checkpoint `RUN@STEP` of another run.

    Raises:
        RunRefused, ConfigError, LedgerError, DataError, ModelError, TrainerUnsupported, InfeasibleError,
            PlacementError, VllmUnsupported, ConnectionError: the run cannot start; says what is wrong and what to do.
        RunFinished: the run to resume has done all its steps.
    """
    notes: list[str] = []
    if config is not None:
        config = resolve_adapters(config)
    if resume is not None:
        check_inputs(resume)
        config, notes = resumed_config(config, resume, overrides)
    if config is None:
        raise RunRefused("name a file to train from, or a run with --resume")
    from_run = None if parent is None else find_parent(parent, config)
    if from_run is not None:
        notes.append(from_run.note(config))
    folder = resume or Path(config.folder) / config.name
    if resume is None and folder.exists() and not holds_only_inputs(folder):
        raise FolderExists(folder, is_run=(folder / INDEX_FILE).is_file())
    nodes = None
    if host is None:
        host, nodes = _find_resources(config, list_nodes)
    model, others = _measure_models(config, host.device)
    plan, placed_notes = _place(config, make_plan(config, model, host, others), host, nodes)
    notes += placed_notes
    _check_rewards_and_trackers(config)
    tokenizer = load_tokenizer(config.model)
    _check_tokens_of_roles(config, tokenizer, others)
    models = {config.policy.name: model, **others}
    data = open_run_data(config, models, tokenizer, (folder / IMAGE_FOLDER).absolute())
    starts = [] if resume is None else earlier_starts(resume)
    plan, compile_notes = choose_compilation(config, plan, models, data.samples, starts)
    notes += [*_mixture_notes(config, data), *_text_alone_notes(config, models, data), *compile_notes]
    prepared = PreparedRun(
        config, folder, resume is not None, plan, model, host, data, notes, others, parent=from_run,
        row_digests=[part.digest() for part in data.samples.parts],
    )  # fmt: skip
    check_same_data(folder, starts, config.data.sources, prepared.row_counts, prepared.row_digests)
    return prepared


def _place(
    config: RunConfig, plan: RunPlan, host: HostResources, nodes: list[NodeResources] | None
) -> tuple[RunPlan, list[str]]:
    """The plan with the nodes of its processes, if the cluster has several, and notes on the placement."""
    notes = placement_notes(config)
    if config.cluster.kind != "ray":
        return plan, notes
    own = not uses_existing_cluster(config.cluster)
    usable = [local_node(plan.wanted, host)] if own else nodes
    plan = assign_nodes(plan, config.placement, usable, lambda changes: accepts_overrides(config, changes))
    return plan, [*notes, *([plan.busy] if plan.busy else [])]


def _check_rewards_and_trackers(config: RunConfig) -> None:
    """Raises an error if a reward term or a tracker lacks something, or if groups are filtered by an unknown term."""
    if config.reward is not None:
        check_terms(config.reward.terms)
        _check_filter_metric(config)
    if config.tracking:
        from lockstep.report.trackers import check_trackers  # imports libraries that few runs need

        check_trackers(config.tracking)


def _find_resources(
    config: RunConfig, list_nodes: Callable[[RayClusterConfig], list[NodeResources] | None]
) -> tuple[HostResources, list[NodeResources] | None]:
    """The resources to plan for, and the nodes of an existing Ray cluster if they are known. Checks that what is
    installed can train the models and generate there."""
    nodes = None
    if config.cluster.kind == "ray" and uses_existing_cluster(config.cluster):
        nodes = list_nodes(config.cluster)
    host = host_resources(config.cluster, nodes)
    for role in config.train_roles:
        with naming_fields_in(role.section):
            check_quantization(role.model, host.device)
    if config.needs_engines and config.rollout.engine.kind == "vllm" and config.cluster.kind == "local":
        check_installed()
    return host, nodes


def trained_models(config: RunConfig, device: str) -> dict[str, ModelFacts]:
    """The sizes of the trained models, by role, the policy first. Raises ModelError if one cannot be trained."""
    found = {}
    for role in config.train_roles:
        with naming_fields_in(role.section):
            found[role.name] = model_facts(role.model, device)
    return found


def _measure_models(config: RunConfig, device: str) -> tuple[ModelFacts, dict[str, ModelFacts]]:
    """The sizes of the policy's model, and of all other trained and served models by role. Raises ModelError."""
    trained = trained_models(config, device)
    policy = trained.pop(config.train_roles[0].name)
    return policy, trained | served_models(config, policy, device)


def resolve_adapters(config: RunConfig) -> RunConfig:
    """Adds the settings of the adapters that trained roles start from. Raises ModelError if there is no such adapter,
    or if the config contradicts its settings."""
    for role in config.train_roles:
        if role.model.adapter is None:
            continue
        with naming_fields_in(role.section):
            adapter = resolve_adapter(role.model.adapter)
        config = _with_model(config, role, role.model.model_copy(update={"adapter": adapter}))
    return config


def _with_model(config: RunConfig, role: TrainRole, model: ModelConfig) -> RunConfig:
    """The config with another model of a role. A role whose section has no model has the model of another role."""
    if not role.section:
        return config.model_copy(update={"model": model})
    section = getattr(config, role.section, None)
    if section is None or not isinstance(getattr(section, "model", None), ModelConfig):
        return config
    return config.model_copy(update={role.section: section.model_copy(update={"model": model})})


def placement_notes(config: RunConfig) -> list[str]:
    """Notes on placement settings that have no effect."""
    notes = []
    for together in () if config.placement.colocate == "all" else config.placement.colocate:
        absent = [role for role in together if not config.has_placed_role(role)]
        effect = ": the set has no effect" if len(together) - len(absent) < 2 else ""
        if absent:
            notes.append(f"placement.colocate names {', '.join(absent)}, of which this run has no processes{effect}")
    others = config.placement.model_copy(update={"colocate": ()})
    if config.cluster.kind != "ray" and others != PlacementConfig():
        notes.append("of placement, only `colocate` applies outside Ray: on this host, processes take the GPUs in turn")
    return notes


def _mixture_notes(config: RunConfig, data: RunData) -> list[str]:
    """Says how many samples each dataset of a mixture has, and which share of the training."""
    if not config.data.mixture:
        return []
    counts = [len(part) for part in data.samples.parts]
    weights = mixture_weights(config.data.mixture) or counts
    parts = [
        f"{part.shown_label} {count_noun(count, 'row')} ({weight / sum(weights):.1%} of the samples)"
        for part, count, weight in zip(config.data.mixture, counts, weights, strict=True)
    ]
    return [f"data is a mixture: {', '.join(parts)}"]


def _text_alone_notes(config: RunConfig, models: Mapping[str, ModelFacts], data: RunData) -> list[str]:
    """Says which parts of vision-language models no row calls, if the data has no images. Raises ModelError if a model
    would train no others."""
    notes = []
    for role in config.train_roles:
        facts, vision = models[role.name], role.model.vision
        if data.has_images or facts.vision is None or not facts.changing - {"language"}:
            continue
        if "language" not in facts.changing:
            field: str = "model.vision.language.train"
            value: object = vision.language.train
            if vision.language.train and role.model.adapter is not None:
                field, value = "model.adapter.target_modules", role.model.adapter.target_modules
            problem = "the data has no images, and only what computes images would be trained"
            raise ModelError(role.field(field), value, problem, "train the language model, or take data with images")
        unused = " ".join(f"{role.field(f'model.vision.{part}.train')}=false" for part in ("tower", "projector"))
        notes.append(
            f"the data has no images: tower and projector of {role.model.path} are never called and stay as they are; "
            f"{unused} saves the memory of their optimizer state"
        )
    return notes


def _check_filter_metric(config: RunConfig) -> None:
    """Raises RunRefused if groups are filtered by a reward term that does not exist."""
    if config.generation is None or not config.generation.filter_groups.enable or config.reward is None:
        return
    known, metric = ["reward", *term_names(config.reward.terms)], config.generation.filter_groups.metric
    if metric not in known:
        raise RunRefused(f"filter_groups.metric {metric!r} is not one of {', '.join(known)}")


def _check_tokens_of_roles(config: RunConfig, tokenizer: "Tokenizer", others: Mapping[str, ModelFacts]) -> None:
    """Raises ModelError if a trained model has no embedding for some of the tokens of the policy's tokenizer, on which
    all are trained, or is from a folder in which they have other ids."""
    tokens = len(tokenizer)
    for role in config.train_roles[1:]:
        known, problem = others[role.name].vocabulary, ""
        if known < tokens:
            problem = f"it has embeddings for {known} tokens, and the tokenizer of {config.model.path} has {tokens}"
        elif role.model.path != config.model.path and (differing := _differing_tokens(config, role, tokenizer)):
            problem = (
                f"its tokenizer differs from the policy's, on whose tokens it is trained, in {len(differing)} tokens, "
                f"such as {differing[0]!r}"
            )
        if problem:
            remedy = f"take a model with this tokenizer, such as the policy's ({role.field('model')}=policy)"
            has_section = isinstance(getattr(config, role.section).model, ModelConfig)
            field = role.field("model.path" if has_section else "model")
            raise ModelError(field, role.model.path, problem, remedy)


def _differing_tokens(config: RunConfig, role: TrainRole, tokenizer: "Tokenizer") -> list[str]:
    """The tokens that have another id in the tokenizer of the model that the role starts from; none if it has no
    tokenizer."""
    try:
        own = load_tokenizer(role.model.model_copy(update={"tokenizer": config.starting_tokenizer(role)}))
    except ModelError:
        return []
    return differing_tokens(tokenizer, own)


@dataclass(frozen=True, slots=True)
class DryRun:
    """A plan for `--dry-run`, with notes on what is unknown."""

    config: RunConfig
    plan: RunPlan
    model: ModelFacts | None
    """The sizes of the model; None if the model was not reachable."""
    notes: list[str]
    other_models: dict[str, ModelFacts] = field(default_factory=dict)
    data: RunData | None = None
    """The opened data; None if model or data were not reachable."""


def dry_run(
    config: RunConfig | None,
    resume: Path | None,
    overrides: Sequence[str] = (),
    gpus: int | None = None,
    parent: str | None = None,
) -> DryRun:
    """Prepares a run without starting it, as far as possible: an unreachable Ray cluster, and a model or dataset that
    is neither on this machine nor reachable on the hub, only lead to notes on what is unknown. Other problems raise
    errors as in `prepare_run`.

    Args:
        gpus: plan for a host with this many GPUs, instead of this host.
    """
    host = None if gpus is None else _host_with(gpus)
    notes = []
    if gpus is not None:
        notes.append(f"planned for a host with {count_noun(gpus, 'GPU')}, whose memory and cores are unknown")

    def list_nodes(cluster: RayClusterConfig) -> list[NodeResources] | None:
        try:
            return list_cluster_nodes(cluster)
        except ConnectionError as error:
            notes.append(f"nodes are unknown: {error}")
            return None

    try:
        prepared = prepare_run(config, resume, overrides, host, list_nodes, parent)
    except (HubUnreachable, HubDataUnreachable):
        if config is None:
            raise
        return _plan_without_hub(config, host or host_resources(config.cluster), notes)
    notes += prepared.notes
    return DryRun(prepared.config, prepared.plan, prepared.model, notes, prepared.other_models, prepared.data)


def _plan_without_hub(config: RunConfig, host: HostResources, notes: list[str]) -> DryRun:
    model: ModelFacts | None = None
    others: dict[str, ModelFacts] = {}
    try:
        config = resolve_adapters(config)
        model, others = _measure_models(config, host.device)
    except HubUnreachable as error:
        notes.append(f"not looked up: {error}. Memory and collectives are unknown, and no prompt was measured")
    plan = assign_nodes(make_plan(config, model, host, others), config.placement, None)
    if config.reward is not None:
        check_terms(config.reward.terms)
    if config.rollout.environment is not None:
        chat_template_tools(config.rollout.environment)
    for name, data in _datasets(config):
        try:
            rows = load_rows(data)
            found = f"{count_noun(len(rows), 'row')}, with the columns {', '.join(rows.columns)}"
            notes.append(f"{name}: {found}; none was tokenized")
        except HubDataUnreachable as error:
            notes.append(f"not looked up: {name} = {error}")
    return DryRun(config, plan, model, notes, others)


def _datasets(config: RunConfig) -> list[tuple[str, DatasetConfig]]:
    mixed = enumerate(config.data.mixture)
    found: list[tuple[str, DatasetConfig]] = [(f"data.mixture.{index}", each) for index, each in mixed]
    found = found or [("data", config.data)]
    return found if config.evaluation is None else [*found, ("evaluation.data", config.evaluation.data)]


def _host_with(gpus: int) -> HostResources:
    cores = len(os.sched_getaffinity(0))
    return HostResources(cores=cores, memory=UNLIMITED, shared_memory=UNLIMITED, device="cuda", gpus=gpus)
