"""Everything that can be refused is refused here: before a process starts and before anything is written."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cluster.placement import NodeFacts
from lockstep.config.cluster import RayCluster
from lockstep.config.load import apply_overrides, check_config
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.data.datasets import load_rows
from lockstep.data.documents import DocumentSource
from lockstep.data.prompts import PromptSource
from lockstep.data.samples import Prompt
from lockstep.data.turns import Turns
from lockstep.ledger.changes import Change, compare_config
from lockstep.ledger.errors import FolderExists
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.rules import INDEX
from lockstep.models.adapter_folder import settled
from lockstep.models.load import load_tokenizer
from lockstep.models.quantized import check_quantization
from lockstep.rewards.static import check_terms, compares_answers
from lockstep.rewards.terms import names
from lockstep.rollout.environments.static import told_tools
from lockstep.rollout.vllm.support import check_installed
from lockstep.run.errors import Finished, Refused
from lockstep.run.facts import HostFacts, ModelFacts, host_facts, model_facts
from lockstep.run.place import release_place
from lockstep.run.places import look_at_nodes, names_cluster, own_node, place_notes, placed
from lockstep.run.plan import Plan, make_plan, needs_engine

START = "start"
"""The ledger's event of every start of a run, with the number of rows it uses."""


@dataclass(slots=True)
class Prepared:
    """A run that may start."""

    config: SFTConfig | GRPOConfig
    folder: Path
    resuming: bool
    plan: Plan
    model: ModelFacts
    host: HostFacts
    prompts: PromptSource | None
    documents: DocumentSource | None
    held_out: list[Prompt]
    turns: Turns | None
    """Of conversations with an environment."""
    notes: list[str]
    """What the user should know before it starts."""

    @property
    def rows(self) -> int:
        """Of the data, those that are used: their number decides the order of all of them."""
        source = self.prompts if self.prompts is not None else self.documents
        return 0 if source is None else len(source)


def prepare(
    config: SFTConfig | GRPOConfig | None,
    resume: Path | None,
    overrides: Sequence[str] = (),
    host: HostFacts | None = None,
    look: Callable[[RayCluster], list[NodeFacts] | None] = look_at_nodes,
) -> Prepared:
    """Checks a run whole.

    Args:
        config: of the file; None where a run goes on with its own.
        resume: folder of the run to go on with.
        overrides: applied to the run's own config, where there is no file.
        host: to plan for, instead of this one.
        look: how the nodes of a running Ray cluster are found; None where they are not known.

    Raises:
        Refused, ConfigError, LedgerError, DataError, ModelError, InfeasibleError, PlacementError,
            VllmUnsupported, ConnectionError: what is wrong and what to do.
        Finished: there is nothing left to do.
    """
    notes: list[str] = []
    if config is not None:
        config = settled_adapter(config)
    if resume is not None:
        config, notes = _resumed(config, resume, overrides)
    if config is None:
        raise Refused("name a file to train from, or a run with --resume")
    folder = resume or Path(config.folder) / config.name
    if resume is None and folder.exists():
        raise FolderExists(folder, is_run=(folder / INDEX).is_file())
    nodes = None
    if host is None:
        if config.cluster.kind == "ray" and names_cluster(config.cluster):
            nodes = look(config.cluster)
        host = host_facts(config.cluster, nodes)
        check_quantization(config.model, host.device)
        if needs_engine(config) and config.rollout.engine.kind == "vllm" and config.cluster.kind == "local":
            check_installed()
    model = model_facts(config.model, host.device)
    plan = make_plan(config, model, host)
    notes += place_notes(config)
    if config.cluster.kind == "ray":
        own = not names_cluster(config.cluster)
        plan = placed(plan, config.placement, [own_node(plan.wanted, host)] if own else nodes)
        notes += [plan.busy] if plan.busy else []
    if config.reward is not None:
        check_terms(config.reward.terms)
        _must_have_metric(config)
    if config.tracking:
        from lockstep.report.trackers import check_trackers  # brings what few runs need

        check_trackers(config.tracking)
    prepared = Prepared(config, folder, resume is not None, plan, model, host, *_sources(config, model), notes)
    if prepared.resuming:
        _must_be_the_same_data(prepared)
    return prepared


def settled_adapter(config: SFTConfig | GRPOConfig) -> SFTConfig | GRPOConfig:
    """With the settings of the adapter that it begins from, if any. Raises ModelError where they contradict."""
    if config.model.adapter is None:
        return config
    model = config.model.model_copy(update={"adapter": settled(config.model.adapter)})
    return config.model_copy(update={"model": model})


def _must_have_metric(config: SFTConfig | GRPOConfig) -> None:
    """Raises Refused where groups are to be filtered by a reward term that there is not."""
    if config.recipe != "grpo" or not config.filter_groups.enable:
        return
    known = ["reward", *names(config.reward.terms)]
    if config.filter_groups.metric not in known:
        raise Refused(f"filter_groups.metric {config.filter_groups.metric!r} is none of {', '.join(known)}")


def _sources(
    config: SFTConfig | GRPOConfig, model: ModelFacts
) -> tuple[PromptSource | None, DocumentSource | None, list[Prompt], Turns | None]:
    tokenizer = load_tokenizer(config.model)
    environment = config.rollout.environment if needs_engine(config) else None
    tools = told_tools(environment) if environment is not None else []
    open_turn = environment is None or environment.path is None
    turns = Turns(tokenizer, config.data, tools) if environment is not None else None
    rows = load_rows(config.data)
    compares = compares_answers(config.reward.terms) if config.reward is not None else False
    prompts: PromptSource | None = None
    documents: DocumentSource | None = None
    if config.recipe == "grpo":
        longest = min(model.context, config.token_budget) - config.rollout.sampling.max_tokens
        prompts = PromptSource(rows, config.data, tokenizer, config.seed, longest, compares, tools, open_turn)
    else:
        longest = min(model.context, config.token_budget)
        documents = DocumentSource(rows, config.data, tokenizer, config.seed, longest, config.train_on_prompt)
    held_out: list[Prompt] = []
    if config.evaluation is not None:
        # Never shuffled: with `prompts` or `limit`, runs of other seeds are measured on the same rows.
        data = config.evaluation.data.model_copy(update={"shuffle": False})
        room = model.context - (config.evaluation.sampling or config.rollout.sampling).max_tokens
        source = PromptSource(load_rows(data), data, tokenizer, config.seed, room, compares, tools, open_turn)
        held_out = source.take(0, min(len(source), config.evaluation.prompts or len(source)))
    if turns is not None:
        first = prompts.take(0, 1) if prompts is not None else held_out[:1]
        for prompt in first:
            _must_be_told(turns, prompt, tools)
            turns.check(prompt, "tool" if open_turn else "user")
    return prompts, documents, held_out, turns


def _must_be_told(turns: Turns, prompt: Prompt, tools: Sequence[dict[str, Any]]) -> None:
    if tools and not turns.is_chat(prompt):
        raise Refused(
            "the model is told of rollout.environment.tools by the chat template, but the prompts are plain text: set "
            "data.chat=true, or describe the tools in data.template and set rollout.environment.parser=regex"
        )


def _resumed(
    config: SFTConfig | GRPOConfig | None, folder: Path, overrides: Sequence[str]
) -> tuple[SFTConfig | GRPOConfig, list[str]]:
    """The config a run goes on with, and what is to be said about it; refuses what would change its result."""
    with Ledger.reader(folder) as ledger:
        old: dict[str, Any] = ledger.config()
        if config is None:
            config = check_config(apply_overrides(old, overrides), source=str(folder))
        changes = compare_config(old, config.model_dump(mode="json"))
        refused = [str(change) for change in changes if change.changes_result]
        if refused:
            raise Refused(
                f"{folder} cannot go on with these changes, they would change its result: {'; '.join(refused)}. "
                "Start a new run for them (name=...)"
            )
        _must_have_something_left(config, ledger)
    return config, _notes(changes)


def _must_be_the_same_data(prepared: Prepared) -> None:
    """Raises Refused where rows came or went since the run began: it would use some twice, and others never."""
    with Ledger.reader(prepared.folder) as ledger:
        begun = [int(event.fields["rows"]) for event in ledger.events() if event.kind == START]
    if begun and begun[0] != prepared.rows:
        raise Refused(
            f"{prepared.config.data.path} had {begun[0]} rows to use when {prepared.folder} began, and has "
            f"{prepared.rows} now, which come in another order: restore the data, or start a new run (name=...)"
        )


def _must_have_something_left(config: SFTConfig | GRPOConfig, ledger: Ledger) -> None:
    """Raises Finished where the newest attempt came to its end and wrote its summary, the last thing it does."""
    try:
        summary = json.loads((ledger.folder / "summary.json").read_text())
        attempt, reason, done = summary["generation"], summary["exit_reason"], summary["steps"]["done"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    exports = [ledger.folder / name for name in config.exports]
    exported = all(export.is_dir() for export in exports)
    if (attempt, reason) == (ledger.generation, "finished") and done >= config.steps and exported:
        release_place(ledger.folder)
        where = f", its model is in {' and '.join(map(str, exports))}" if exports else ""
        raise Finished(f"{ledger.folder} is finished: {done} of {config.steps} steps{where}. For more, raise steps")


def _notes(changes: Sequence[Change]) -> list[str]:
    bits = [str(change) for change in changes if change.changes_bits]
    if not bits:
        return []
    return [
        f"{'; '.join(bits)}: the order of additions changes, so the result will not be bitwise that of the unchanged "
        "run, but the same to about 1e-5"
    ]
