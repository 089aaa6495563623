"""What `--dry-run` shows: the whole preparation where everything can be looked up, else what is known without it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.cluster.placement import NodeFacts
from lockstep.config.cluster import RayCluster
from lockstep.config.data import Dataset
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.data.datasets import HubDataUnreachable, load_rows
from lockstep.models.errors import HubUnreachable
from lockstep.rewards.static import check_terms
from lockstep.rollout.environments.static import told_tools
from lockstep.run.facts import UNLIMITED, HostFacts, ModelFacts, host_facts, model_facts
from lockstep.run.places import look_at_nodes, placed
from lockstep.run.plan import Plan, make_plan
from lockstep.run.prepare import prepare, settled_adapter


@dataclass(frozen=True, slots=True)
class Survey:
    """A plan, and what it does not know."""

    config: SFTConfig | GRPOConfig
    plan: Plan
    model: ModelFacts | None
    """None where the model could not be looked up."""
    notes: list[str]


def survey(
    config: SFTConfig | GRPOConfig | None, resume: Path | None, overrides: Sequence[str] = (), gpus: int | None = None
) -> Survey:
    """Prepares a run without starting it. A Ray cluster that cannot be reached is no error here either.

    A model or data set of the hub that is neither on this machine nor can be asked for now is no error here: the plan
    says what it does not know because of it. Everything that is wrong is refused as by `prepare`.

    Args:
        gpus: plan for a host with so many, instead of this one.
    """
    host = None if gpus is None else _host_with(gpus)
    notes = []
    if gpus is not None:
        notes.append(f"planned for a host with {gpus} GPUs: what memory and how many cores it has is not known here")

    def look(cluster: RayCluster) -> list[NodeFacts] | None:
        try:
            return look_at_nodes(cluster)
        except ConnectionError as error:
            notes.append(f"nodes are not known: {error}")
            return None

    try:
        prepared = prepare(config, resume, overrides, host, look)
    except (HubUnreachable, HubDataUnreachable):
        if config is None:
            raise
        return _what_is_known(config, host or host_facts(config.cluster), notes)
    return Survey(prepared.config, prepared.plan, prepared.model, [*notes, *prepared.notes])


def _what_is_known(config: SFTConfig | GRPOConfig, host: HostFacts, notes: list[str]) -> Survey:
    model: ModelFacts | None = None
    try:
        config = settled_adapter(config)
        model = model_facts(config.model, host.device)
    except HubUnreachable as error:
        notes.append(f"not looked up: {error}. Memory and collectives are not known, and no prompt was measured")
    plan = placed(make_plan(config, model, host), config.placement, None)
    if config.reward is not None:
        check_terms(config.reward.terms)
    if config.rollout.environment is not None:
        told_tools(config.rollout.environment)
    for name, data in _data(config):
        try:
            rows = load_rows(data)
            notes.append(f"{name}: {len(rows)} rows, with the columns {', '.join(rows.columns)}; none was tokenized")
        except HubDataUnreachable as error:
            notes.append(f"not looked up: {name} = {error}")
    return Survey(config, plan, model, notes)


def _data(config: SFTConfig | GRPOConfig) -> list[tuple[str, Dataset]]:
    found = [("data", config.data)]
    return found if config.evaluation is None else [*found, ("evaluation.data", config.evaluation.data)]


def _host_with(gpus: int) -> HostFacts:
    cores = len(os.sched_getaffinity(0))
    return HostFacts(cores=cores, memory=UNLIMITED, shared_memory=UNLIMITED, device="cuda", gpus=gpus)
