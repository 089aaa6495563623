"""Evaluates the model of a run, or any other, with the rewards of a run: as the run's own evaluations do."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.data import DatasetConfig
from lockstep.config.reward import RewardConfig
from lockstep.config.run_config import EvaluationConfig, RunConfig
from lockstep.data.images.image_store import ImageStore
from lockstep.data.samples import Group
from lockstep.models.model_loader import load_tokenizer
from lockstep.rewards.reward_metrics import pass_at_k
from lockstep.rewards.reward_terms import check_term_columns, check_terms
from lockstep.run.errors import RunRefused
from lockstep.run.evaluation.evaluator import (
    completion_scores,
    evaluation_metrics,
    exact_matches,
    sample_groups,
    score_groups,
)
from lockstep.run.planning.run_data import open_held_out, source_options, with_images
from lockstep.run.trained_models.generation import (
    SamplingChoice,
    ShowStatus,
    completion_record,
    open_model,
    use_model,
)

SOURCE_COLUMN = "data_source"
"""The column that names the data set of a row, as in verl."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """What to evaluate."""

    name: str
    """A run, a checkpoint, an export, an adapter, a folder of Hugging Face, or a model on the hub."""
    step: str | None = None
    """The checkpoint of a run: `last`, `best` or a number of steps."""
    config: Path | None = None
    """The file with data and rewards, instead of those of the run."""
    overrides: Sequence[str] = ()
    """Changes to the config, `section.key=value`."""
    dataset: str | None = None
    """Other data: a file, a folder or a hub dataset."""
    limit: int | None = None
    """Only the first prompts."""
    sampling: SamplingChoice = field(default_factory=SamplingChoice)
    pass_reward: float | None = None
    """The reward from which on a completion passes, for pass@k; when absent, rewards that are all 0 or 1 count."""


@dataclass(frozen=True, slots=True)
class ModelEvaluation:
    """The result of an evaluation."""

    label: str
    """What was evaluated."""
    steps: int
    """After how many steps of its run; 0 if unknown."""
    groups: list[Group]
    metrics: dict[str, float]
    """Over all prompts. The names are those of the run's evaluations."""
    by_source: dict[str, dict[str, float]]
    """The same for each data source, if there are several."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of prompts, and of completions of each."""
        return {"prompts": len(self.groups), "n": len(self.groups[0].completions)}

    def records(self) -> list[dict[str, Any]]:
        """One JSON object per completion."""
        return [
            {
                "uid": group.prompt.uid,
                "row": group.prompt.row,
                **completion_record(group, k),
                "answer": group.prompt.answer,
                "scores": {name: None if np.isnan(value) else value for name, value in scores.items()},
            }
            for group in self.groups
            for k in range(len(group.completions))
            for scores in [completion_scores(group, k)]
        ]


def evaluate_model(request: EvaluationRequest, status: ShowStatus = lambda text: None) -> ModelEvaluation:
    """Samples completions of held-out prompts and scores them. With the settings of the run, the metrics are those of
    its own evaluation of the same weights.

    Raises:
        RunRefused, LedgerError, ConfigError, DataError, ModelError, CheckpointError, VllmUnsupported: the model, the
            data or the rewards cannot be used; says what is wrong and what to do.
        RemoteError, WorkerDied, RewardError, EnvironmentFailed, Stalled: generation or scoring failed.
    """
    name, overrides, dataset = request.name, request.overrides, absolute_dataset(request.dataset)
    with open_model(name, request.step, request.config, overrides, status) as loaded:
        config = _with_evaluation(loaded.config, request, dataset)
        loaded = replace(loaded, config=config)
        assert config.evaluation is not None
        sampling = config.evaluation.sampling or config.rollout.sampling
        if config.reward is not None:
            check_terms(config.reward.terms)
            _refuse_served_models(config.reward)
        tokenizer = load_tokenizer(loaded.model)
        options = with_images(source_options(config), loaded.model, tokenizer, ImageStore(loaded.images))
        limit = loaded.prompt_limit(sampling, "evaluation.data")
        held_out = open_held_out(config, config.evaluation, limit, tokenizer, options)
        prompts, columns = held_out.prompts, held_out.columns
        if config.reward is not None:
            check_term_columns(config.reward.terms, [columns])
        if config.reward is None and all(prompt.answer is None for prompt in prompts):
            raise RunRefused("there is nothing to score with: the config has no reward, and the data no answers")
        with use_model(loaded, tokenizer, prompts, options, status, [columns]) as session:
            groups = sample_groups(session.engines, prompts, sampling, request.sampling.n)
            groups = score_groups(groups, session.rewards, loaded.steps)
    metrics = group_metrics(groups, request.pass_reward)
    sources: dict[str, list[Group]] = {}
    for group in groups:
        sources.setdefault(str(group.prompt.columns.get(SOURCE_COLUMN, "")), []).append(group)
    by_source = {each: group_metrics(of, request.pass_reward) for each, of in sources.items()}
    return ModelEvaluation(loaded.label, loaded.steps, groups, metrics, by_source if len(sources) > 1 else {})


def _refuse_served_models(reward: RewardConfig) -> None:
    for index, term in reward.served_models.items():
        raise RunRefused(
            f"reward.terms.{index} is a reward model ({term.path}), and an evaluation outside of a run starts none: "
            "leave the term out, with other reward.terms"
        )


def group_metrics(groups: Sequence[Group], pass_reward: float | None = None) -> dict[str, float]:
    """The metrics of a run's evaluation, and of several completions per prompt `eval/best@N` (the mean of the best
    reward) and `eval/pass@K/<what>` for the reward, for terms and for exact match, where each is 0 or 1."""
    metrics, n = evaluation_metrics(groups), len(groups[0].completions)
    if n == 1:
        return metrics
    columns = _columns(groups)
    if "reward" in columns:
        metrics[f"eval/best@{n}"] = float(columns["reward"].max(axis=1).mean())
        if pass_reward is not None:
            columns["reward"] = (columns["reward"] >= pass_reward).astype(np.float64)
    for name, values in columns.items():
        if np.isin(values, (0.0, 1.0)).all():
            metrics |= {f"eval/pass@{k}/{name}": value for k, value in pass_at_k(values).items()}
    return metrics


def _columns(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """The scores that every completion has, float64 `[groups, completions]`."""
    found: dict[str, np.ndarray] = {}
    if all(group.rewards is not None for group in groups):
        found["reward"] = np.array([group.rewards for group in groups], np.float64)
    terms = [name for name in groups[0].breakdown if "/" not in name and all(name in each.breakdown for each in groups)]
    if len(terms) > 1:
        found |= {name: np.array([group.breakdown[name] for group in groups], np.float64) for name in terms}
    if all(group.prompt.answer is not None for group in groups):
        found["exact_match"] = np.array([exact_matches(group) for group in groups], np.float64)
    return found


def _with_evaluation(config: RunConfig, request: EvaluationRequest, dataset: str | None) -> RunConfig:
    """The config with the data, sampling and seed of the request."""
    held_out, limit = config.evaluation, request.limit
    if dataset is not None:
        base = config.data if held_out is None else held_out.data
        others = {name: getattr(base, name) for name in ("chat", "template", "system", "overlong")}
        data, prompts = DatasetConfig(path=dataset, shuffle=False, **others), limit
    elif held_out is not None:
        data, prompts = held_out.data, limit or held_out.prompts
    else:
        raise RunRefused(f"the config of {request.name} has no evaluation data: give --dataset, or --config with some")
    default = (held_out and held_out.sampling) or config.rollout.sampling
    sampling = request.sampling.over(default)
    config.rollout.check(sampling, "evaluation.sampling")
    evaluation = EvaluationConfig(data=data, prompts=prompts, sampling=sampling)
    seed = config.seed if request.sampling.seed is None else request.sampling.seed
    return config.model_copy(update={"evaluation": evaluation, "seed": seed})


def absolute_dataset(dataset: str | None) -> str | None:
    """The path of a local dataset, for another current folder; the name of one on the hub."""
    if dataset is None:
        return None
    path = Path(dataset).expanduser()
    return str(path.absolute()) if path.exists() else dataset
