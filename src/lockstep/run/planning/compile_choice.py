"""Decides for `trainer.compile: auto` whether a role compiles its decoder layers.

Compiled layers do the same matrix products with fewer passes over memory, so what they save grows with the number of
values in hidden states: tokens * layers * hidden size. What compiling costs does not depend on the length of a run. The
choice follows from the config, the model, the data and the presence of a compiler, and not from the load of the host.
A resumed run keeps the choice that it began with, also if it is made longer: the other would change its last bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.data.sample_sources import SampleSource
from lockstep.models.model_facts import ModelFacts
from lockstep.run.planning.resumed_run import StartFields
from lockstep.run.planning.run_plan import RunPlan
from lockstep.train.decoder_layers import has_compiler
from lockstep.train.trainer_kinds import trainer_kind

SAVED_S, SAVED_FUSED_S = 20e-9, 4e-9
"""CPU seconds that compiled layers save for one value of a token's hidden state in one layer, forward and backward:
against the model's own layers, and against fused ones (`lockstep.models.fused_decoder`)."""
COMPILE_S, COMPILE_LAYER_S = 20.0, 2.0
"""CPU seconds that compiling takes once per rank: for the first layer, and for each further one. All of these
are on the careful side of what `python -m benchmarks.compile_cost` measures; docs/performance.md has the figures."""
MARGIN = 2.0
"""Compiling must save this many times its cost: a run may end early, and lengths are estimated."""
GENERATED_SHARE = 0.25
"""Assumed length of completions, as a share of the most that they may have."""
MEASURED_SAMPLES = 64
"""Number of samples whose lengths are measured."""


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """Whether a role's layers are compiled, and why."""

    compile: Literal["off", "layers"]
    reason: str


def choose_compilation(
    config: RunConfig,
    plan: RunPlan,
    models: Mapping[str, ModelFacts],
    data: SampleSource[Any],
    starts: Sequence[StartFields] = (),
) -> tuple[RunPlan, list[str]]:
    """Decides for every trained role whose `trainer.compile` is `auto`. Returns the plan with the choices, and what to
    tell the user about them.

    Args:
        models: the models of all trained roles, by name.
        data: what the run trains on, or what engines complete.
        starts: what the earlier starts of a resumed run recorded.
    """
    found: dict[str, Literal["off", "layers"]] = {}
    notes = []
    before = {role: choice for start in starts for role, choice in start.get("compile", {}).items()}
    for role in (role for role in config.train_roles if role.trainer.compile == "auto"):
        choice = _choose(config, plan, role, models[role.name], data, before.get(role.name))
        found[role.name] = choice.compile
        notes.append(f"{role.field('trainer.compile')} auto is {choice.compile}: {choice.reason}")
    return replace(plan, compile=found), notes


def _choose(
    config: RunConfig,
    plan: RunPlan,
    role: TrainRole,
    model: ModelFacts,
    data: SampleSource[Any],
    before: Literal["off", "layers"] | None,
) -> CompileChoice:
    obstacle = compile_obstacle(role, model, config.cluster.kind == "local", has_compiler())
    if before is not None and (obstacle is None or before == "off"):
        return CompileChoice(before, "the run began with it")
    if obstacle is not None:
        return CompileChoice("off", obstacle)
    tokens = config.steps * config.passes_of(role) * tokens_per_step(config, data) / role.trainer.ranks
    threads = max(process.threads for process in plan.processes if process.role == role.name)
    return weigh(tokens, model, threads)


def compile_obstacle(role: TrainRole, model: ModelFacts, on_this_host: bool, compiler: bool) -> str | None:
    """Says why a role's layers cannot be compiled, or why it is not known whether that pays; None if it is.

    Args:
        on_this_host: whether the ranks run on this host.
        compiler: whether this host has a C++ compiler.
    """
    obstacles = {
        f"trainer.kind {role.trainer.kind} cannot compile layers with these settings": not trainer_kind(
            role
        ).planner.compiles_layers(role),
        "the routers of compiled layers cannot be recorded": bool(model.router_aux_loss),
        f"the gain was not measured on {model.device}": model.device != "cpu",
        f"the gain was not measured in {model.dtype}": model.dtype != "float32",
        "the gain was not measured with an adapter": model.adapter is not None,
        f"attention cannot be left out of the compiled layers: {model.layout_refusal}": model.layout_refusal
        is not None,
        "ranks may run on hosts without a C++ compiler": not on_this_host,
        "there is no C++ compiler (CXX, g++, clang++)": not compiler,
    }
    return next((text for text, applies in obstacles.items() if applies), None)


def weigh(tokens: float, model: ModelFacts, threads: int) -> CompileChoice:
    """Compares what compiling saves with what it costs.

    Args:
        tokens: that one rank trains on in the whole run.
        threads: of one rank; compiling uses one.
    """
    per_value = SAVED_FUSED_S if model.fused_layers else SAVED_S
    saved = tokens * model.layers * model.hidden * per_value / threads
    cost = COMPILE_S + COMPILE_LAYER_S * (model.layers - 1)
    pays = saved >= MARGIN * cost
    figures = f"saves about {saved:,.0f} s in {tokens:,.0f} tokens per rank and costs about {cost:,.0f} s"
    if pays:
        return CompileChoice("layers", f"compiling {figures}")
    return CompileChoice("off", f"compiling {figures}: it must save {MARGIN:g} times its cost")


def tokens_per_step(config: RunConfig, data: SampleSource[Any]) -> float:
    """Estimates the tokens that a step trains on, each shared prompt once, from the lengths of the first samples."""
    samples = data.take(0, min(len(data), MEASURED_SAMPLES))
    length = float(np.mean([_sample_tokens(sample) for sample in samples]))
    wanted = config.generation
    if wanted is not None:
        completion = GENERATED_SHARE * config.rollout.sampling.max_tokens
        return wanted.prompts_per_step * length + config.sequences_per_step * completion
    per_sample = 2 if config.data_kind == "pairs" else 1
    return config.sequences_per_step / per_sample * length


def _sample_tokens(sample: Any) -> int:
    """The tokens of a document or prompt, of a pair or of a labelled completion with its prompt."""
    names = "tokens", "prompt", "chosen", "rejected", "completion"
    return sum(len(getattr(sample, name)) for name in names if hasattr(sample, name))
