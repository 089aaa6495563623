"""Checks a whole run before any process starts and before anything is written."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cluster.placement.bundles import NodeResources
from lockstep.config.cluster import PlacementConfig, RayClusterConfig
from lockstep.config.data import DatasetConfig
from lockstep.config.loader import apply_overrides, check_config
from lockstep.config.model import ModelConfig
from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.data.chat_templates import TurnTokenizer
from lockstep.data.dataset_rows import HubDataUnreachable
from lockstep.data.datasets import load_rows
from lockstep.data.sample_sources import SampleSource, SourceOptions, open_source
from lockstep.data.samples import Prompt
from lockstep.ledger.config_changes import ConfigChange, compare_config
from lockstep.ledger.errors import FolderExists
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_folder import INDEX_FILE
from lockstep.models.adapter_folder import resolve_adapter
from lockstep.models.errors import HubUnreachable, ModelError, naming_fields_in
from lockstep.models.model_facts import ModelFacts, model_facts
from lockstep.models.model_loader import check_quantization, load_tokenizer
from lockstep.rewards.reward_terms import check_terms, needs_answers, term_names
from lockstep.rollout.environments.tools import chat_template_tools
from lockstep.rollout.vllm.vllm_setup import check_installed
from lockstep.run.errors import RunFinished, RunRefused
from lockstep.run.planning.resources import (
    UNLIMITED,
    HostResources,
    host_resources,
    list_cluster_nodes,
    local_node,
    uses_existing_cluster,
)
from lockstep.run.planning.run_plan import RunPlan, assign_nodes, make_plan
from lockstep.run.planning.served_models import served_models
from lockstep.run.run_id import release_shared_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

START_EVENT = "start"
"""The ledger event of every start of a run, with the number of rows in use."""


@dataclass(slots=True)
class PreparedRun:
    """A run that passed all checks and may start."""

    config: RunConfig
    folder: Path
    resuming: bool
    plan: RunPlan
    model: ModelFacts
    host: HostResources
    samples: SampleSource[Any]
    """What the recipe trains on, or what engines complete."""
    held_out: list[Prompt]
    turns: TurnTokenizer | None
    """Tokenizes the turns of conversations; None without an environment."""
    notes: list[str]
    """Notes for the user before the run starts."""
    other_models: dict[str, ModelFacts] = field(default_factory=dict)
    """The sizes of the models besides the policy, by role."""

    @property
    def rows(self) -> int:
        """The number of dataset rows in use, which determines their order."""
        return len(self.samples)


def prepare_run(
    config: RunConfig | None,
    resume: Path | None,
    overrides: Sequence[str] = (),
    host: HostResources | None = None,
    list_nodes: Callable[[RayClusterConfig], list[NodeResources] | None] = list_cluster_nodes,
) -> PreparedRun:
    """Checks a whole run.

    Args:
        config: the config from a file; None to resume a run with its stored config.
        resume: folder of the run to resume.
        overrides: changes to the stored config of a resumed run; only if `config` is None.
        host: resources to plan for, instead of those of this host.
        list_nodes: returns the nodes of an existing Ray cluster; None if they are unknown.

    Raises:
        RunRefused, ConfigError, LedgerError, DataError, ModelError, TrainerUnsupported, InfeasibleError,
            PlacementError, VllmUnsupported, ConnectionError: the run cannot start; says what is wrong and what to do.
        RunFinished: the run to resume has done all its steps.
    """
    notes: list[str] = []
    if config is not None:
        config = resolve_adapters(config)
    if resume is not None:
        config, notes = _resumed_config(config, resume, overrides)
    if config is None:
        raise RunRefused("name a file to train from, or a run with --resume")
    folder = resume or Path(config.folder) / config.name
    if resume is None and folder.exists():
        raise FolderExists(folder, is_run=(folder / INDEX_FILE).is_file())
    nodes = None
    if host is None:
        if config.cluster.kind == "ray" and uses_existing_cluster(config.cluster):
            nodes = list_nodes(config.cluster)
        host = host_resources(config.cluster, nodes)
        for role in config.train_roles:
            with naming_fields_in(role.section):
                check_quantization(role.model, host.device)
        if config.needs_engines and config.rollout.engine.kind == "vllm" and config.cluster.kind == "local":
            check_installed()
    model, others = _policy_and_others(trained_models(config, host.device))
    others |= served_models(config, model, host.device)
    plan = make_plan(config, model, host, others)
    notes += placement_notes(config)
    if config.cluster.kind == "ray":
        own = not uses_existing_cluster(config.cluster)
        plan = assign_nodes(plan, config.placement, [local_node(plan.wanted, host)] if own else nodes)
        notes += [plan.busy] if plan.busy else []
    if config.reward is not None:
        check_terms(config.reward.terms)
        _check_filter_metric(config)
    if config.tracking:
        from lockstep.report.trackers import check_trackers  # imports libraries that few runs need

        check_trackers(config.tracking)
    context = min(each.context for each in (model, *others.values()))
    tokenizer = load_tokenizer(config.model)
    _check_vocabularies(config, len(tokenizer), others)
    sources = _sources(config, replace(model, context=context), tokenizer)
    prepared = PreparedRun(config, folder, resume is not None, plan, model, host, *sources, notes, others)
    if prepared.resuming:
        _check_same_data(prepared)
    return prepared


def trained_models(config: RunConfig, device: str) -> dict[str, ModelFacts]:
    """The sizes of the trained models, by role, the policy first. Raises ModelError if one cannot be trained."""
    found = {}
    for role in config.train_roles:
        with naming_fields_in(role.section):
            found[role.name] = model_facts(role.model, device)
    return found


def _policy_and_others(models: dict[str, ModelFacts]) -> tuple[ModelFacts, dict[str, ModelFacts]]:
    policy, *others = models
    return models[policy], {role: models[role] for role in others}


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
    if section is None or getattr(section, "model", None) is None:
        return config
    return config.model_copy(update={role.section: section.model_copy(update={"model": model})})


def placement_notes(config: RunConfig) -> list[str]:
    """Notes on placement settings that have no effect on one host."""
    others = config.placement.model_copy(update={"colocate": ()})
    if config.cluster.kind == "ray" or others == PlacementConfig():
        return []
    return ["of placement, only `colocate` applies outside Ray: on this host, processes take the GPUs in turn"]


def _check_filter_metric(config: RunConfig) -> None:
    """Raises RunRefused if groups are filtered by a reward term that does not exist."""
    if config.generation is None or not config.generation.filter_groups.enable or config.reward is None:
        return
    known, metric = ["reward", *term_names(config.reward.terms)], config.generation.filter_groups.metric
    if metric not in known:
        raise RunRefused(f"filter_groups.metric {metric!r} is not one of {', '.join(known)}")


def _check_vocabularies(config: RunConfig, tokens: int, others: Mapping[str, ModelFacts]) -> None:
    """Raises ModelError if a trained model has no embedding for some of the policy's `tokens`, on which all are
    trained."""
    for role in config.train_roles[1:]:
        known = others[role.name].vocabulary
        if known < tokens:
            problem = f"it has embeddings for {known} tokens, and the tokenizer of {config.model.path} has {tokens}"
            raise ModelError(role.field("model.path"), role.model.path, problem, "take a model with this tokenizer")


def _sources(
    config: RunConfig, model: ModelFacts, tokenizer: "Tokenizer"
) -> tuple[SampleSource[Any], list[Prompt], TurnTokenizer | None]:
    environment = config.rollout.environment if config.needs_engines else None
    tools = chat_template_tools(environment) if environment is not None else []
    open_turn = environment is None or environment.path is None
    turns = TurnTokenizer(tokenizer, config.data, tools) if environment is not None else None
    answers = needs_answers(config.reward.terms) if config.reward is not None else False
    longest = min(model.context, config.token_budget)
    if config.generation is not None:
        longest -= config.rollout.sampling.max_tokens
    options = SourceOptions(answers, tools, open_turn, config.learns_prompts)
    samples = open_source(
        config.data_kind, load_rows(config.data), config.data, tokenizer, config.seed, longest, options
    )
    held_out: list[Prompt] = []
    if config.evaluation is not None:
        # Never shuffled: with `prompts` or `limit`, runs of other seeds are measured on the same rows.
        data = config.evaluation.data.model_copy(update={"shuffle": False})
        room = model.context - (config.evaluation.sampling or config.rollout.sampling).max_tokens
        source = open_source("prompts", load_rows(data), data, tokenizer, config.seed, room, options)
        held_out = source.take(0, min(len(source), config.evaluation.prompts or len(source)))
    if turns is not None:
        first = samples.take(0, 1) if config.generation is not None else held_out[:1]
        for prompt in first:
            _check_tools_reach_model(turns, prompt, tools)
            turns.check(prompt, "tool" if open_turn else "user")
    return samples, held_out, turns


def _check_tools_reach_model(turns: TurnTokenizer, prompt: Prompt, tools: Sequence[dict[str, Any]]) -> None:
    if tools and not turns.is_chat(prompt):
        raise RunRefused(
            "the chat template tells the model about rollout.environment.tools, but the prompts are plain text: set "
            "data.chat=true, or describe the tools in data.template and set rollout.environment.parser=regex"
        )


def _resumed_config(config: RunConfig | None, folder: Path, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Returns the config of a resumed run, and notes on changes. Raises RunRefused for changes that would change the
    result."""
    with Ledger.reader(folder) as ledger:
        old: dict[str, Any] = ledger.config()
        if config is None:
            config = check_config(apply_overrides(old, overrides), source=str(folder))
        changes = compare_config(old, config.model_dump(mode="json"))
        refused = [str(change) for change in changes if change.changes_result]
        if refused:
            raise RunRefused(
                f"{folder} cannot resume with these changes, they would change its result: {'; '.join(refused)}. "
                "Start a new run for them (name=...)"
            )
        _check_not_finished(config, ledger)
    return config, _change_notes(changes)


def _check_same_data(prepared: PreparedRun) -> None:
    """Raises RunRefused if the number of rows has changed since the run began: rows would be repeated or skipped."""
    with Ledger.reader(prepared.folder) as ledger:
        row_counts = [int(event.fields["rows"]) for event in ledger.events() if event.kind == START_EVENT]
    if row_counts and row_counts[0] != prepared.rows:
        raise RunRefused(
            f"{prepared.config.data.path} had {row_counts[0]} rows to use when {prepared.folder} began, and has "
            f"{prepared.rows} now, in another order: restore the data, or start a new run (name=...)"
        )


def _check_not_finished(config: RunConfig, ledger: Ledger) -> None:
    """Raises RunFinished if the newest attempt did all steps and wrote its summary, which is the last file of a run."""
    try:
        summary = json.loads((ledger.folder / "summary.json").read_text())
        attempt, reason, done = summary["generation"], summary["exit_reason"], summary["steps"]["done"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    exports = [ledger.folder / each.folder for each in config.exports]
    exported = all(export.is_dir() for export in exports)
    if (attempt, reason) == (ledger.generation, "finished") and done >= config.steps and exported:
        release_shared_memory(ledger.folder)
        where = f", its model is in {' and '.join(map(str, exports))}" if exports else ""
        raise RunFinished(f"{ledger.folder} is finished: {done} of {config.steps} steps{where}. For more, raise steps")


def _change_notes(changes: Sequence[ConfigChange]) -> list[str]:
    bits = [str(change) for change in changes if change.changes_bits]
    if not bits:
        return []
    return [
        f"{'; '.join(bits)}: the order of additions changes, so the result will match that of the unchanged run to "
        "about 1e-5, not bitwise"
    ]


@dataclass(frozen=True, slots=True)
class DryRun:
    """A plan for `--dry-run`, with notes on what is unknown."""

    config: RunConfig
    plan: RunPlan
    model: ModelFacts | None
    """The sizes of the model; None if the model was not reachable."""
    notes: list[str]
    other_models: dict[str, ModelFacts] = field(default_factory=dict)


def dry_run(
    config: RunConfig | None, resume: Path | None, overrides: Sequence[str] = (), gpus: int | None = None
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
        notes.append(f"planned for a host with {gpus} GPUs, whose memory and cores are unknown")

    def list_nodes(cluster: RayClusterConfig) -> list[NodeResources] | None:
        try:
            return list_cluster_nodes(cluster)
        except ConnectionError as error:
            notes.append(f"nodes are unknown: {error}")
            return None

    try:
        prepared = prepare_run(config, resume, overrides, host, list_nodes)
    except (HubUnreachable, HubDataUnreachable):
        if config is None:
            raise
        return _plan_without_hub(config, host or host_resources(config.cluster), notes)
    return DryRun(prepared.config, prepared.plan, prepared.model, [*notes, *prepared.notes], prepared.other_models)


def _plan_without_hub(config: RunConfig, host: HostResources, notes: list[str]) -> DryRun:
    model: ModelFacts | None = None
    others: dict[str, ModelFacts] = {}
    try:
        config = resolve_adapters(config)
        model, others = _policy_and_others(trained_models(config, host.device))
        others |= served_models(config, model, host.device)
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
            notes.append(f"{name}: {len(rows)} rows, with the columns {', '.join(rows.columns)}; none was tokenized")
        except HubDataUnreachable as error:
            notes.append(f"not looked up: {name} = {error}")
    return DryRun(config, plan, model, notes, others)


def _datasets(config: RunConfig) -> list[tuple[str, DatasetConfig]]:
    found = [("data", config.data)]
    return found if config.evaluation is None else [*found, ("evaluation.data", config.evaluation.data)]


def _host_with(gpus: int) -> HostResources:
    cores = len(os.sched_getaffinity(0))
    return HostResources(cores=cores, memory=UNLIMITED, shared_memory=UNLIMITED, device="cuda", gpus=gpus)
