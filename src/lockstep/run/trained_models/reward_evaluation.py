"""Evaluates a reward model, of a run or any other, on held-out pairs: as the run's own evaluations do."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.base.folders import scratch_dir
from lockstep.config.algorithm import BradleyTerry
from lockstep.config.data import DatasetConfig
from lockstep.config.run_config import RunConfig, ValidationConfig
from lockstep.data.samples import Pair
from lockstep.models.model_facts import model_facts
from lockstep.models.model_loader import load_tokenizer
from lockstep.run.errors import RunRefused
from lockstep.run.evaluation.evaluator import score_all_pairs
from lockstep.run.planning.run_data import open_validation
from lockstep.run.step_scores import score_update
from lockstep.run.trained_models.generation import SamplingChoice, ShowStatus
from lockstep.run.trained_models.local_reward_model import LocalRewardModel
from lockstep.run.trained_models.model_evaluation import (
    EvaluationRequest,
    ModelEvaluation,
    absolute_dataset,
    evaluate_model,
)
from lockstep.run.trained_models.model_source import load_target, model_label, target_config
from lockstep.run.trained_models.model_target import SCRATCH_PREFIX, ModelTarget, find_target
from lockstep.train.rank_service import choose_device


@dataclass(frozen=True, slots=True)
class RewardModelEvaluation:
    """The result of an evaluation of a reward model."""

    label: str
    """What was evaluated."""
    steps: int
    """After how many steps of its run; 0 if unknown."""
    pairs: list[Pair]
    scores: np.ndarray
    """float64 `[2 * pairs]`: those of pair i at 2i (the better completion) and 2i + 1."""
    metrics: dict[str, float]
    """Over all pairs. The names are those of the run's evaluations."""
    by_source: dict[str, dict[str, float]] = field(default_factory=dict)
    """Always empty: pairs have no data sources."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of pairs."""
        return {"pairs": len(self.pairs)}

    def records(self) -> list[dict[str, Any]]:
        """One JSON object per pair."""
        return [
            {"uid": pair.uid, "row": pair.row, "chosen_score": float(chosen), "rejected_score": float(rejected)}
            for pair, chosen, rejected in zip(self.pairs, self.scores[0::2], self.scores[1::2], strict=True)
        ]


Evaluation = ModelEvaluation | RewardModelEvaluation


def evaluate(request: EvaluationRequest, status: ShowStatus = lambda text: None) -> Evaluation:
    """Evaluates a model: completions of a language model, see `evaluate_model`, or the scores of a reward model on
    held-out pairs, with the metrics of its run's evaluations. Raises like `evaluate_model`."""
    target = find_target(request.name, request.step)
    with target_config(target, request.config, request.overrides) as config:
        if config.head == "score":
            return _evaluate_reward_model(request, target, config, status)
    return evaluate_model(request, status)


def _evaluate_reward_model(
    request: EvaluationRequest, target: ModelTarget, config: RunConfig, status: ShowStatus
) -> RewardModelEvaluation:
    objective = config.objective
    assert isinstance(objective, BradleyTerry)
    if request.sampling != SamplingChoice() or request.pass_reward is not None:
        raise RunRefused(
            f"{request.name} is a reward model, which scores pairs and generates nothing: leave out -n, --seed, "
            "--pass-reward and the options of sampling"
        )
    config = _with_validation(config, request)
    with scratch_dir(SCRATCH_PREFIX) as scratch:
        status(f"loading {request.name}")
        model, steps = load_target(target, config, scratch)
        tokenizer = load_tokenizer(model)
        pairs = open_validation(config, {config.policy.name: model_facts(model, "cpu")}, tokenizer)
        scorer = LocalRewardModel(model, choose_device("auto", 0), config.token_budget, tokenizer=tokenizer)
        status(f"scoring {len(pairs)} pairs")
        scores = score_all_pairs(scorer, pairs, scorer.ranks, scorer.token_budget, scorer.packing)
    update = score_update(scores, np.array([pair.margin for pair in pairs]), objective)
    label = model_label(target, steps)
    return RewardModelEvaluation(
        label, steps, pairs, scores, {f"eval/{name}": value for name, value in update.metrics.items()}
    )


def _with_validation(config: RunConfig, request: EvaluationRequest) -> RunConfig:
    """The config with the pairs of the request."""
    validation, dataset = config.held_out_samples, absolute_dataset(request.dataset)
    if dataset is not None:
        base = config.data if validation is None or validation.data is None else validation.data
        others = {name: getattr(base, name) for name in ("chat", "template", "system", "overlong")}
        validation = ValidationConfig(data=DatasetConfig(path=dataset, shuffle=False, **others))
    if validation is None:
        raise RunRefused(f"the config of {request.name} has no validation data: give --dataset, or --config with some")
    if request.limit is not None or dataset is not None:
        validation = validation.model_copy(update={"samples": request.limit})
    return config.model_copy(update={"validation": validation})
