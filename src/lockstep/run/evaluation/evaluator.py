"""Evaluates on held-out data: scores of sampled completions, of which a few are kept for people to read, the loss on
documents, and the accuracy on pairs."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lockstep.config.algorithm import BradleyTerry
from lockstep.config.rollout import SamplingConfig
from lockstep.config.run_config import EvaluationConfig
from lockstep.data.forest_builder import forest_from_documents, forest_of_scored_pairs
from lockstep.data.mini_batches import pack
from lockstep.data.packing import PackingMode
from lockstep.data.samples import Completion, Document, Group, Pair, Prompt, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.sqlite_index import CompletionSample
from lockstep.rewards.reward_metrics import breakdown_metrics, checked_exact_match
from lockstep.rewards.scorer_pool import ScorerPool
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.run.run_reporter import RunReporter
from lockstep.run.step_scores import TargetEvaluator, score_sequences, score_update
from lockstep.run.trainer_group import TrainerGroup

EXACT_MATCH, REWARD_MEAN, LOSS = "eval/exact_match", "eval/reward_mean", "eval/loss"
SAMPLES_AT_ONCE = 512
"""Documents or pairs that the trainer computes in one call."""
LARGEST_EXPONENT = 700.0
"""exp of more overflows."""


class Measurement(Protocol):
    """What is measured on held-out data."""

    stage: str
    """The stage of a run in which it is measured."""
    every: int
    """Steps between two measurements."""

    def measure(self, version: int) -> tuple[dict[str, float], list[CompletionSample]]:
        """Returns metrics, and samples for people to read."""


class CompletionQuality:
    """Samples completions of held-out prompts from the engines, and scores them."""

    stage = "evaluate"

    def __init__(
        self,
        config: EvaluationConfig,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        engines: RolloutClient,
        rewards: ScorerPool | None,
    ) -> None:
        self.config, self.prompts, self.every = config, list(prompts), config.every
        self.sampling = config.sampling or sampling
        self.engines, self.rewards = engines, rewards

    def measure(self, version: int) -> tuple[dict[str, float], list[CompletionSample]]:
        """See `Measurement`. The engines must serve the version."""
        groups = sample_groups(self.engines, self.prompts, self.sampling)
        groups = score_groups(groups, self.rewards, version)
        return evaluation_metrics(groups), [_sample(group) for group in groups[: self.config.samples_shown]]


class ValidationLoss:
    """Computes the loss on held-out documents with the trainer: the mean over all their learned tokens."""

    stage = "validate"

    def __init__(self, every: int, documents: Sequence[Document], trainer: TrainerGroup, token_budget: int) -> None:
        self.every, self.documents, self.trainer, self.token_budget = every, list(documents), trainer, token_budget

    def measure(self, version: int) -> tuple[dict[str, float], list[CompletionSample]]:
        """See `Measurement`."""
        total, targets = 0.0, 0
        for start in range(0, len(self.documents), SAMPLES_AT_ONCE):
            forest = forest_from_documents(self.documents[start : start + SAMPLES_AT_ONCE])
            batch = pack(forest, self.trainer.ranks, self.token_budget, self.trainer.info.packing)
            total -= float(np.sum(self.trainer.evaluate_targets(batch, "logprobs"), dtype=np.float64))
            targets += batch.targets
        loss = total / targets
        return {LOSS: loss, "eval/perplexity": math.exp(min(loss, LARGEST_EXPONENT))}, []


class PairAccuracy:
    """Computes the scores of held-out pairs with the trainer: the loss, and the share of pairs whose better completion
    has the higher score."""

    stage = "validate"

    def __init__(self, every: int, pairs: Sequence[Pair], trainer: TrainerGroup, token_budget: int) -> None:
        self.every, self.pairs, self.trainer, self.token_budget = every, list(pairs), trainer, token_budget

    def measure(self, version: int) -> tuple[dict[str, float], list[CompletionSample]]:
        """See `Measurement`."""
        trainer, objective = self.trainer, self.trainer.role.objective
        assert isinstance(objective, BradleyTerry)
        scores = score_all_pairs(trainer, self.pairs, trainer.ranks, self.token_budget, trainer.info.packing)
        margins = np.array([pair.margin for pair in self.pairs])
        return {f"eval/{name}": value for name, value in score_update(scores, margins, objective).metrics.items()}, []


def score_all_pairs(
    model: TargetEvaluator, pairs: Sequence[Pair], ranks: int, token_budget: int, packing: PackingMode
) -> np.ndarray:
    """Returns the scores of the completions of any number of pairs, as `score_sequences` does."""
    parts = []
    for start in range(0, len(pairs), SAMPLES_AT_ONCE):
        forest = forest_of_scored_pairs(pairs[start : start + SAMPLES_AT_ONCE])
        parts.append(score_sequences(model, pack(forest, ranks, token_budget, packing)))
    return np.concatenate(parts)


class Evaluator:
    """Evaluates versions of the weights: each at most once, all with the same seeds."""

    def __init__(self, measurements: Sequence[Measurement], ledger: Ledger, reporter: RunReporter) -> None:
        self.measurements, self.ledger, self.reporter = list(measurements), ledger, reporter
        self.history = {row.step + 1: row.metrics for row in ledger.evaluation_metrics()}
        """Metrics by version."""
        self._reported: set[int] = set()

    def due(self, version: int, last: bool) -> list[Measurement]:
        """What to measure: before the first step, every `every` steps and after the last; never twice."""
        if version in self.history:
            return []
        return [
            each for each in self.measurements if version == 0 or last or (each.every > 0 and version % each.every == 0)
        ]

    def metric(self, version: int) -> float | None:
        """The metric that selects the best checkpoint, of which higher is better: the mean reward if there is one, else
        exact match (which stays at zero if completions contain reasoning, as in mathematics); without completions, the
        loss on held-out documents, negated."""
        metrics = self.history.get(version, {})
        if any(isinstance(each, CompletionQuality) for each in self.measurements):
            return metrics.get(REWARD_MEAN, metrics.get(EXACT_MATCH))
        return -metrics[LOSS] if LOSS in metrics else None

    def improved(self, version: int) -> bool:
        """Whether this version was evaluated, by this attempt or an earlier one, and is better than all before it."""
        value = self.metric(version)
        earlier = [self.metric(each) for each in self.history if each < version]
        return value is not None and all(value > other for other in earlier if other is not None)

    def report_again(self, version: int) -> None:
        """Reports the evaluation of an earlier attempt again, if there is one: on resuming, the metric sinks were cut
        back to the checkpoint before it."""
        if version in self.history and version not in self._reported:
            self._reported.add(version)
            self.reporter.evaluated(version, self.history[version])

    def record(self, version: int, metrics: dict[str, float], samples: Sequence[CompletionSample]) -> None:
        """Records what was measured of a version."""
        self.history[version] = metrics
        self.ledger.record_evaluation(version - 1, metrics, samples)
        self._reported.add(version)
        self.reporter.evaluated(version, metrics)


def _sample(group: Group) -> CompletionSample:
    first = group.completions[0]
    return CompletionSample(
        uid=group.prompt.uid,
        prompt=group.prompt.text,
        completion=first.text,
        answer=group.prompt.answer,
        scores=completion_scores(group, 0),
        finish=first.finish,
        messages=None if first.episode is None else first.episode.messages,
        images=[image.description() for image in (*group.prompt.images, *first.images)],
    )


def sample_groups(
    engines: RolloutClient, prompts: Sequence[Prompt], sampling: SamplingConfig, n: int = 1
) -> list[Group]:
    """Samples `n` completions of each prompt; the first ones are the same for every `n`."""
    found = iter(engines.sample(prompts, sampling, "evaluation", n))
    return [Group(prompt, [next(found) for _ in range(n)]) for prompt in prompts]


def score_groups(groups: list[Group], rewards: ScorerPool | None, version: int) -> list[Group]:
    """Returns groups of equal size with their rewards, if there are any reward terms."""
    return groups if rewards is None else rewards.score(Rollouts(version, version, groups)).groups


def evaluation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The metrics of groups of equal size over all completions; of rewards only if all groups are scored."""
    completions: list[Completion] = [completion for group in groups for completion in group.completions]
    metrics = {
        "eval/length_mean": float(np.mean([completion.generated for completion in completions])),
        "eval/truncated": float(np.mean([completion.finish == "length" for completion in completions])),
    }
    if matches := [match for group in groups for match in exact_matches(group)]:
        metrics[EXACT_MATCH] = float(np.mean(matches))
    if all(group.rewards is not None for group in groups):
        metrics[REWARD_MEAN] = float(np.mean([group.rewards for group in groups]))
        metrics |= breakdown_metrics(groups, "eval/reward/")
    return metrics


def exact_matches(group: Group) -> list[float]:
    """Whether each completion is exactly the answer, as 0 or 1; empty if the prompt has no answer."""
    if group.prompt.answer is None:
        return []
    return [checked_exact_match(completion.text, group.prompt.answer) for completion in group.completions]


def completion_scores(group: Group, k: int) -> dict[str, float]:
    """The scores of completion `k`: each term's value (NaN where the term does not apply), the reward, and exact
    match."""
    scores = {name: float(values[k]) for name, values in group.breakdown.items()}
    if group.rewards is not None:
        scores["reward"] = float(group.rewards[k])
    if group.prompt.answer is not None:
        scores["exact_match"] = checked_exact_match(group.completions[k].text, group.prompt.answer)
    return scores
